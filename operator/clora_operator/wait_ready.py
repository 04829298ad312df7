"""`clora-operator wait-ready`: what the charts' tests run. Returns once the operator or an engine is ready.

It asks the API server alone, so that it needs neither kubectl nor DNS nor another image. The operator is ready when its
Deployment is available: its probe answers once it has read everything that it may.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from clora_api.v1alpha1.conditions import EngineCondition
from clora_operator.chart_kube import WILL_PASS, ChartKube, GaveUpError, ObjectName, Patience
from clora_operator.kube import ENGINES, KubeError


def add_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--deployment", metavar="NAMESPACE/NAME", type=ObjectName.parse, help="the operator's Deployment")
    what.add_argument("--engine", metavar="NAMESPACE/NAME", type=ObjectName.parse, help="a LoRAEngine")
    parser.add_argument("--kubeconfig", default="", help="kubeconfig to use instead of the default one")
    parser.add_argument("--timeout-seconds", type=float, default=60.0, help="longest wait (default %(default)g)")


def wait_for_deployment(kube: ChartKube, name: ObjectName, patience: Patience) -> None:
    """Raises GaveUpError with the condition that is missing."""
    while missing := _unavailable(_read(lambda: kube.deployment(name))):
        patience.wait(f"Deployment {name} is not available: {missing}")


def wait_for_engine(kube: ChartKube, name: ObjectName, patience: Patience) -> None:
    """Raises GaveUpError with what the operator says of the engine."""
    while missing := _not_ready(_read(lambda: kube.get(ENGINES, name.namespace, name.name))):
        patience.wait(f"LoRAEngine {name} is not ready: {missing}")


def _read(call: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | str:
    """The object, or why there is none to judge."""
    try:
        return call() or "it does not exist"
    except KubeError as error:
        if error.status in WILL_PASS:
            return str(error)
        raise GaveUpError(f"it cannot be read: {error}") from error


def _unavailable(found: dict[str, Any] | str) -> str:
    """Why a Deployment does not count as available; empty when it does."""
    if isinstance(found, str):
        return found
    status = found.get("status", {})
    if status.get("observedGeneration", 0) < found["metadata"]["generation"]:
        return "its last change is not carried out yet"
    wanted, updated = found["spec"]["replicas"], status.get("updatedReplicas", 0)
    if not wanted:
        return "it is scaled to 0"
    if updated < wanted:
        return f"{updated} of {wanted} pods are of its last change"
    return _unmet(status, "Available")


def _not_ready(found: dict[str, Any] | str) -> str:
    """Why a LoRAEngine does not count as ready; empty when it does."""
    if isinstance(found, str):
        return found
    status = found.get("status", {})
    if status.get("observedGeneration", 0) < found["metadata"]["generation"]:
        return "the operator has not looked at it yet"
    return _unmet(status, EngineCondition.READY)


def _unmet(status: dict[str, Any], kind: str) -> str:
    condition = next((c for c in status.get("conditions", ()) if c["type"] == kind), None)
    if condition is None:
        return f"condition {kind} is not set"
    if condition["status"] == "True":
        return ""
    return f"{kind}={condition['status']}, {condition.get('reason', '')}: {condition.get('message', '')}"
