"""Which versions of which adapters the sampler holds, who leases them, and which of them may go. Pure bookkeeping.

A version takes one LoRA slot from `reserve` until `removed`. Its life:

    announce -> WAITING -> reserve -> LOADING -> commit -> LIVE (the latest of its experiment)
                                                             | a newer version is committed, or the experiment dropped
                                                             v
                                                           RETIRED -> (no lease or request) -> UNLOADING -> removed

The latest is the one that was announced last, in whatever order they are loaded. What an experiment has not committed
when it is dropped can't be committed any more. LOST is RETIRED that can't be sampled from: loading it failed, for the
first time or after a restart.
The table decides nothing about waiting, vLLM or files: those are the sampler's. One version may be published twice
(a step that was rolled back and trained again), so identity is the `lora_id`, which is never used again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from clora_engine.errors import CapacityError, EngineError
from clora_engine.types import Version

FIRST_LORA_ID = 10_001
"""vLLM's own warm-up uses the ids from 1 up to the number of slots."""


class State(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    LIVE = "live"
    RETIRED = "retired"
    LOST = "lost"
    UNLOADING = "unloading"
    REMOVED = "removed"


@dataclass(eq=False, slots=True)
class Entry:
    """One version. `leases` counts trajectory groups, `in_flight` requests. Only the table writes to it."""

    version: Version
    directory: Path
    lora_id: int
    state: State = State.WAITING
    dropped: bool = False
    leases: int = 0
    in_flight: int = 0

    @property
    def name(self) -> str:
        """Unique for ever: vLLM's prefix cache is keyed by it."""
        return f"{self.version}#{self.lora_id}"

    @property
    def idle(self) -> bool:
        return self.leases == 0 and self.in_flight == 0


@dataclass(slots=True)
class VersionTable:
    """All versions of one sampler. Methods that may free a version return those that must be unloaded now; they are
    UNLOADING from then on and keep their slots until `removed`."""

    slots: int
    _waiting: dict[int, Entry] = field(default_factory=dict)
    _entries: dict[int, Entry] = field(default_factory=dict)
    _latest: dict[str, Entry] = field(default_factory=dict)
    _next_id: int = FIRST_LORA_ID

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    @property
    def free(self) -> int:
        return self.slots - len(self._entries)

    def to_load(self) -> tuple[Entry, ...]:
        """What a new core must hold before it serves: every version that can still be asked for."""
        return tuple(e for e in self._entries.values() if e.state in (State.LIVE, State.RETIRED))

    def announce(self, version: Version, directory: Path) -> Entry:
        """A version that is about to be published; it takes no slot yet. Raises EngineError when another version lies
        in that directory."""
        if any(e.directory == directory for e in (*self._waiting.values(), *self._entries.values())):
            raise EngineError(f"another version was published from {directory.name}")
        entry = self._waiting[self._next_id] = Entry(version, directory, self._next_id)
        self._next_id += 1
        return entry

    def reserve(self, entry: Entry) -> bool:
        """Take a slot. False: all slots are taken, but waiting will free one. Raises CapacityError when waiting would
        not help, for every slot holds an experiment's latest version, and EngineError as `commit`."""
        assert entry.state is State.WAITING
        self._check_wanted(entry)
        if self.free <= 0:
            if all(e.state is State.LIVE for e in self._entries.values()):
                raise CapacityError(
                    f"all {self.slots} sampler slots hold the latest version of an experiment: "
                    "give the sampler more slots, or fewer experiments"
                )
            return False
        entry.state = State.LOADING
        self._entries[entry.lora_id] = self._waiting.pop(entry.lora_id)
        return True

    def commit(self, entry: Entry) -> tuple[Entry, ...]:
        """The version is loaded everywhere: from now on new leases of its experiment get it, unless they already get
        one that was announced later. Raises EngineError when the experiment was dropped meanwhile."""
        assert entry.state is State.LOADING
        self._check_wanted(entry)
        latest = self._latest.get(entry.version.experiment)
        if latest is not None and latest.lora_id > entry.lora_id:
            return self._retire(entry)
        entry.state = State.LIVE
        self._latest[entry.version.experiment] = entry
        return self._retire(latest)

    def abandon(self, entry: Entry) -> tuple[Entry, ...]:
        """The version is not published after all, or could not be loaded again on a restart."""
        if self._waiting.pop(entry.lora_id, None):
            entry.state = State.REMOVED
        if self._latest.get(entry.version.experiment) is entry:
            del self._latest[entry.version.experiment]
        if entry.state in (State.UNLOADING, State.REMOVED):
            return ()
        entry.state = State.LOST
        return self._collect(entry)

    def lease(self, experiment: str) -> Entry:
        """The experiment's latest version, held until `release`. Raises EngineError when it has none."""
        entry = self._latest.get(experiment)
        if entry is None:
            raise EngineError(f"experiment {experiment} has no version on the sampler", reason="NoVersion")
        entry.leases += 1
        return entry

    def release(self, entry: Entry) -> tuple[Entry, ...]:
        assert entry.leases > 0
        entry.leases -= 1
        return self._collect(entry)

    def check_loaded(self, entry: Entry) -> None:
        """Raises EngineError when the version is lost."""
        if entry.state is State.LOST:
            raise EngineError(f"{entry.version} could not be loaded again on the sampler", reason="VersionLost")

    def enter(self, entry: Entry) -> None:
        """A request with this version is made. Raises EngineError when the version is lost."""
        self.check_loaded(entry)
        assert entry.state in (State.LIVE, State.RETIRED)
        assert entry.leases > 0
        entry.in_flight += 1

    def leave(self, entry: Entry) -> tuple[Entry, ...]:
        """The request is finished, or its abort has been sent."""
        assert entry.in_flight > 0
        entry.in_flight -= 1
        return self._collect(entry)

    def drop(self, experiment: str) -> tuple[Entry, ...]:
        """No new lease of this experiment. What is leased stays until it is released; what is not committed yet can't
        be any more."""
        for entry in (*self._waiting.values(), *self._entries.values()):
            entry.dropped = entry.dropped or entry.version.experiment == experiment
        return self._retire(self._latest.pop(experiment, None))

    def removed(self, entry: Entry) -> None:
        """The version is out of vLLM; its slot is free."""
        assert entry.state is State.UNLOADING
        assert entry.idle
        entry.state = State.REMOVED
        del self._entries[entry.lora_id]

    def _check_wanted(self, entry: Entry) -> None:
        if entry.dropped:
            raise EngineError(f"the experiment was dropped while {entry.version} was being published", reason="Dropped")

    def _retire(self, entry: Entry | None) -> tuple[Entry, ...]:
        if entry is None:
            return ()
        entry.state = State.RETIRED
        return self._collect(entry)

    def _collect(self, entry: Entry) -> tuple[Entry, ...]:
        if entry.state in (State.RETIRED, State.LOST) and entry.idle:
            entry.state = State.UNLOADING
            return (entry,)
        return ()
