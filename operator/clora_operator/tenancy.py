"""Which namespaces may use an engine of another one: LoRAEngine.spec.allowedNamespaces. Pure, but for the labels of
namespaces, which are looked up.

An engine's own namespace always may. Leaves out how many slots a namespace may have: that is preemption's account.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clora_api.v1alpha1.conditions import Reason
from clora_operator.claims import Claim, NamespaceLabels, Room
from clora_operator.cluster_reads import ClusterReads
from clora_operator.kube import Kube
from clora_operator.resources import Engine, Experiment

Namespaces = ClusterReads[NamespaceLabels]


def namespaces(kube: Kube) -> Namespaces:
    return ClusterReads(kube.namespace, labels_of, NamespaceLabels({}, readable=False))


def labels_of(_: str, body: Mapping[str, Any] | None) -> NamespaceLabels:
    return NamespaceLabels(dict(((body or {}).get("metadata") or {}).get("labels") or {}))


def needs_labels(experiment: Experiment, engine: Engine | None) -> bool:
    """Whether the labels of the experiment's namespace decide if it may use `engine`, which it refers to."""
    if engine is None or engine.spec is None or engine.meta.namespace == experiment.meta.namespace:
        return False
    return engine.spec.allowed_namespaces.from_ == "Selector"


@dataclass(frozen=True, slots=True)
class Denial:
    """reason: None while it is not known whether there is one."""

    reason: Reason | None
    message: str = ""


def denial(room: Room, claim: Claim) -> Denial | None:
    """Why `claim` may not use `room`; None: it may."""
    if claim.namespace == room.namespace or room.allowed_from == "All":
        return None
    where = f"spec.engineRef: LoRAEngine {room.name} of namespace {room.namespace}"
    if room.allowed_from == "Same":
        message = f"{where} takes experiments of its own namespace only: have {claim.namespace} let in by its"
        return Denial(Reason.NAMESPACE_NOT_ALLOWED, f"{message} spec.allowedNamespaces")
    known = claim.namespace_labels
    if known is None:
        return Denial(None)
    if not known.readable:
        message = f"{where} selects namespaces by labels, which clora's operator may not read: have its account granted"
        return Denial(
            Reason.NAMESPACE_UNREADABLE, f"{message} the verb get on namespaces, or use allowedNamespaces All"
        )
    if room.allowed_labels.items() <= known.labels.items():
        return None
    message = f"{where} takes namespaces with labels that {claim.namespace} lacks: have {claim.namespace} let in by its"
    return Denial(Reason.NAMESPACE_NOT_ALLOWED, f"{message} spec.allowedNamespaces")
