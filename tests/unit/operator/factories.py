"""Observed states for the tables: everything fine by default, one keyword per thing that is not."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

from clora_api import API_VERSION, FINALIZER
from clora_api.control import (
    DesiredExperiment,
    EngineInfo,
    ExperimentReport,
    Phase,
    ReportedCheckpoint,
    ReportedProgress,
    RunMode,
    spec_digest,
)
from clora_operator.claims import Assignment
from clora_operator.kube import KubeError
from clora_operator.links import EngineView
from clora_operator.observe import Memory, ObservedEngine, ObservedExperiment
from clora_operator.plan import Plan
from clora_operator.priorities import NO_CLASS, PriorityClasses
from clora_operator.priorities import priority_classes as classes_of
from clora_operator.resources import Engine, Experiment, parse_engine, parse_experiment, to_rfc3339
from clora_operator.settings import Settings
from clora_operator.tenancy import Namespaces
from clora_operator.tenancy import namespaces as namespaces_of

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
SETTINGS = Settings()
UID = "uid-1"


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def metadata(name: str, uid: str, **fields: Any) -> dict[str, Any]:
    return {
        "namespace": "team",
        "name": name,
        "uid": uid,
        "generation": 1,
        "resourceVersion": "100",
        "creationTimestamp": to_rfc3339(ago(3600)),
        **fields,
    }


def spec(**fields: Any) -> dict[str, Any]:
    return {
        "engineRef": {"name": "main"},
        "environment": {"name": "WordProblems"},
        "data": {"builtin": "Generated"},
        "maxSteps": 10,
        **fields,
    }


def experiment(
    *, status: dict[str, Any] | None = None, meta: dict[str, Any] | None = None, **fields: Any
) -> Experiment:
    body = {
        "apiVersion": API_VERSION,
        "kind": "LoRAExperiment",
        "metadata": metadata("one", UID, finalizers=[FINALIZER], **(meta or {})),
        "spec": {key: value for key, value in spec(**fields).items() if value is not None},
        "status": status or {},
    }
    return parse_experiment(body)


def engine(*, name: str = "main", uid: str = "engine-uid", meta: dict[str, Any] | None = None, **fields: Any) -> Engine:
    body = {
        "apiVersion": API_VERSION,
        "kind": "LoRAEngine",
        "metadata": metadata(name, uid, **(meta or {})),
        "spec": {"model": {"name": "small"}, **fields},
        "status": {},
    }
    return parse_engine(body)


def condition(kind: str, value: str, reason: str, *, message: str = "", since: float = 60) -> dict[str, Any]:
    return {
        "type": kind,
        "status": value,
        "reason": reason,
        "message": message,
        "observedGeneration": 1,
        "lastTransitionTime": to_rfc3339(ago(since)),
    }


def claimed(*conditions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A status that says which engine was told."""
    return {
        "conditions": list(conditions),
        "engine": {"name": "main", "epoch": 1, "adapterVersion": "", "adapterDigest": ""},
        **fields,
    }


def running(**fields: Any) -> dict[str, Any]:
    """The status of an attached experiment."""
    conditions = (
        condition("Accepted", "True", "SpecValid"),
        condition("Attached", "True", "EngineConfirmed"),
        condition("Progressing", "True", "Running"),
        condition("Succeeded", "False", "NotFinished"),
        condition("Failed", "False", "NotFailed"),
    )
    said = {"observedGeneration": 1, "state": "Running", "startTime": to_rfc3339(ago(60)), "restarts": 0}
    return claimed(*conditions, **(said | fields))


def desired(of: Experiment, mode: RunMode = RunMode.RUN, **fields: Any) -> DesiredExperiment:
    assert of.spec is not None
    return DesiredExperiment(
        uid=of.meta.uid,
        namespace=of.meta.namespace,
        name=of.meta.name,
        spec=of.spec.model_copy(update={"serving": None}),
        mode=mode,
        attempt=of.status.restarts,
        **fields,
    )


def report(of: Experiment, phase: Phase = Phase.RUNNING, *, step: int = 3, **fields: Any) -> ExperimentReport:
    """As the engine would report `of`, told what its spec says now."""
    values: dict[str, Any] = {
        "uid": of.meta.uid,
        "namespace": of.meta.namespace,
        "name": of.meta.name,
        "epoch": 1,
        "revision": 7,
        "phase": phase,
        "mode": RunMode.RUN,
        "attempt": of.status.restarts,
        "spec_digest": spec_digest(desired(of)),
        "adapter_loaded": phase is Phase.RUNNING,
        "adapter_version": f"one@{step}",
        "adapter_digest": "abc",
        "progress": ReportedProgress(step=step, max_steps=10, reward=0.5, seconds_per_step=2.0),
        "checkpoint": ReportedCheckpoint(step=step, path="p", digest="d"),
    }
    return ExperimentReport(**(values | fields))


def view(*reports: ExperimentReport, epoch: int = 1, ready: bool = True, **fields: Any) -> EngineView:
    info = EngineInfo(
        epoch=epoch, ready=ready, model="small", version="1", max_experiments=4, max_rank=32, experiments=len(reports)
    )
    values: dict[str, Any] = {
        "endpoint": "http://engine",
        "down_since": None,
        "info": info,
        "reports": MappingProxyType({r.uid: r for r in reports}),
    }
    return EngineView(**(values | fields))


def priority_classes(*, body: dict[str, Any] | None = None, status: int = 0) -> PriorityClasses:
    """Classes over an API server that answers every question with `body` (None: there is none), or refuses."""

    class Answers:
        def priority_class(self, name: str) -> dict[str, Any] | None:
            if status:
                raise KubeError(status, "refused")
            return body

    return classes_of(Answers())  # type: ignore[arg-type]


def namespaces(**labels: dict[str, str]) -> Namespaces:
    """Of an API server that has these namespaces, with their labels."""

    class Answers:
        def namespace(self, name: str) -> dict[str, Any] | None:
            return {"metadata": {"name": name, "labels": labels[name]}} if name in labels else None

    return namespaces_of(Answers())  # type: ignore[arg-type]


ADMITTED = Assignment("main", admitted=True)


def observed(of: Experiment, *, reported: ExperimentReport | None = None, **fields: Any) -> ObservedExperiment:
    values: dict[str, Any] = {
        "experiment": of,
        "assignment": ADMITTED,
        "engine": engine(endpoint="http://engine", tokenSecretRef={"name": "t"}),
        "view": view(*([reported] if reported else [])),
        "data_text": None,
        "data_missing": "",
        "init": None,
        "priority": NO_CLASS,
        "memory": Memory(wants_slot=True),
    }
    return ObservedExperiment(**(values | fields))


def observed_engine(of: Engine, **fields: Any) -> ObservedEngine:
    """pod: the only one, instead of pods."""
    pod = fields.pop("pod", None)
    values: dict[str, Any] = {
        "engine": of,
        "rival": None,
        "token": "secret-token",
        "token_secret": ("t", "token"),
        "view": None,
        "stateful_set": None,
        "leader_worker_set": None,
        "pods": (pod,) if pod else (),
        "served": frozenset({"StatefulSet", "LeaderWorkerSet"}),
        "service": None,
        "wanted": None,
        "applied": "",
        "apply_error": "",
        "last_write": None,
    }
    return ObservedEngine(**(values | fields))


def said(plan: Plan, kind: str) -> tuple[str, str]:
    """Status and reason of a condition in the status that a plan writes."""
    assert plan.status is not None, "no status is written"
    found = next(c for c in plan.status["conditions"] if c["type"] == kind)
    return found["status"], found["reason"]


def message(plan: Plan, kind: str) -> str:
    assert plan.status is not None, "no status is written"
    return str(next(c["message"] for c in plan.status["conditions"] if c["type"] == kind))


def as_stored(of: Experiment, plan: Plan) -> Experiment:
    """The experiment after the API server has taken the plan's status."""
    assert plan.status is not None
    meta = replace(of.meta, resource_version=str(int(of.meta.resource_version) + 1))
    body = {"metadata": metadata("one", UID, finalizers=list(meta.finalizers)), "spec": {}, "status": dict(plan.status)}
    return replace(of, meta=meta, status=parse_experiment(body).status, raw_status=dict(plan.status))
