"""An engine's drain and the update of its pod: whether the pod is of the present template, whether the engine is
drained, and when the pod is replaced. Pure.

The old pod goes before the new one starts, for a node's GPUs may all be in use. Leaves out how experiments leave an
engine that drains: placement tells them to, and decide carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clora_api.v1alpha1.conditions import EngineCondition, Reason
from clora_operator.observe import ObservedEngine
from clora_operator.plan import DeletePod
from clora_operator.resources import find_condition
from clora_operator.status import Verdict


def workload_current(o: ObservedEngine, asleep: bool) -> Verdict | None:
    """Of the pod that runs, against the template that a new pod would get."""
    if o.engine.spec is None:
        return None
    if o.engine.spec.endpoint is not None:
        return Verdict("True", Reason.EXTERNAL, "somebody else runs this engine")
    stateful_set = o.stateful_set
    if asleep and o.pod is None:
        return Verdict("Unknown", Reason.ASLEEP, "no pod runs; the next is what the spec asks for")
    if stateful_set is None or o.pod is None:
        return Verdict("Unknown", Reason.STARTING, "there is no pod yet")
    status = stateful_set.get("status") or {}
    if status.get("observedGeneration", 0) < stateful_set["metadata"]["generation"]:
        return None  # the StatefulSet's controller has not looked at the new template yet, and will tell
    running = (o.pod["metadata"].get("labels") or {}).get("controller-revision-hash")
    if running == status.get("updateRevision"):
        return Verdict("True", Reason.UP_TO_DATE, "the pod is what the spec asks for")
    pod = o.pod["metadata"]
    if pod.get("deletionTimestamp"):
        return Verdict("False", Reason.UPDATE_PENDING, f"pod {pod['name']} ends, then one of the new template starts")
    if o.engine.spec.drain:
        message = f"pod {pod['name']} runs an earlier template: one of the new template replaces it"
        return Verdict("False", Reason.UPDATE_PENDING, f"{message} once the engine is drained")
    message = (
        "the pod runs an earlier template and is not restarted by itself: set spec.drain to true, so that experiments"
        f" commit first, or delete pod {pod['name']}, to move to the new one"
    )
    return Verdict("False", Reason.UPDATE_PENDING, message)


def drained(o: ObservedEngine, asleep: bool) -> Verdict | None:
    """None: nothing is to be said."""
    before = find_condition(o.engine.status.conditions, EngineCondition.DRAINED)
    if o.engine.spec is None:
        return None
    if not o.engine.spec.drain:
        return Verdict("False", Reason.NOT_DRAINING, "spec.drain is false: it takes experiments") if before else None
    if asleep:
        return Verdict("True", Reason.DRAINED, "it is asleep, so nothing is attached")
    if never_started(o.pod):
        return Verdict("True", Reason.DRAINED, "its pod has not started yet, so nothing is attached")
    if o.view is not None and o.view.reachable and o.view.info is not None:
        attached = max(len(o.view.occupants()), o.view.info.experiments)
        if attached == 0:
            return Verdict("True", Reason.DRAINED, "nothing is attached")
        return Verdict("False", Reason.DRAINING, f"{attached} attached: they finish their step, commit and detach")
    if before is not None and before.status == "True":
        # It was, and has been told of nobody since. Said of this generation, so that one which mends it gets its pod.
        return Verdict("True", Reason.DRAINED, before.message)
    message = "the engine does not answer: whether anything is attached is known when it does"
    if o.pod is not None:
        message += f"; deleting pod {o.pod['metadata']['name']} costs experiments at most the step that they are making"
    return Verdict("False", Reason.DRAINING, message)


def pod_to_replace(o: ObservedEngine, said: Mapping[EngineCondition, Verdict]) -> DeletePod | None:
    """The pod of an engine that is drained, and was said to be so already: by then nobody is being attached."""
    stored = find_condition(o.engine.status.conditions, EngineCondition.DRAINED)
    current, now_drained = said.get(EngineCondition.WORKLOAD_CURRENT), said.get(EngineCondition.DRAINED)
    if o.pod is None or o.pod["metadata"].get("deletionTimestamp"):
        return None
    if current is None or current.reason != Reason.UPDATE_PENDING:
        return None
    if now_drained is not None and now_drained.status != "True":
        return None
    if stored is None or stored.status != "True" or stored.observed_generation != o.engine.meta.generation:
        return None
    return DeletePod(o.pod["metadata"]["name"], o.pod["metadata"]["uid"])


def never_started(pod: Mapping[str, Any] | None) -> bool:
    """Kubernetes calls a pod Pending until its first container runs."""
    return pod is not None and (pod.get("status") or {}).get("phase") == "Pending"
