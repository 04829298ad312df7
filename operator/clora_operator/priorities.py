"""What priorityClassName comes to: the value and the policy of a Kubernetes PriorityClass.

A class is immutable; it can be deleted and made anew, which the next resync finds. No name is priority 0. Leaves out
globalDefault, which is meant for pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clora_api.v1alpha1.conditions import Reason
from clora_operator.cluster_reads import ClusterReads
from clora_operator.kube import Kube

HIGHEST_OF_USERS = 1_000_000_000  # Kubernetes' HighestUserDefinablePriority


@dataclass(frozen=True, slots=True)
class Priority:
    """reason, problem: why there is no such priority; it counts as 0 then."""

    value: int = 0
    preempts: bool = True
    reason: Reason | None = None
    problem: str = ""


NO_CLASS = Priority()
PriorityClasses = ClusterReads[Priority]


def priority_classes(kube: Kube) -> PriorityClasses:
    return ClusterReads(kube.priority_class, priority_of, _UNREADABLE)


def priority_of(name: str, body: Mapping[str, Any] | None) -> Priority:
    """Of the PriorityClass `name`, whose object is `body`."""
    if body is None:
        problem = f"spec.priorityClassName: there is no PriorityClass {name}: create it, or name one that there is"
        return Priority(reason=Reason.PRIORITY_CLASS_NOT_FOUND, problem=problem)
    value = int(body.get("value", 0))
    if value > HIGHEST_OF_USERS:
        problem = f"{name} has the value {value}, and Kubernetes keeps those above {HIGHEST_OF_USERS} for its own pods"
        reason = Reason.PRIORITY_CLASS_NOT_ALLOWED
        return Priority(reason=reason, problem=f"spec.priorityClassName: {problem}: name another class")
    return Priority(value, body.get("preemptionPolicy") != "Never")


_UNREADABLE = Priority(
    reason=Reason.PRIORITY_CLASS_UNREADABLE,
    problem="spec.priorityClassName: clora's operator may not read PriorityClasses, which belong to the whole cluster:"
    " have its account granted the verb get on priorityclasses.scheduling.k8s.io, or leave the field out",
)
