"""Which engines somebody wants awake: experiments that placement puts there and that may run, and files that are to be
deleted. Pure.

Suspended and refused experiments want none, nor do those whose namespace is not let in. A draining engine takes nobody,
so it need not be awake for those who wait for its end. Leaves out what an unwanted engine does: that is decide_sleep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clora_api import FINALIZER
from clora_operator.claims import Assignment, Claim, Room, Seat, name_for
from clora_operator.observe import Memory
from clora_operator.resources import Experiment
from clora_operator.tenancy import denial


def wanted(
    rooms: Iterable[Room], claims: Iterable[Claim], found: Mapping[str, Assignment], releases: Mapping[Seat, str]
) -> dict[Seat, str]:
    """Engine -> what its people may read of the oldest experiment that wants it. `found` is placement's."""
    known, by = {room.seat: room for room in rooms}, dict(releases)
    for claim in sorted(claims, key=lambda c: (c.created, c.namespace, c.name), reverse=True):
        room = known.get((claim.engine_namespace, found[claim.uid].engine or ""))
        if claim.needs and room is not None and not room.draining and denial(room, claim) is None:
            by[room.seat] = name_for(room.namespace, claim.namespace, claim.name, claim.uid)
    return by


def releases(experiments: Iterable[Experiment], memories: Mapping[str, Memory]) -> dict[Seat, str]:
    """Of experiments that are being deleted: engines that hold files which are to be deleted too."""
    by = {}
    for experiment in experiments:
        meta, spec, told = experiment.meta, experiment.spec, experiment.status.engine
        if meta.deleted is None or FINALIZER not in meta.finalizers or told is None or spec is None:
            continue
        memory = memories.get(meta.uid)
        if spec.deletion_policy == "Delete" and not (memory is not None and memory.released):
            seat = (experiment.engine_namespace, told.name)
            by[seat] = name_for(experiment.engine_namespace, meta.namespace, meta.name, meta.uid)
    return by
