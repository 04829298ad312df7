"""Placement: one pure pass over all engines and experiments that says who belongs where and who has to wait.

Order is age, but who was attached when its engine went down comes back first. An experiment that an engine has been
told of stays with that engine, whose storage holds its steps. The engine has the last word: when it answers 409 it
counts as full for a while. Leaves out priorities and preemption: who has a slot keeps it until it has finished, failed
or been suspended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from clora_api.v1alpha1.conditions import Reason

Seat = tuple[str, str]  # namespace and name of an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """One engine. max_rank: None while nobody knows; strangers: slots held by what is none of our experiments."""

    namespace: str
    name: str
    labels: Mapping[str, str]
    ready: bool
    capacity: int
    max_rank: int | None
    strangers: int = 0
    full: bool = False

    @property
    def seat(self) -> Seat:
        return self.namespace, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One unfinished experiment. pinned: the engine that was told of it; holds: it has a slot there already;
    attached: it had one when the engine was last heard of; wants: nothing but a slot is missing."""

    uid: str
    namespace: str
    name: str
    created: datetime
    rank: int
    engine: str | None
    selector: Mapping[str, str] | None
    pinned: str | None = None
    holds: bool = False
    attached: bool = False
    wants: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """admitted: the experiment may be attached to `engine`. Else reason and message say what it waits for;
    position is its place in that engine's queue, from 1."""

    engine: str | None
    admitted: bool = False
    reason: Reason | None = None
    message: str = ""
    position: int | None = None


def place(rooms: Iterable[Room], claims: Iterable[Claim]) -> dict[str, Assignment]:
    """uid -> Assignment for every claim."""
    by_seat = {room.seat: room for room in rooms}
    ordered = sorted(claims, key=lambda c: (not c.attached, c.created, c.namespace, c.name))
    taken: dict[Seat, int] = defaultdict(int, {seat: room.strangers for seat, room in by_seat.items()})
    for claim in ordered:
        if claim.holds and claim.pinned:
            taken[claim.namespace, claim.pinned] += 1
    queues: dict[Seat, int] = defaultdict(int)
    return {claim.uid: _assign(claim, by_seat, taken, queues) for claim in ordered}


def _assign(claim: Claim, rooms: Mapping[Seat, Room], taken: dict[Seat, int], queues: dict[Seat, int]) -> Assignment:
    candidates = _candidates(claim, rooms)
    if not candidates:
        return Assignment(claim.pinned, reason=Reason.ENGINE_NOT_FOUND, message=_not_found(claim))
    fitting = [room for room in candidates if room.max_rank is None or claim.rank <= room.max_rank]
    if not fitting and not claim.holds:
        best = max(candidates, key=lambda room: room.max_rank or 0)
        message = f"spec.lora.rank {claim.rank} is above maxRank {best.max_rank} of LoRAEngine {best.name}"
        return Assignment(None, reason=Reason.RANK_TOO_HIGH, message=message)
    room = min(fitting or candidates, key=lambda room: _preference(room, taken, queues))
    if claim.holds:
        return Assignment(room.name, admitted=True)
    if not claim.wants:
        return Assignment(room.name)
    if not room.ready:
        message = f"LoRAEngine {room.name} is not ready"
        return Assignment(room.name, reason=Reason.WAITING_FOR_ENGINE, message=message)
    if _free(room, taken) <= 0:
        queues[room.seat] += 1
        position = queues[room.seat]
        message = f"LoRAEngine {room.name} is full: place {position} in its queue"
        return Assignment(room.name, reason=Reason.QUEUED, message=message, position=position)
    taken[room.seat] += 1
    return Assignment(room.name, admitted=True)


def _candidates(claim: Claim, rooms: Mapping[Seat, Room]) -> list[Room]:
    wanted = claim.engine or claim.pinned
    if wanted is not None:
        room = rooms.get((claim.namespace, wanted))
        return [room] if room else []
    labels = (claim.selector or {}).items()
    return [r for r in rooms.values() if r.namespace == claim.namespace and labels <= r.labels.items()]


def _free(room: Room, taken: Mapping[Seat, int]) -> int:
    return 0 if room.full else room.capacity - taken[room.seat]


def _preference(room: Room, taken: Mapping[Seat, int], queues: Mapping[Seat, int]) -> tuple[bool, bool, int, int, str]:
    """Least first: ready engines, with room, the shortest queue, the most room; then by name."""
    free = _free(room, taken)
    return not room.ready, free <= 0, queues[room.seat], -free, room.name


def _not_found(claim: Claim) -> str:
    if claim.pinned and claim.engine in (None, claim.pinned):
        return f"LoRAEngine {claim.pinned}, whose storage holds this experiment's steps, does not exist any more"
    if claim.engine:
        return f"there is no LoRAEngine {claim.engine} in namespace {claim.namespace}"
    labels = ", ".join(f"{key}={value}" for key, value in sorted((claim.selector or {}).items()))
    return f"no LoRAEngine in namespace {claim.namespace} has the labels {labels}"
