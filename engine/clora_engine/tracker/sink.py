"""What a tracker is to the process that feeds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """One run of one tracker.

    last: the last step that it has whole, by its own files or its server; None before the first. What it has must not
    come again, however the process before this one ended.
    """

    last: int | None

    def add(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Takes a step's numbers by name; `seconds` since the Unix epoch, when the step was made."""

    def end(self, succeeded: bool | None) -> None:
        """Ends the run; None: for now. Blocks until everything is sent."""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested configuration with dotted names, its values as text."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(value)
    return found
