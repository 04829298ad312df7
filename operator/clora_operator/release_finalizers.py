"""`clora-operator release-finalizers`: run before an uninstall, so that no experiment hangs in Terminating after it.

First the operator's Deployment is scaled to 0 and its pods are waited for, since a running operator puts its finalizer
back at once. Then clora's finalizer is taken off every LoRAExperiment within reach. Experiments, their status and their
training on the engines are left alone; an operator that is installed later puts its finalizer on again by itself.

Leaves out telling engines anything: what an engine still holds of an experiment that was deleted meanwhile is cleared
by the next operator, which asks for it.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from typing import Any

from clora_api import FINALIZER
from clora_operator.chart_kube import WILL_PASS, ChartKube, GaveUpError, ObjectName, Patience
from clora_operator.kube import EXPERIMENTS, KubeError

log = logging.getLogger(__name__)

_LOST_RACE = 409


def add_flags(parser: argparse.ArgumentParser) -> None:
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument(
        "--namespace", "-n", action="append", default=[], help="namespace whose experiments to release (repeatable)"
    )
    scope.add_argument("--all-namespaces", "-A", action="store_true", help="release those of all (the default)")
    parser.add_argument("--kubeconfig", default="", help="kubeconfig to use instead of the default one")
    parser.add_argument(
        "--deployment",
        metavar="NAMESPACE/NAME",
        type=ObjectName.parse,
        help="the operator's Deployment: scaled to 0, and its pods waited for, before anything is released",
    )
    parser.add_argument(
        "--timeout-seconds", type=float, default=240.0, help="longest time for all of it (default %(default)g)"
    )


def release(kube: ChartKube, namespaces: tuple[str, ...], deployment: ObjectName | None, patience: Patience) -> int:
    """How many experiments were released in `namespaces`; none given: everywhere. Raises GaveUpError, with everything
    released that could be."""
    try:
        if deployment is not None:
            _stop(kube, deployment, patience)
        return sum(_release(kube, scope, patience) for scope in (namespaces or ("",)))
    except GaveUpError as error:
        if deployment is None:
            raise
        back = f"kubectl scale deployment/{deployment.name} --namespace {deployment.namespace} --replicas=1"
        raise GaveUpError(f"{error} The operator stays stopped; to keep the release: {back}") from error


# ------------------------------------------------------------------ the operator


def _stop(kube: ChartKube, deployment: ObjectName, patience: Patience) -> None:
    """Returns once no pod of the Deployment runs. One that is gone already has no pods that matter."""
    if not _scaled_to_zero(kube, deployment, patience):
        log.info("there is no Deployment %s: nothing to stop", deployment)
        return
    while left := _still_running(kube, deployment):
        patience.wait(
            f"the operator still runs ({left}). Where its node is lost, delete the pod with --force; uninstall again."
        )
    log.info("Deployment %s runs no longer", deployment)


def _scaled_to_zero(kube: ChartKube, deployment: ObjectName, patience: Patience) -> bool:
    """False where there is no such Deployment."""
    while True:
        try:
            kube.scale_to_zero(deployment)
            return True
        except KubeError as error:
            if error.status == 404:
                return False
            problem = f"Deployment {deployment} cannot be scaled to 0: {error}"
            if error.status not in WILL_PASS:
                raise GaveUpError(problem) from error
        patience.wait(problem)


def _still_running(kube: ChartKube, deployment: ObjectName) -> str:
    """What runs, in words; empty when nothing does. Status counts no pods that are about to end: these are listed."""
    try:
        found = kube.deployment(deployment)
        if found is None:
            return ""
        status = found.get("status", {})
        if status.get("observedGeneration", 0) < found["metadata"]["generation"] or status.get("replicas", 0):
            return f"Deployment {deployment}"
        pods = kube.live_pods(deployment.namespace, found["spec"]["selector"]["matchLabels"])
    except KubeError as error:
        if error.status in WILL_PASS:
            return str(error)
        raise GaveUpError(f"whether Deployment {deployment} still runs cannot be told: {error}") from error
    return f"pods {', '.join(pods)}" if pods else ""


# ------------------------------------------------------------------ the experiments


def _release(kube: ChartKube, namespace: str, patience: Patience) -> int:
    """In one namespace; "": in all."""
    released: set[str] = set()
    refused: dict[str, str] = {}
    while True:
        held, problem = _held(kube, namespace)
        for item in held:
            name = f"{item['metadata']['namespace']}/{item['metadata']['name']}"
            try:
                _take_off(kube, item["metadata"])
                released.add(name)
            except KubeError as error:
                if error.status in (_LOST_RACE, *WILL_PASS):
                    problem = f"{name}: {error}"
                else:
                    refused[name] = str(error)
        if not problem:
            break
        patience.wait(f"not every experiment could be released: {problem}")
    if refused:
        raise GaveUpError(f"not released: {_sentences(refused.items())}")
    return len(released)


def _held(kube: ChartKube, namespace: str) -> tuple[list[dict[str, Any]], str]:
    """The experiments that clora's finalizer holds, and why they could not be listed this time."""
    try:
        items = kube.list_all(EXPERIMENTS, (namespace,) if namespace else ())
    except KubeError as error:
        if error.status == 404:
            return [], ""  # the kind is gone, and every experiment with it
        if error.status in WILL_PASS:
            return [], str(error)
        if error.status == 403 and namespace:
            # Roles go with their namespace, which is why the rights are missing and nothing is left to release
            log.warning("namespace %s: skipped, for it is gone or may not be read: %s", namespace, error)
            return [], ""
        raise GaveUpError(f"experiments cannot be listed: {error}") from error
    return [item for item in items if FINALIZER in item["metadata"].get("finalizers", ())], ""


def _take_off(kube: ChartKube, metadata: dict[str, Any]) -> None:
    """Others' finalizers stay. The version makes a lost race of what somebody else writes at the same time."""
    rest = [name for name in metadata["finalizers"] if name != FINALIZER]
    body = {"metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": rest}}
    try:
        kube.patch(EXPERIMENTS, metadata["namespace"], metadata["name"], body)
    except KubeError as error:
        if error.status != 404:  # gone meanwhile
            raise


def _sentences(refused: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in refused)
