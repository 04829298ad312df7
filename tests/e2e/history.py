"""Reads what engines and the API server wrote down, and names whatever must never have happened.

It knows neither the operator nor what was done to it: engines' events (simulated_engine.py) on one side, the API
server's audit log on the other.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """at: seconds since 1970, by the machine's clock."""

    engine: str
    at: float
    epoch: int
    event: str
    uid: str
    step: int


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """A write of an experiment's status that the API server took; engine and epoch as it says, attached: whether its
    condition Attached is True."""

    at: float
    uid: str
    name: str
    attached: bool
    engine: str
    epoch: int


def engine_events(engine: str, storage: Path) -> list[EngineEvent]:
    path = storage / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [EngineEvent(engine=engine, **json.loads(line)) for line in lines]


def status_writes(audit: Iterable[dict[str, Any]], namespace: str) -> Iterator[StatusWrite]:
    for event in audit:
        reference = event.get("objectRef", {})
        wanted = (reference.get("namespace"), reference.get("resource"), reference.get("subresource"))
        if wanted != (namespace, "loraexperiments", "status") or event["responseStatus"].get("code") != 200:
            continue
        after = event["responseObject"]
        status = after.get("status", {})
        engine = status.get("engine") or {}
        attached = any(c["type"] == "Attached" and c["status"] == "True" for c in status.get("conditions", ()))
        yield StatusWrite(
            datetime.fromisoformat(event["stageTimestamp"]).timestamp(),
            after["metadata"]["uid"],
            after["metadata"]["name"],
            attached,
            engine.get("name", ""),
            engine.get("epoch", 0),
        )


def violations(events: Sequence[EngineEvent], writes: Iterable[StatusWrite]) -> list[str]:
    """A sentence for each thing that must never happen:

    an experiment on two engines; attached twice at once on one; a step committed twice, or out of order; a commit
    after the experiment was deleted; a status that says Attached before the engine of that epoch has loaded it.
    """
    found: list[str] = []
    of_uid: dict[str, list[EngineEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.at):
        of_uid[event.uid].append(event)
    for uid, its in of_uid.items():
        engines = sorted({event.engine for event in its})
        if len(engines) > 1:
            found.append(f"{uid} was on {' and '.join(engines)}")
        for engine in engines:
            found += _attachments(uid, [event for event in its if event.engine == engine])
        found += _commits(uid, its)
    loaded: dict[tuple[str, str, int], float] = {}
    for event in events:
        if event.event == "loaded":
            key = (event.uid, event.engine, event.epoch)
            loaded[key] = min(event.at, loaded.get(key, event.at))
    for write in writes:
        since = loaded.get((write.uid, write.engine, write.epoch))
        if write.attached and (since is None or since > write.at):
            found.append(f"{write.name} was called Attached to {write.engine} before its epoch {write.epoch} held it")
    return found


def _attachments(uid: str, events: Sequence[EngineEvent]) -> Iterator[str]:
    held: int | None = None  # the epoch that holds it; a new epoch holds nothing of the old one's
    for event in events:
        if event.event == "attach":
            if held == event.epoch:
                yield f"{uid} was attached to {event.engine} while it was there (epoch {event.epoch})"
            held = event.epoch
        elif event.event == "leave":
            held = None


def _commits(uid: str, events: Sequence[EngineEvent]) -> Iterator[str]:
    commits = [event for event in events if event.event == "commit"]
    for before, after in pairwise(commits):
        if after.step <= before.step:
            yield f"{uid} committed step {after.step} after step {before.step}"
        elif after.step > before.step + 1 and after.epoch == before.epoch:
            yield f"{uid} went from step {before.step} to {after.step} within epoch {after.epoch}"
    deleted = min((event.at for event in events if event.event == "delete"), default=None)
    if deleted is not None and any(event.at > deleted for event in commits):
        yield f"{uid} committed a step after it was deleted"
