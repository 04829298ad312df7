"""Why an engine's pods do not run, from their own status, for people who look at the engine. Pure.

A pod that is held back by scheduling gates is queued, by Kueue for one, and that is no error. Leaves out a pod that
runs: then the engine speaks for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clora_api.v1alpha1.conditions import EngineCondition, Reason
from clora_operator.resources import Engine, find_condition
from clora_operator.status import Verdict, clip

KUEUE = "kueue.x-k8s.io/"
"""Prefix of the labels by which Kueue knows a workload's queue and priority."""
QUEUE_LABEL = f"{KUEUE}queue-name"
HARMLESS = frozenset({"ContainerCreating", "PodInitializing"})
"""What a container waits for on its way up."""
NOT_RUNNING = frozenset({Reason.QUEUED, Reason.POD_UNSCHEDULABLE, Reason.POD_FAILING, Reason.UPDATE_REFUSED})
MESSAGE_CHARACTERS = 512


def kueue_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Of a LoRAEngine, those that its workload gets too, so that Kueue admits the engine's pods."""
    return {name: value for name, value in labels.items() if name.startswith(KUEUE)}


def trouble_of(
    pod: Mapping[str, Any] | None, workers: Sequence[Mapping[str, Any]], labels: Mapping[str, str]
) -> Verdict | None:
    """What Ready says of the first of an engine's pods that does not run; None where nothing is in their way. `labels`
    are the engine's."""
    found = (pod_trouble(one, labels) for one in (pod, *workers))
    return next((trouble for trouble in found if trouble is not None), None)


def pod_trouble(pod: Mapping[str, Any] | None, labels: Mapping[str, str]) -> Verdict | None:
    """What Ready says of a pod that does not run; None where nothing is in its way. `labels` are the engine's."""
    if pod is None or pod["metadata"].get("deletionTimestamp"):
        return None
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    gates = [gate["name"] for gate in (pod.get("spec") or {}).get("schedulingGates") or ()]
    if gates:
        return Verdict("False", Reason.QUEUED, _held_back(name, gates, labels))
    for condition in status.get("conditions") or ():
        # that it was gated is left in the condition until the scheduler has looked at it again
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            message = f"pod {name} finds no node: {condition.get('message', 'no reason given')}"
            return Verdict("False", Reason.POD_UNSCHEDULABLE, clip(message, MESSAGE_CHARACTERS))
    for container in _containers(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in HARMLESS:
            message = f"pod {name}, container {container['name']}: {waiting['reason']}{_last_end(container)}"
            if waiting.get("message"):
                message += f": {waiting['message']}"
            return Verdict("False", Reason.POD_FAILING, clip(message, MESSAGE_CHARACTERS))
    return None


def told_trouble(engine: Engine) -> str:
    """What the engine's status says of it; empty for none."""
    ready = find_condition(engine.status.conditions, EngineCondition.READY)
    troubled = ready is not None and ready.status == "False" and ready.reason in NOT_RUNNING | {Reason.WAKING_HELD_BACK}
    return ready.message if ready is not None and troubled else ""


def _held_back(name: str, gates: Sequence[str], labels: Mapping[str, str]) -> str:
    queue = labels.get(QUEUE_LABEL)
    if queue and any(gate.startswith(KUEUE) for gate in gates):
        return f"pod {name} waits in Kueue's queue {queue}: it starts when the queue has quota for it"
    return f"pod {name} is held back by its scheduling gates: {', '.join(gates)}"


def _containers(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for kind in ("initContainerStatuses", "containerStatuses"):
        yield from status.get(kind) or ()


def _last_end(container: Mapping[str, Any]) -> str:
    """How it ended before, of a container that is started again and again."""
    ended = (container.get("lastState") or {}).get("terminated")
    if not ended:
        return ""
    said = f": {ended['message'].strip()}" if ended.get("message") else ""
    return f" (last ended with exit code {ended.get('exitCode')}, {ended.get('reason', 'no reason given')}{said})"
