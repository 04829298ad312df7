"""What a decision is made of: actions, a status, events, and when to look again. Pure data.

Leaves out how anything is carried out: that is act.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clora_api.control import DesiredExperiment, DesiredServing
from clora_operator.resources import Key


@dataclass(frozen=True, slots=True)
class AddFinalizer:
    pass


@dataclass(frozen=True, slots=True)
class RemoveFinalizer:
    pass


@dataclass(frozen=True, slots=True)
class DeleteExperiment:
    """Delete the resource as a user would: this version of it, and no namesake."""


@dataclass(frozen=True, slots=True)
class PutOnEngine:
    """Tell `engine` what is wanted of an experiment."""

    engine: Key
    desired: DesiredExperiment


@dataclass(frozen=True, slots=True)
class ServeOnEngine:
    """Tell `engine`, which knows the experiment, who may ask for its adapter, and nothing else."""

    engine: Key
    uid: str
    serving: DesiredServing


@dataclass(frozen=True, slots=True)
class DeleteOnEngine:
    """Ask `engine` for the last checkpoint and the end of an adapter; repeated until it answers 404."""

    engine: Key
    uid: str
    files: Literal["Retain", "Delete"]


@dataclass(frozen=True, slots=True)
class CreateToken:
    """Make the Secret with a random bearer token, unless it is there: an engine's, or an experiment's for tenants."""

    secret: str


@dataclass(frozen=True, slots=True)
class ApplyWorkload:
    """Server-side apply of the engine's children, in order."""

    manifests: tuple[Mapping[str, Any], ...]
    digest: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Of an engine, so that its StatefulSet makes a new one; no namesake."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ScaleToZero:
    """A workload of an engine, so that the other one of its two kinds can have the engine; this version of it alone."""

    kind: str
    name: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class Connect:
    """Keep in touch with the engine at `endpoint`. pod: the uid of the one that it is in, empty where that is not
    known."""

    endpoint: str
    token: str = field(repr=False)
    pod: str = ""


@dataclass(frozen=True, slots=True)
class Disconnect:
    pass


Action = (
    AddFinalizer
    | RemoveFinalizer
    | DeleteExperiment
    | PutOnEngine
    | ServeOnEngine
    | DeleteOnEngine
    | CreateToken
    | ApplyWorkload
    | DeletePod
    | ScaleToZero
    | Connect
    | Disconnect
)


def soonest(*waits: float | None) -> float | None:
    """The shortest of some waits in seconds; None is no wait."""
    return min((wait for wait in waits if wait is not None), default=None)


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event; `reason` is CamelCase."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """status         the whole status to be written; None: leave it as it is
    requeue_after  seconds; None: wait for the next event
    wants_slot     (experiments) placement may give it a slot
    Events are only told once the status that they speak of is written.
    """

    actions: tuple[Action, ...] = ()
    status: Mapping[str, Any] | None = None
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    wants_slot: bool = False
