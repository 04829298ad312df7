"""What there is of an engine in the cluster: its workload of either kind, its pods, its Service. Blocks: for a thread.

Leaves out watching: StatefulSets are watched by handlers, LeaderWorkerSets by nobody, for their kind may be installed
later than the operator; whoever waits for one looks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clora_operator.kube import Kube, KubeError
from clora_operator.pod_template import ENGINE_LABEL
from clora_operator.resources import Meta
from clora_operator.workload import LEADER_WORKER_SET, STATEFUL_SET, leader_worker_set_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """As in ObservedEngine."""

    stateful_set: Mapping[str, Any] | None = None
    leader_worker_set: Mapping[str, Any] | None = None
    pods: tuple[Mapping[str, Any], ...] = ()
    served: frozenset[str] = frozenset({STATEFUL_SET})
    service: Mapping[str, Any] | None = None


def read_children(kube: Kube, meta: Meta, wanted: str) -> Children:
    """`wanted`: the kind of workload that the spec asks for. Raises KubeError when the API server does not answer."""
    namespace = meta.namespace
    several = _leader_worker_set(kube, meta)
    served = {STATEFUL_SET}
    if several is not None or (wanted == LEADER_WORKER_SET and kube.serves(LEADER_WORKER_SET)):
        served.add(LEADER_WORKER_SET)
    return Children(
        stateful_set=kube.workload(STATEFUL_SET, namespace, meta.name),
        leader_worker_set=several,
        pods=tuple(pod for pod in kube.pods(namespace, f"{ENGINE_LABEL}={meta.name}") if of_a_workload(pod)),
        served=frozenset(served),
        service=kube.service(namespace, meta.name),
    )


def _leader_worker_set(kube: Kube, meta: Meta) -> Mapping[str, Any] | None:
    """None also for an account without rights to the kind: it has made none, and is told so if it tries."""
    try:
        return kube.workload(LEADER_WORKER_SET, meta.namespace, leader_worker_set_name(meta))
    except KubeError as error:
        if error.status != 403:
            raise
        return None


def of_a_workload(pod: Mapping[str, Any]) -> bool:
    """Both kinds make their pods by StatefulSets; a pod that somebody has made and labelled by hand is none of ours."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner["kind"] == STATEFUL_SET for owner in owners)
