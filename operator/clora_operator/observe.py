"""What a decision is made from: the resource, the engine's answer, the children. Frozen.

Leaves out every judgement: nothing here says what is to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from clora_api.control import ExperimentReport, InitSource, Problem
from clora_api.v1alpha1.conditions import ExperimentCondition, Reason
from clora_operator.claims import Assignment
from clora_operator.links import EngineView
from clora_operator.pod_template import ROLE_LABEL, WORKER
from clora_operator.priorities import Priority
from clora_operator.resources import Engine, Experiment, find_condition
from clora_operator.tracking_keys import TrackingKeys
from clora_operator.workload import LEADER_WORKER_SET, STATEFUL_SET, wanted_kind


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine said to the last PUT of an experiment. digest: of what was asked; token: that of its serving
    token, empty without one; problem: its refusal, if any; error: why there was no answer; keys: of its trackers, where
    it was taken; epoch: of the engine that was asked, where it was known."""

    digest: str
    at: datetime
    token: str = ""
    problem: Problem | None = None
    error: str = ""
    keys: str = ""
    epoch: int | None = None

    @property
    def invalid(self) -> bool:
        return self.problem is not None and self.problem.type.endswith("/invalid-spec")

    @property
    def full(self) -> bool:
        return self.problem is not None and self.problem.type.endswith("/capacity-exceeded")

    @property
    def without_commits(self) -> bool:
        """The engine's storage lacks what the experiment has committed."""
        return self.problem is not None and self.problem.reason == Reason.CHECKPOINT_UNREACHABLE

    @property
    def trouble(self) -> str:
        """Why it was not taken; empty when it was."""
        return self.error or (self.problem.detail or self.problem.title if self.problem else "")


@dataclass(frozen=True, slots=True)
class ServingAnswer:
    """What the engine said to the last call about an experiment's serving alone. token: digest of what was told, empty
    without one; weight: likewise; error: why it was not taken; unknown: the engine knows no such call, or, for a
    moment, no such experiment any more."""

    token: str
    at: datetime
    weight: int | None = None
    error: str = ""
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class ServingSecret:
    """The Secret of an experiment's serving token. token: None while there is none; foreign: a Secret of that name
    belongs to something else."""

    name: str
    token: str | None = field(repr=False)
    foreign: bool
    at: datetime


@dataclass(frozen=True, slots=True)
class Memory:
    """What the operator remembers of one experiment between reconciles. All of it can be lost: it saves work and keeps
    time, and nothing that must survive a restart is here."""

    data_text: str | None = None
    answer: Answer | None = None
    serving: ServingAnswer | None = None
    failed: tuple[int, datetime] | None = None  # attempt whose failure was seen, and when
    silent_since: datetime | None = None  # no link to its engine since
    last_write: datetime | None = None
    released: bool = False  # the engine knows it no longer
    wants_slot: bool = False
    serving_secret: ServingSecret | None = None  # as it was last read
    secret_problem: str = ""  # why the API server did not take a new one
    tracking_keys: TrackingKeys | None = None  # as they were last read


@dataclass(frozen=True, slots=True)
class Init:
    """initFrom.experiment, as far as it can be resolved: a source, or why there is none yet."""

    source: InitSource | None
    reason: Reason | None = None
    message: str = ""
    engine: str | None = None  # whose storage holds it


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedExperiment:
    """engine, view: the LoRAEngine that it is assigned to, or was told of, and what that engine says. serving_secret:
    None where it is not to be served. tracking_keys: None where no tracker needs one.
    data_missing: why data.configMap could not be read; data_text: what it holds. priority: what priorityClassName comes
    to."""

    experiment: Experiment
    assignment: Assignment | None
    engine: Engine | None
    view: EngineView | None
    data_text: str | None
    data_missing: str
    init: Init | None
    priority: Priority
    memory: Memory
    serving_secret: ServingSecret | None = None
    tracking_keys: TrackingKeys | None = None

    @property
    def report(self) -> ExperimentReport | None:
        return self.view.report(self.experiment.meta.uid) if self.view else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedEngine:
    """rival: an older LoRAEngine with the same endpoint. token: None where the Secret or its key is missing.
    pods: of both kinds of workload; served: the kinds of workload that the cluster has.
    wanted: which experiment wants it awake, "" for none, None while placement has not looked yet.
    applied: digest of the manifests that were last applied; apply_error: the API server's answer to them."""

    engine: Engine
    rival: str | None
    token: str | None
    token_secret: tuple[str, str]  # name, key
    view: EngineView | None
    stateful_set: Mapping[str, Any] | None
    leader_worker_set: Mapping[str, Any] | None
    pods: tuple[Mapping[str, Any], ...]
    served: frozenset[str]
    service: Mapping[str, Any] | None
    wanted: str | None
    applied: str
    apply_error: str
    last_write: datetime | None

    @property
    def wanted_kind(self) -> str:
        """Of the workload that the spec asks for."""
        return wanted_kind(self.engine.spec) if self.engine.spec else STATEFUL_SET

    @property
    def runs_as(self) -> str:
        """The kind of the workload that has the engine: that which the spec asks for, unless it is at 0 and the other
        one is not, or still has pods."""
        wanted, other = self.wanted_kind, self.other_kind
        if not replicas(self.of_kind(wanted)) and (replicas(self.of_kind(other)) or self._pods_of(other)):
            return other
        return wanted

    @property
    def other_kind(self) -> str:
        """That which the spec does not ask for."""
        return STATEFUL_SET if self.wanted_kind == LEADER_WORKER_SET else LEADER_WORKER_SET

    @property
    def workload(self) -> Mapping[str, Any] | None:
        return self.of_kind(self.runs_as)

    def of_kind(self, kind: str) -> Mapping[str, Any] | None:
        return self.leader_worker_set if kind == LEADER_WORKER_SET else self.stateful_set

    @property
    def pod(self) -> Mapping[str, Any] | None:
        """That with the API."""
        return next((pod for pod in self._pods_of(self.runs_as) if _role(pod) != WORKER), None)

    @property
    def workers(self) -> tuple[Mapping[str, Any], ...]:
        """Those that only train."""
        return tuple(pod for pod in self._pods_of(self.runs_as) if _role(pod) == WORKER)

    def _pods_of(self, kind: str) -> list[Mapping[str, Any]]:
        found = [pod for pod in self.pods if bool(_role(pod)) == (kind == LEADER_WORKER_SET)]
        return sorted(found, key=lambda pod: (bool(pod["metadata"].get("deletionTimestamp")), pod["metadata"]["name"]))


def replicas(workload: Mapping[str, Any] | None) -> int:
    return int(((workload or {}).get("spec") or {}).get("replicas") or 0)


def _role(pod: Mapping[str, Any]) -> str:
    return str((pod["metadata"].get("labels") or {}).get(ROLE_LABEL, ""))


def lacks_commits(experiment: Experiment, memory: Memory | None) -> bool:
    """Its engine's storage lacks its commits: what the engine said when it was last asked; to an operator that has
    started since, what was written down then."""
    if memory is not None and memory.answer is not None:
        return memory.answer.without_commits
    attached = find_condition(experiment.status.conditions, ExperimentCondition.ATTACHED)
    return attached is not None and attached.reason == Reason.CHECKPOINT_UNREACHABLE


def resolve_init(experiment: Experiment, source: Experiment | None) -> Init | None:
    """What initFrom.experiment comes to. `source` is the experiment of that name, if there is one.

    Once resolved it is kept in status.initFrom and never resolved again: the source may be deleted, or finish more.
    """
    init = experiment.spec.init_from if experiment.spec else None
    if init is None or init.experiment is None:
        return None
    if experiment.status.init_from is not None:
        kept = experiment.status.init_from
        return Init(InitSource(uid=kept.uid, step=kept.step))
    if source is not None and source.meta.uid == experiment.meta.uid:
        return Init(None, Reason.INIT_FROM_FAILED, "initFrom.experiment: an experiment cannot start from itself")
    name, step = init.experiment.name, init.experiment.step
    if source is None:
        return Init(None, Reason.INIT_FROM_NOT_FOUND, f"initFrom.experiment: there is no LoRAExperiment {name}")
    if source.engine_namespace != experiment.engine_namespace:
        message = f"initFrom.experiment: LoRAExperiment {name} is on an engine of namespace {source.engine_namespace}"
        return Init(None, Reason.INIT_FROM_NOT_FOUND, f"{message}, not of {experiment.engine_namespace}")
    engine = source.status.engine.name if source.status.engine else None
    committed = source.status.checkpoint.step if source.status.checkpoint else None
    failed = find_condition(source.status.conditions, ExperimentCondition.FAILED)
    succeeded = find_condition(source.status.conditions, ExperimentCondition.SUCCEEDED)
    if step is not None and committed is not None and committed >= step:
        return Init(InitSource(uid=source.meta.uid, step=step), engine=engine)
    if succeeded is not None and succeeded.status == "True":
        if step is not None:
            message = f"initFrom.experiment: LoRAExperiment {name} has finished without step {step}"
            return Init(None, Reason.INIT_FROM_FAILED, message)
        return Init(InitSource(uid=source.meta.uid, step=committed), engine=engine)
    if failed is not None and failed.status == "True":
        wanted = f"step {step}" if step is not None else "an end"
        message = f"initFrom.experiment: LoRAExperiment {name} has failed before it reached {wanted}: {failed.message}"
        return Init(None, Reason.INIT_FROM_FAILED, message)
    awaited = f"to reach step {step}" if step is not None else "to succeed"
    return Init(None, Reason.WAITING_FOR_INIT, f"waiting for LoRAExperiment {name} {awaited}", engine=engine)
