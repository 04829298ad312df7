"""Both kinds as the operator sees them: metadata that matters, the parsed spec and status. Immutable.

Leaves out what only people read (annotations, managed fields).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import ValidationError

from clora_api.v1alpha1.conditions import ExperimentCondition
from clora_api.v1alpha1.engine import EngineSpec, EngineStatus
from clora_api.v1alpha1.experiment import Condition, ExperimentSpec, ExperimentStatus

S = TypeVar("S", ExperimentSpec, EngineSpec)
Kind = Literal["experiment", "engine"]


class Key(NamedTuple):
    """What a reconcile is about."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Meta:
    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    created: datetime
    deleted: datetime | None
    finalizers: tuple[str, ...]
    labels: Mapping[str, str]

    @property
    def age_order(self) -> tuple[datetime, str, str]:
        """Older first; names decide within one second, the resolution of Kubernetes."""
        return self.created, self.namespace, self.name


@dataclass(frozen=True, slots=True)
class Experiment:
    """`spec` is None, and `invalid` says why, where the stored spec is not of this release. engine_namespace: of the
    engine that the spec refers to, known even then; never read from the status, which others may have written.
    serving_enabled: as the spec says, known even then."""

    meta: Meta
    spec: ExperimentSpec | None
    invalid: str
    status: ExperimentStatus
    raw_status: Mapping[str, Any]
    engine_namespace: str
    serving_enabled: bool

    @property
    def key(self) -> Key:
        return Key("experiment", self.meta.namespace, self.meta.name)

    def engine_key(self, name: str) -> Key:
        """Of the engine `name` that it is on, or may be."""
        return Key("engine", self.engine_namespace, name)

    @property
    def finished(self) -> bool:
        """Succeeded or failed: it never runs again."""
        ends = (ExperimentCondition.SUCCEEDED, ExperimentCondition.FAILED)
        return any(c.type in ends and c.status == "True" for c in self.status.conditions)

    @property
    def asks_to_be_served(self) -> bool:
        """It is not going, and may be served: it has not failed, and its spec says so."""
        failed = find_condition(self.status.conditions, ExperimentCondition.FAILED)
        return (
            self.serving_enabled and self.meta.deleted is None and not (failed is not None and failed.status == "True")
        )


@dataclass(frozen=True, slots=True)
class Engine:
    """`spec` is None, and `invalid` says why, where the stored spec is not of this release."""

    meta: Meta
    spec: EngineSpec | None
    invalid: str
    status: EngineStatus
    raw_status: Mapping[str, Any]

    @property
    def key(self) -> Key:
        return Key("engine", self.meta.namespace, self.meta.name)


def find_condition(conditions: list[Condition], kind: str) -> Condition | None:
    return next((c for c in conditions if c.type == kind), None)


def parse_experiment(body: Mapping[str, Any]) -> Experiment:
    raw_status = dict(body.get("status") or {})
    # `state` is derived from the conditions and never read back, so that a later release may have more words for it
    status = ExperimentStatus.model_validate({k: v for k, v in raw_status.items() if k != "state"})
    spec, invalid = _parse_spec(ExperimentSpec, body)
    meta, stored = _meta(body), body.get("spec") or {}
    namespace = (stored.get("engineRef") or {}).get("namespace") or meta.namespace
    served = (stored.get("serving") or {}).get("enabled") is True
    return Experiment(meta, spec, invalid, status, raw_status, str(namespace), served)


def parse_engine(body: Mapping[str, Any]) -> Engine:
    raw_status = dict(body.get("status") or {})
    spec, invalid = _parse_spec(EngineSpec, body)
    return Engine(_meta(body), spec, invalid, EngineStatus.model_validate(raw_status), raw_status)


def _parse_spec(model: type[S], body: Mapping[str, Any]) -> tuple[S | None, str]:
    try:
        return model.model_validate(body.get("spec") or {}), ""
    except ValidationError as refusal:
        first: Any = refusal.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in ("spec", *first["loc"]))
        return None, f"{where}: {first['msg']}"


def _meta(body: Mapping[str, Any]) -> Meta:
    raw = body["metadata"]
    deleted = raw.get("deletionTimestamp")
    return Meta(
        namespace=raw["namespace"],
        name=raw["name"],
        uid=raw["uid"],
        generation=int(raw.get("generation", 0)),
        resource_version=raw["resourceVersion"],
        created=from_rfc3339(raw["creationTimestamp"]),
        deleted=from_rfc3339(deleted) if deleted else None,
        finalizers=tuple(raw.get("finalizers") or ()),
        labels=dict(raw.get("labels") or {}),
    )


def from_rfc3339(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def to_rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
