"""Building and writing status: conditions, what a change of status is worth, and merge patches. Pure.

A transition is written at once; what only moves (progress, queue position) is coalesced. Leaves out what the
conditions mean: that is decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from clora_api.v1alpha1.conditions import ConditionStatus
from clora_api.v1alpha1.experiment import Condition
from clora_operator.plan import Event
from clora_operator.resources import to_rfc3339
from clora_operator.settings import Settings

MESSAGE_LENGTH = 2048
Weight = Literal["none", "queue", "progress", "transition"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said of one condition type."""

    status: ConditionStatus
    reason: str
    message: str = ""


def set_conditions(
    old: Iterable[Condition], verdicts: Mapping[str, Verdict], generation: int, now: datetime
) -> list[Condition]:
    """`old` with the verdicts worked in; lastTransitionTime moves only with the status. Foreign types stay."""
    known = {condition.type: condition for condition in old}
    for kind, verdict in verdicts.items():
        before = known.get(kind)
        kept = before is not None and before.status == verdict.status
        known[kind] = Condition(
            type=kind,
            status=verdict.status,
            reason=verdict.reason,
            message=clip(verdict.message, MESSAGE_LENGTH),
            observed_generation=generation,
            last_transition_time=before.last_transition_time if before and kept else to_rfc3339(now),
        )
    return list(known.values())


def transitions(old: Iterable[Condition], new: Iterable[Condition]) -> list[Condition]:
    """The conditions of `new` whose status or reason differs from `old`."""
    before = {c.type: (c.status, c.reason) for c in old}
    return [c for c in new if before.get(c.type) != (c.status, c.reason)]


def weigh(old: Mapping[str, Any], new: Mapping[str, Any]) -> Weight:
    """How much the difference between two statuses matters."""
    if old == new:
        return "none"
    if _essence(old) != _essence(new):
        return "transition"
    apart = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    return "queue" if apart <= {"queuePosition", "conditions"} else "progress"


def delay_of_write(weight: Weight, last_write: datetime | None, now: datetime, settings: Settings) -> float:
    """Seconds that the write has to wait for; 0: write now."""
    if weight in ("none", "transition") or last_write is None:
        return 0.0
    interval = settings.queue_write_seconds if weight == "queue" else settings.progress_write_seconds
    return max(0.0, interval - (now - last_write).total_seconds())


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7396) that turns `old` into `new`: what is gone becomes null, lists are replaced."""
    patch: dict[str, Any] = dict.fromkeys(old.keys() - new.keys())
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[key] = inner
        elif value != before:
            patch[key] = value
    return patch


def clip(text: str, length: int) -> str:
    """At most `length` characters: what an engine says must not make a status unwritable."""
    return text if len(text) <= length else text[: length - 1] + "…"


def event_of(condition: Condition, *, warning: bool) -> Event:
    kind: Literal["Normal", "Warning"] = "Warning" if warning else "Normal"
    return Event(kind, condition.reason, condition.message or condition.type)


_MOVING = {"progress", "checkpoint", "bestCheckpoint", "experiments"}


def _essence(status: Mapping[str, Any]) -> dict[str, Any]:
    """A status without what merely moves."""
    kept = {key: value for key, value in status.items() if key not in _MOVING}
    kept["conditions"] = sorted(
        (c["type"], c["status"], c["reason"], c.get("observedGeneration", 0)) for c in status.get("conditions", ())
    )
    kept["queuePosition"] = "queuePosition" in status
    if isinstance(status.get("engine"), Mapping):
        kept["engine"] = {key: status["engine"].get(key) for key in ("name", "epoch")}
    if isinstance(status.get("serving"), Mapping):  # without the version, which moves with the steps
        kept["serving"] = {key: status["serving"].get(key) for key in ("endpoint", "secretName")}
    return kept
