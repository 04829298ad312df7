"""Placement: one pure pass over all engines and experiments that says who belongs where and who has to wait.

Order is priority, then who was attached when its engine went down, then what trains before what is only served, then
age. An experiment that an engine has been told
of stays with that engine, whose storage holds its steps. The engine has the last word: when it answers 409 it counts as
full for a while. Who has a slot keeps it until it has finished, failed or been suspended, or until one of a higher
priority needs it (preemption) or its engine drains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from clora_api.v1alpha1.conditions import Reason
from clora_operator.claims import EVICTING, Assignment, Claim, Room, Seat, name_for, taken_by
from clora_operator.fit import lacks, unfit
from clora_operator.preemption import Slots
from clora_operator.tenancy import denial


def place(rooms: Iterable[Room], claims: Iterable[Claim]) -> dict[str, Assignment]:
    """uid -> Assignment for every claim."""
    slots = {room.seat: Slots(room, taken=room.strangers) for room in rooms}
    ordered = sorted(claims, key=lambda c: (-c.priority, not c.attached, c.served, c.created, c.namespace, c.name))
    for claim in ordered:
        held = slots.get((claim.engine_namespace, claim.pinned)) if claim.holds and claim.pinned else None
        if held is not None:
            refused = denial(held.room, claim)
            held.hold(replace(claim, leaving=True) if refused is not None and refused.reason in EVICTING else claim)
    return {claim.uid: _assign(claim, slots) for claim in ordered}


def _assign(claim: Claim, slots: Mapping[Seat, Slots]) -> Assignment:
    candidates = _candidates(claim, slots)
    if not candidates:
        return Assignment(claim.pinned, reason=Reason.ENGINE_NOT_FOUND, message=_not_found(claim))
    first = candidates[0].room  # the only one, where it belongs to another namespace
    refused = denial(first, claim)
    if refused is not None and (refused.reason in EVICTING or not claim.holds):
        return Assignment(first.name, reason=refused.reason, message=refused.message)
    fitting = [s for s in candidates if not lacks(s.room, claim)]
    if not fitting and not claim.holds and not claim.attached:  # else its spec of before may well run: it is asked
        return unfit([s.room for s in candidates], claim)
    chosen = min(fitting or candidates, key=lambda s: _preference(claim, s))
    engine = chosen.room.name
    if chosen.room.draining and (claim.holds or claim.wants):
        message = f"LoRAEngine {engine} drains: it takes experiments again when its spec.drain is false"
        return Assignment(engine, reason=Reason.ENGINE_DRAINING, message=message)
    if claim.holds:
        return _keep(claim, chosen)
    if not claim.wants:
        return Assignment(engine)
    if not chosen.room.ready:
        message = f"LoRAEngine {engine} is not ready"
        if chosen.room.wakes:
            chosen.admit(claim)
            what = chosen.room.trouble or "it loads its model first"
            message = f"LoRAEngine {engine}, which sleeps when it is idle, is waking: {what}"
        elif chosen.room.trouble:
            message = f"LoRAEngine {engine} is not ready: {chosen.room.trouble}"
        return Assignment(engine, reason=Reason.WAITING_FOR_ENGINE, message=message)
    if chosen.free_for(claim) <= 0:
        return _wait(claim, chosen)
    chosen.admit(claim)
    return Assignment(engine, admitted=True)


def _keep(claim: Claim, held: Slots) -> Assignment:
    engine = held.room.name
    preemptor = held.victims.get(claim.uid)
    if preemptor is None:
        return Assignment(engine, admitted=True)
    held.queued += 1
    by = _named(preemptor, claim)
    message = f"{taken_by(by)}; {_place_in_queue(held)}"
    return Assignment(engine, reason=Reason.PREEMPTED, message=message, position=held.queued, preemptor=by)


def _wait(claim: Claim, full: Slots) -> Assignment:
    limited = full.limited(claim)
    victim = full.enqueue(claim)
    message = _place_in_queue(full)
    if limited:
        message = (
            f"namespace {claim.namespace} has all the slots of LoRAEngine {full.room.name} that one may have"
            f" (maxPerNamespace {full.room.max_per_namespace}): place {full.queued} in its queue"
        )
    if victim is not None:
        message += f"; LoRAExperiment {_named(victim, claim)} of a lower priority makes room for it"
    return Assignment(full.room.name, reason=Reason.QUEUED, message=message, position=full.queued)


def _named(other: Claim, claim: Claim) -> str:
    return name_for(claim.namespace, other.namespace, other.name, other.uid)


def _place_in_queue(full: Slots) -> str:
    return f"LoRAEngine {full.room.name} is full: place {full.queued} in its queue"


def _candidates(claim: Claim, slots: Mapping[Seat, Slots]) -> list[Slots]:
    wanted = claim.engine or claim.pinned
    if wanted is not None:
        found = slots.get((claim.engine_namespace, wanted))
        return [found] if found else []
    labels = (claim.selector or {}).items()
    return [s for s in slots.values() if s.room.namespace == claim.namespace and labels <= s.room.labels.items()]


def _preference(claim: Claim, slots: Slots) -> tuple[bool, bool, bool, bool, int, int, str]:
    """Least first: engines that take anybody, with room, awake ones, or where room can be made, the shortest queue, the
    most room; then by name."""
    free, room = slots.free_for(claim), slots.room
    open_for_new = (room.ready or room.wakes) and not room.draining
    return not open_for_new, free <= 0, room.wakes, not slots.obtainable(claim), slots.queued, -free, room.name


def _not_found(claim: Claim) -> str:
    if claim.pinned and claim.engine in (None, claim.pinned):
        return f"LoRAEngine {claim.pinned}, whose storage holds this experiment's steps, does not exist any more"
    if claim.engine:
        elsewhere = ", or the operator does not watch it" if claim.engine_namespace != claim.namespace else ""
        return f"there is no LoRAEngine {claim.engine} in namespace {claim.engine_namespace}{elsewhere}"
    labels = ", ".join(f"{key}={value}" for key, value in sorted((claim.selector or {}).items()))
    return f"no LoRAEngine in namespace {claim.namespace} has the labels {labels}"
