"""One hierarchy of errors, by who has to act.

UserError      the experiment's spec or data is wrong: told once, by field and remedy; never tried again as it is.
TransientError the surroundings failed (a core that is being restarted, an environment that timed out): tried again.
Everything else is a bug and fails the experiment in which it happened, not the engine.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that clora's engine raises on purpose. `reason` is a CamelCase condition reason."""

    reason = "EngineError"

    def __init__(self, message: str, *, reason: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason
        self.field = field


class UserError(EngineError):
    """The experiment cannot run as it was written; `field` is the path within its spec."""

    reason = "InvalidSpec"


class CapacityError(EngineError):
    """The engine has no room for it now."""

    reason = "CapacityExceeded"


class TransientError(EngineError):
    """May well succeed when tried again."""

    reason = "Transient"


class SamplerRestarted(TransientError):
    """vLLM's core died under the request; it is being restarted."""

    reason = "SamplerRestarted"


class TrainerDied(EngineError):
    """The trainer process is gone: this epoch of the engine ends."""

    reason = "TrainerDied"


class CheckpointError(EngineError):
    """A checkpoint is torn, foreign or unreadable; the message names the file."""

    reason = "CheckpointUnreachable"


class StorageFullError(TransientError):
    """The storage has no room for what was to be written; what is there is as it was."""

    reason = "StorageFull"


class StaleEpochError(EngineError):
    """Another, newer engine owns the experiment's folder; nothing was written."""

    reason = "StaleEpoch"


class FolderLockedError(TransientError):
    """Another process holds the lock of an experiment's folder; nothing was written."""

    reason = "FolderLocked"
