"""What placement works on: rooms (engines), claims (experiments), and what each claim gets. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from clora_api.v1alpha1.conditions import Reason

Seat = tuple[str, str]  # namespace and name of an engine
NOT_LET_IN = frozenset({Reason.NAMESPACE_NOT_ALLOWED, Reason.NAMESPACE_UNREADABLE})
# Reasons for which one that holds a slot has to give it up. That labels cannot be read says nothing against anybody.
EVICTING = frozenset({Reason.NAMESPACE_NOT_ALLOWED, Reason.PREEMPTED, Reason.ENGINE_DRAINING})


@dataclass(frozen=True, slots=True)
class NamespaceLabels:
    """readable: False where the operator may not read namespaces."""

    labels: Mapping[str, str]
    readable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """One engine. max_rank, max_off_policy_steps, max_context (tokens of a prompt and its answer), environments,
    data_volumes: None while nobody knows; strangers: slots held by what is none of our experiments;
    draining: it takes nobody, and who is there leaves; wakes: it sleeps, or starts, and is there for who waits for it;
    trouble: why its pod does not run;
    allowed_from, allowed_labels: its allowedNamespaces."""

    namespace: str
    name: str
    labels: Mapping[str, str]
    ready: bool
    capacity: int
    max_rank: int | None
    max_off_policy_steps: int | None = None
    max_context: int | None = None
    environments: frozenset[str] | None = None
    data_volumes: frozenset[str] | None = None
    strangers: int = 0
    full: bool = False
    draining: bool = False
    wakes: bool = False
    trouble: str = ""
    max_per_namespace: int | None = None
    allowed_from: str = "Same"
    allowed_labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def seat(self) -> Seat:
        return self.namespace, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One experiment that is unfinished, or holds a slot, or wants one to be served.

    engine_namespace, engine, selector   what its spec refers to; namespace_labels: of its own, None: not read
    rank, off_policy_steps, answer_tokens, environment, data_volumes   what it needs of an engine (see fit)
    pinned       the engine that was told of it; holds: it has a slot there already; leaving: and gives it up by itself
    attached     it had a slot when the engine was last heard of
    served       it has succeeded and is served to tenants: at the same priority, what trains comes first
    wants        nothing but a slot is missing
    needs        it may run on an engine that is awake: neither suspended nor refused, though more may be missing
    priority     of its PriorityClass; preempts: it may take the slot of a lower one; preemptible: its slot may be taken
    """

    uid: str
    namespace: str
    name: str
    created: datetime
    rank: int
    engine_namespace: str
    engine: str | None
    selector: Mapping[str, str] | None
    off_policy_steps: int = 0
    answer_tokens: int = 0
    environment: str = ""
    data_volumes: frozenset[str] = frozenset()
    pinned: str | None = None
    holds: bool = False
    leaving: bool = False
    attached: bool = False
    served: bool = False
    wants: bool = False
    needs: bool = False
    priority: int = 0
    preempts: bool = True
    preemptible: bool = True
    namespace_labels: NamespaceLabels | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """admitted: the experiment may be attached to `engine`. Else reason and message say what it waits for, or why it
    has to give up the slot that it holds. position: its place in that engine's queue, from 1. preemptor: who takes the
    slot."""

    engine: str | None
    admitted: bool = False
    reason: Reason | None = None
    message: str = ""
    position: int | None = None
    preemptor: str = ""


def name_for(reader: str, namespace: str, name: str, uid: str) -> str:
    """What people of namespace `reader` may read of an experiment: no name of another namespace."""
    return name if namespace == reader else f"{uid} (of another namespace)"


def taken_by(preemptor: str) -> str:
    return f"LoRAExperiment {preemptor} of a higher priority has taken its slot"
