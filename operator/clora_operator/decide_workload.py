"""What is applied of an engine's workload, and when one kind of it gives way to the other. Pure.

An engine has one workload that has pods, never two: both mount its storage. Where the spec asks for the other kind, the
present one goes to 0 once its pods may go, and the other one comes when they are gone. It stays, empty: the operator
deletes no workload. A LeaderWorkerSet is made empty before that: only when its controller has looked at it do the pods
go whose place its own are to take. It replaces its pods as soon as its templates change, so they change only when its
pods may go. Leaves out what replaces the pod of a StatefulSet: that is decide_drain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clora_api.v1alpha1.conditions import EngineCondition, Reason
from clora_operator.decide_drain import lacks_kind, looked_after, never_started, pod_to_replace, said_to_be_drained
from clora_operator.observe import ObservedEngine, replicas
from clora_operator.plan import Action, ApplyWorkload, ScaleToZero
from clora_operator.pod_template import CONTAINER
from clora_operator.settings import Settings
from clora_operator.status import Verdict
from clora_operator.workload import (
    LEADER_WORKER_SET,
    digest,
    empty_leader_worker_set,
    manifests,
    template_of,
    template_wanted,
)

LOOK_AGAIN_SECONDS = 10.0
SOON_SECONDS = 2.0  # while pods come or go

Said = Mapping[EngineCondition, Verdict]


def workload_actions(o: ObservedEngine, said: Said, asleep: bool, settings: Settings) -> list[Action]:
    """Of an engine that clora runs and whose spec makes sense."""
    free = _may_go(o, said, asleep)
    with_workload = _may_be_applied(o, asleep, free)
    peers = (settings.engine_ingress_from, settings.engine_tenants_from)
    children = manifests(o.engine, *peers, asleep=asleep, runs_as=o.runs_as, workload=with_workload)
    moves = o.runs_as != o.wanted_kind and free and not lacks_kind(o)
    if moves and o.wanted_kind == LEADER_WORKER_SET:
        children = (*children, empty_leader_worker_set(o.engine))
    applied = digest(children)
    actions: list[Action] = []
    # what was refused is tried again: what stood in its way may be gone, or the spec be as it was
    missing = (with_workload and o.workload is None) or (moves and o.of_kind(o.wanted_kind) is None)
    if o.applied != applied or o.apply_error or missing:
        actions.append(ApplyWorkload(children, applied))
    elif o.runs_as == o.wanted_kind and (pod := pod_to_replace(o, said)) is not None:
        actions.append(pod)
    other = o.of_kind(o.other_kind)
    # beside the one that the spec asks for, the other has nothing to hold; who sleeps has no pod to keep
    goes = o.runs_as == o.wanted_kind or (moves and (asleep or looked_after(o)))
    if other is not None and replicas(other) and goes:
        actions.append(ScaleToZero(o.other_kind, other["metadata"]["name"], other["metadata"]["resourceVersion"]))
    return actions


def look_again(o: ObservedEngine, said: Said, asleep: bool) -> float | None:
    """Seconds; None for an engine that is as it should be, or whose StatefulSet is watched for us."""
    current = said.get(EngineCondition.WORKLOAD_CURRENT)
    if o.wanted_kind != LEADER_WORKER_SET and o.runs_as != LEADER_WORKER_SET:
        return None
    if o.engine.spec is None or current is None or current.status == "True":
        return None
    if current.reason == Reason.ASLEEP and not o.pods:
        return None
    return SOON_SECONDS if _may_go(o, said, asleep) and not lacks_kind(o) else LOOK_AGAIN_SECONDS


def _may_be_applied(o: ObservedEngine, asleep: bool, free: bool) -> bool:
    if o.runs_as != o.wanted_kind:
        return False
    if o.wanted_kind != LEADER_WORKER_SET:
        return True
    present = o.leader_worker_set
    if present is not None and present["metadata"].get("deletionTimestamp"):
        return False
    if not replicas(present) and not asleep:
        return not o.pods  # of an earlier workload, about to end
    return present is None or free or template_of(present) == template_wanted(o.engine)


def _may_go(o: ObservedEngine, said: Said, asleep: bool) -> bool:
    """Whether nothing is lost with the engine's pods as they are."""
    return asleep or _stands_still(o.pod) or said_to_be_drained(o, said)


def _stands_still(pod: Mapping[str, Any] | None) -> bool:
    """There is none, it ends, or its engine does not run: then nothing is attached to it."""
    if pod is None or pod["metadata"].get("deletionTimestamp") or never_started(pod):
        return True
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(one["name"] == CONTAINER and "running" not in (one.get("state") or {}) for one in containers)
