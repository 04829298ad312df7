"""An engine's drain and the update of its pods: whether they are of the present template, whether the engine is
drained, and when a StatefulSet's pod is replaced. Pure.

The old pod goes before the new one starts, for a node's GPUs may all be in use. Leaves out how experiments leave an
engine that drains: placement tells them to, and decide carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clora_api.v1alpha1.conditions import EngineCondition, Reason
from clora_operator.observe import ObservedEngine, replicas
from clora_operator.plan import DeletePod
from clora_operator.pod_trouble import QUEUE_LABEL
from clora_operator.resources import find_condition
from clora_operator.status import Verdict
from clora_operator.workload import LEADER_WORKER_SET, template_of_pod, template_wanted

NO_LEADER_WORKER_SETS = (
    "spec.trainer.nodes: an engine of several pods is a LeaderWorkerSet, and this cluster does not have that kind"
    " (leaderworkerset.x-k8s.io/v1): install LWS (https://lws.sigs.k8s.io), or set trainer.nodes to 1"
)


def workload_current(o: ObservedEngine, asleep: bool) -> Verdict | None:
    """Of the pod that runs, against the template that a new pod would get."""
    if o.engine.spec is None:
        return None
    if o.engine.spec.endpoint is not None:
        return Verdict("True", Reason.EXTERNAL, "somebody else runs this engine")
    if o.apply_error and o.workload is not None:
        return Verdict("False", Reason.UPDATE_REFUSED, o.apply_error + _remedy(o))
    if asleep and o.pod is None:
        return Verdict("Unknown", Reason.ASLEEP, "no pod runs; the next is what the spec asks for")
    if o.runs_as != o.wanted_kind:
        return _changes_kind(o)
    if o.workload is None or o.pod is None:
        return Verdict("Unknown", Reason.STARTING, _no_pod_yet(o))
    current = _pods_are_current(o)
    if current is None:
        return None  # the StatefulSet's controller has not looked at the new template yet, and will tell
    several = o.runs_as == LEADER_WORKER_SET
    if current:
        message = "the pods are what the spec asks for" if several else "the pod is what the spec asks for"
        return Verdict("True", Reason.UP_TO_DATE, message)
    return Verdict("False", Reason.UPDATE_PENDING, _what_moves_it(o))


def _remedy(o: ObservedEngine) -> str:
    """Where Kueue keeps a workload in its queue as it is, whatever became of its pods."""
    if QUEUE_LABEL not in o.engine.meta.labels or "immutable" not in o.apply_error:
        return ""
    assert o.workload is not None
    name = f"{o.runs_as.lower()} {o.workload['metadata']['name']}"
    return f" - drain the engine, then: kubectl delete {name}; the operator makes it anew"


def _no_pod_yet(o: ObservedEngine) -> str:
    """And what it waits for, where that is known."""
    if o.pods and not replicas(o.workload):
        names = ", ".join(sorted(pod["metadata"]["name"] for pod in o.pods))
        return f"there is no pod yet: pods of before have to end first ({names})"
    if o.runs_as == LEADER_WORKER_SET and o.workload is not None and not looked_after(o):
        return f"there is no pod yet: {_nobody_looks_at(o.workload)}"
    return "there is no pod yet"


def _nobody_looks_at(leader_worker_set: Mapping[str, Any]) -> str:
    name = leader_worker_set["metadata"]["name"]
    return f"LWS's controller has not looked at LeaderWorkerSet {name}; see that it runs"


def _what_moves_it(o: ObservedEngine) -> str:
    """To the new template."""
    assert o.engine.spec is not None
    assert o.workload is not None
    assert o.pod is not None
    pod = o.pod["metadata"]
    if pod.get("deletionTimestamp"):
        return f"pod {pod['name']} ends, then one of the new template starts"
    if o.engine.spec.drain:
        message = f"pod {pod['name']} runs an earlier template: one of the new template replaces it"
        return f"{message} once the engine is drained"
    what, name = "the pod runs an earlier template and is not restarted by itself", f"pod {pod['name']}"
    if o.runs_as == LEADER_WORKER_SET:
        what = "the pods run an earlier template and are not restarted by themselves"
        name = f"LeaderWorkerSet {o.workload['metadata']['name']}"
    commits = "set spec.drain to true, so that experiments commit first"
    return f"{what}: {commits}, or delete {name}, to move to the new one"


def _pods_are_current(o: ObservedEngine) -> bool | None:
    """None: not known yet."""
    assert o.workload is not None
    assert o.pod is not None
    if o.runs_as == LEADER_WORKER_SET:
        wanted = template_wanted(o.engine)
        return all(template_of_pod(pod) == wanted for pod in (o.pod, *o.workers))
    status = o.workload.get("status") or {}
    if status.get("observedGeneration", 0) < o.workload["metadata"]["generation"]:
        return None
    running = (o.pod["metadata"].get("labels") or {}).get("controller-revision-hash")
    return bool(running == status.get("updateRevision"))


def _changes_kind(o: ObservedEngine) -> Verdict:
    """From one pod to several, or back."""
    assert o.engine.spec is not None
    if lacks_kind(o):
        return Verdict("False", Reason.LEADER_WORKER_SET_MISSING, f"{NO_LEADER_WORKER_SETS}; the pod that runs goes on")
    nodes = o.engine.spec.trainer.nodes
    what = f"spec.trainer.nodes is {nodes}, and the engine runs as a {o.runs_as}"
    next_one = o.of_kind(o.wanted_kind)
    if next_one is not None and replicas(o.workload) and not looked_after(o):
        message = f"{what}: {_nobody_looks_at(next_one)}, or set trainer.nodes to 1; until then its {o.runs_as} stays"
        return Verdict("False", Reason.UPDATE_PENDING, message)
    if o.pod is None or o.pod["metadata"].get("deletionTimestamp"):
        return Verdict("False", Reason.UPDATE_PENDING, f"{what}: its pods end, then a {o.wanted_kind} follows")
    if o.engine.spec.drain:
        return Verdict("False", Reason.UPDATE_PENDING, f"{what}: a {o.wanted_kind} follows once the engine is drained")
    message = f"{what}: set spec.drain to true, so that experiments commit first, to move to a {o.wanted_kind}"
    return Verdict("False", Reason.UPDATE_PENDING, message)


def lacks_kind(o: ObservedEngine) -> bool:
    """The cluster does not have the kind of workload that the spec asks for."""
    return o.wanted_kind not in o.served


def looked_after(o: ObservedEngine) -> bool:
    """Whether the workload that the spec asks for has a controller that makes its pods. Kubernetes' own always runs;
    LWS's writes a status, also to one without pods."""
    if o.wanted_kind != LEADER_WORKER_SET:
        return True
    return bool((o.leader_worker_set or {}).get("status"))


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
        name = o.pod["metadata"]["name"]
        message += f"; deleting pod {name} costs experiments at most the step that they are making"
    return Verdict("False", Reason.DRAINING, message)


def said_to_be_drained(o: ObservedEngine, said: Mapping[EngineCondition, Verdict]) -> bool:
    """It is, and was said to be so already: by then nobody is being attached."""
    stored = find_condition(o.engine.status.conditions, EngineCondition.DRAINED)
    now_drained = said.get(EngineCondition.DRAINED)
    if now_drained is not None and now_drained.status != "True":
        return False
    return stored is not None and stored.status == "True" and stored.observed_generation == o.engine.meta.generation


def pod_to_replace(o: ObservedEngine, said: Mapping[EngineCondition, Verdict]) -> DeletePod | None:
    """The pod of an engine that is drained. A LeaderWorkerSet replaces its pods by itself."""
    current = said.get(EngineCondition.WORKLOAD_CURRENT)
    if o.runs_as == LEADER_WORKER_SET or o.pod is None or o.pod["metadata"].get("deletionTimestamp"):
        return None
    if current is None or current.reason != Reason.UPDATE_PENDING or not said_to_be_drained(o, said):
        return None
    return DeletePod(o.pod["metadata"]["name"], o.pod["metadata"]["uid"])


def never_started(pod: Mapping[str, Any] | None) -> bool:
    """Kubernetes calls a pod Pending until its first container runs."""
    return pod is not None and (pod.get("status") or {}).get("phase") == "Pending"
