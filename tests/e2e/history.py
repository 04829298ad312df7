"""Reads what engines and the API server wrote down, and names whatever must never have happened.

It knows neither the operator nor what was done to it: the manifests of the commits in engines' storage, by clora's own
format and without its code, and engines' events (simulated_engine.py) on one side; the API server's audit log on the
other.
"""

from __future__ import annotations

import hashlib
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
class Commit:
    """A manifest. at: seconds since 1970, by the machine's clock. metrics: the steps of the lines that it covers."""

    engine: str
    uid: str
    step: int
    epoch: int
    at: float
    metrics: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """A write of an experiment's status that the API server took; engine, epoch and committed step as it says,
    attached: whether its condition Attached is True."""

    at: float
    uid: str
    name: str
    attached: bool
    engine: str
    epoch: int
    committed: int | None = None


def engine_events(engine: str, storage: Path) -> list[EngineEvent]:
    path = storage / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [EngineEvent(engine=engine, **json.loads(line)) for line in lines]


def commits(engine: str, storage: Path) -> list[Commit]:
    """Of all experiments whose files are there, by uid and step. Raises AssertionError where a file is not the one that
    its manifest names."""
    found = []
    for path in sorted(storage.glob("experiments/*/steps/*/manifest.json")):
        folder, manifest = path.parents[2], json.loads(path.read_text())
        for name, digest in manifest["files"].items():
            assert hashlib.sha256((path.parent / name).read_bytes()).hexdigest() == digest, f"{path.parent / name}"
        assert path.parent.name == f"{manifest['step']:05d}", path
        covered = (folder / "metrics.jsonl").read_bytes()[: manifest["metrics_bytes"]]
        lines = tuple(json.loads(line)["step"] for line in covered.splitlines())
        found.append(Commit(engine, folder.name, manifest["step"], manifest["epoch"], manifest["time"], lines))
    return found


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
            (status.get("checkpoint") or {}).get("step"),
        )


def violations(events: Sequence[EngineEvent], kept: Sequence[Commit], writes: Iterable[StatusWrite]) -> list[str]:
    """A sentence for each thing that must never happen:

    an experiment on two engines; attached twice at once on one; a step committed twice, left out, or by an older epoch
    than the step before; a step whose metrics are there twice; a commit after the experiment was deleted; a status that
    says Attached before the engine of that epoch has loaded it, or names a committed step before there is its commit.
    """
    found: list[str] = []
    of_uid: dict[str, list[EngineEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.at):
        of_uid[event.uid].append(event)
    commits_of: dict[str, list[Commit]] = defaultdict(list)
    for commit in sorted(kept, key=lambda commit: (commit.step, commit.at)):
        commits_of[commit.uid].append(commit)
    for uid in sorted({*of_uid, *commits_of}):
        its, steps = of_uid[uid], commits_of[uid]
        engines = sorted({event.engine for event in its} | {commit.engine for commit in steps})
        if len(engines) > 1:
            found.append(f"{uid} was on {' and '.join(engines)}")
        for engine in engines:
            found += _attachments(uid, [event for event in its if event.engine == engine])
        found += _commits(uid, steps, min((event.at for event in its if event.event == "delete"), default=None))
    loaded: dict[tuple[str, str, int], float] = {}
    for event in events:
        if event.event == "loaded":
            key = (event.uid, event.engine, event.epoch)
            loaded[key] = min(event.at, loaded.get(key, event.at))
    committed = {(commit.uid, commit.step): commit.at for commit in kept}
    for write in writes:
        since = loaded.get((write.uid, write.engine, write.epoch))
        if write.attached and (since is None or since > write.at):
            found.append(f"{write.name} was called Attached to {write.engine} before its epoch {write.epoch} held it")
        if write.committed is None or not commits_of[write.uid]:  # its files are gone
            continue
        since = committed.get((write.uid, write.committed))
        if since is None or since > write.at:
            found.append(f"{write.name} was said to have committed step {write.committed} before it had")
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


def _commits(uid: str, steps: Sequence[Commit], deleted: float | None) -> Iterator[str]:
    """steps: in their order."""
    if steps and steps[0].step != 0:
        yield f"{uid} has step {steps[0].step} and not step 0"
    for before, after in pairwise(steps):
        if after.step == before.step:
            yield f"{uid} committed step {after.step} twice, in epochs {before.epoch} and {after.epoch}"
        elif after.step > before.step + 1:
            yield f"{uid} has step {after.step} and not step {before.step + 1}"
        elif after.epoch < before.epoch or after.at < before.at:
            yield f"{uid} committed step {after.step} in epoch {after.epoch}, before step {before.step}"
    for commit in steps:
        if commit.metrics != tuple(range(commit.step + 1)):
            yield f"{uid} has metrics of steps {list(commit.metrics)} at its commit of step {commit.step}"
        if deleted is not None and commit.at > deleted:
            yield f"{uid} committed a step after it was deleted"
