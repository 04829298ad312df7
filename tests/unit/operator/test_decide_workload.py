"""decide_engine, of an engine of several pods: what is applied when, and how one kind of workload follows the other."""

from __future__ import annotations

from typing import Any

import pytest

from clora_operator.decide_engine import decide_engine
from clora_operator.plan import ApplyWorkload, DeletePod, Disconnect, Plan, ScaleToZero
from clora_operator.resources import Engine, parse_engine
from clora_operator.workload import digest, leader_worker_set_name, manifests, template_wanted
from tests.unit.operator.factories import (
    NOW,
    SETTINGS,
    ago,
    condition,
    experiment,
    message,
    metadata,
    observed_engine,
    report,
    said,
    view,
)

BUSY = view(report(experiment()))
SILENT = view(down_since=ago(60), error="refused")
DRAINED = condition("Drained", "True", "Drained")
SERVES = condition("Ready", "True", "Serving")
RUNS = {"phase": "Running", "containerStatuses": [{"name": "engine", "state": {"running": {}}}]}
CRASHES = {
    "phase": "Running",
    "containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}],
}
ENDS = "2026-01-01T11:00:00Z"
OLD = "of-an-earlier-template"


def ours(*conditions: dict[str, Any], nodes: int = 2, **fields: Any) -> Engine:
    spec = {"model": {"name": "small"}, "image": "clora-engine:test", "trainer": {"nodes": nodes}, **fields}
    body = {"metadata": metadata("main", "engine-uid"), "spec": spec, "status": {"conditions": list(conditions)}}
    return parse_engine(body)


NAME = leader_worker_set_name(ours().meta)


def group(template: str | None = None, replicas: int = 1, **meta: Any) -> dict[str, Any]:
    """A LeaderWorkerSet; of the wanted template unless told otherwise."""
    mark = {"clora.dev/template": template_wanted(ours()) if template is None else template}
    return {
        "metadata": {"name": NAME, "resourceVersion": "7", **meta},
        "spec": {
            "replicas": replicas,
            "leaderWorkerTemplate": {"leaderTemplate": {"metadata": {"annotations": mark}}},
        },
    }


def looked_at(leader_worker_set: dict[str, Any]) -> dict[str, Any]:
    """As its controller leaves it."""
    return leader_worker_set | {"status": {"hpaPodSelector": "a=b"}}


def stateful_set(replicas: int = 1) -> dict[str, Any]:
    return {
        "metadata": {"name": "main", "resourceVersion": "8", "generation": 1},
        "spec": {"replicas": replicas},
        "status": {"observedGeneration": 1, "updateRevision": "a"},
    }


def pod(role: str, status: dict[str, Any] = RUNS, template: str | None = None, **meta: Any) -> dict[str, Any]:
    """Of the LeaderWorkerSet; with the role "" of the StatefulSet."""
    name = {"": "main-0", "leader": f"{NAME}-0", "worker": f"{NAME}-0-1"}[role]
    labels = {"clora.dev/engine": "main", "controller-revision-hash": "a"} | ({"clora.dev/role": role} if role else {})
    mark = {"clora.dev/template": template_wanted(ours()) if template is None else template}
    return {"metadata": {"name": name, "uid": name, "labels": labels, "annotations": mark, **meta}, "status": status}


def pods(*, template: str | None = None, leader: dict[str, Any] = RUNS) -> tuple[dict[str, Any], ...]:
    return pod("leader", leader, template), pod("worker", template=template)


def decide(of: Engine, **fields: Any) -> Plan:
    return decide_engine(observed_engine(of, **({"view": view()} | fields)), NOW, SETTINGS)


def applied(plan: Plan) -> list[str]:
    """Kinds of the manifests."""
    return [m["kind"] for action in plan.actions if isinstance(action, ApplyWorkload) for m in action.manifests]


def with_pods(plan: Plan) -> list[str]:
    """Kinds of the workloads that are applied and are to have pods."""
    made = [m for action in plan.actions if isinstance(action, ApplyWorkload) for m in action.manifests]
    return [m["kind"] for m in made if m["spec"].get("replicas")]


def selector(plan: Plan) -> dict[str, str]:
    (apply,) = [action for action in plan.actions if isinstance(action, ApplyWorkload)]
    return dict(apply.manifests[0]["spec"]["selector"])


def scaled(plan: Plan) -> list[ScaleToZero]:
    return [action for action in plan.actions if isinstance(action, ScaleToZero)]


# ------------------------------------------------------------------ as long as nothing is wrong


def test_it_is_made() -> None:
    assert applied(decide(ours(), view=None))[-1] == "LeaderWorkerSet"


def test_once_made_it_is_left_alone_and_put_right() -> None:
    of = ours(SERVES)
    known: dict[str, Any] = {"leader_worker_set": group(), "pods": pods()}
    assert not applied(decide(of, applied=digest(manifests(of)), **known))
    assert applied(decide(of, applied="", **known))[-1] == "LeaderWorkerSet"  # a resync
    plan = decide(of, applied=digest(manifests(of)), **known)
    assert said(plan, "WorkloadCurrent") == ("True", "UpToDate")
    assert plan.requeue_after is None


# ------------------------------------------------------------------ updates


@pytest.mark.parametrize(
    ("conditions", "fields", "goes"),
    [
        ((SERVES,), {"view": BUSY}, False),
        ((SERVES,), {"view": view()}, False),  # idle for the moment: somebody may just attach
        ((SERVES,), {"view": SILENT}, False),
        ((SERVES,), {"view": None}, False),
        ((DRAINED,), {}, False),  # spec.drain is false again
        ((DRAINED,), {"drain": True}, True),
        ((DRAINED,), {"drain": True, "view": BUSY}, False),
        ((), {"drain": True}, False),  # first it is said
        ((SERVES,), {"pods": ()}, True),
        ((SERVES,), {"pods": pods(template=OLD, leader={"phase": "Pending"}), "view": None}, True),
        ((SERVES,), {"pods": pods(template=OLD, leader=CRASHES), "view": SILENT}, True),
        ((SERVES,), {"pods": (pod("leader", template=OLD, deletionTimestamp=ENDS),)}, True),
        ((SERVES,), {"leader_worker_set": group(OLD, deletionTimestamp=ENDS), "pods": ()}, False),
        ((SERVES,), {"leader_worker_set": None, "pods": pods(template=OLD)}, False),  # somebody has deleted it
        ((SERVES,), {"leader_worker_set": None, "pods": ()}, True),
    ],
)
def test_templates_change_only_when_the_pods_may_go(conditions: Any, fields: dict[str, Any], goes: bool) -> None:
    of = ours(*conditions, drain=fields.pop("drain", False))
    known: dict[str, Any] = {"leader_worker_set": group(OLD), "pods": pods(template=OLD)}
    plan = decide(of, **(known | fields))
    assert ("LeaderWorkerSet" in applied(plan)) == goes
    assert not [action for action in plan.actions if isinstance(action, DeletePod)]
    assert not scaled(plan)


@pytest.mark.parametrize(("drain", "words"), [(True, "once the engine is drained"), (False, "set spec.drain to true")])
def test_what_moves_it_to_the_new_template_is_said(drain: bool, words: str) -> None:
    of = ours(SERVES, drain=drain)
    plan = decide(of, view=BUSY, leader_worker_set=group(OLD), pods=pods(template=OLD))
    assert said(plan, "WorkloadCurrent") == ("False", "UpdatePending")
    assert words in message(plan, "WorkloadCurrent")
    assert drain or f"delete LeaderWorkerSet {NAME}" in message(plan, "WorkloadCurrent")
    assert plan.requeue_after is not None, "nobody watches LeaderWorkerSets"


def test_one_worker_of_an_earlier_template_is_enough() -> None:
    mixed = (pod("leader"), pod("worker", template=OLD))
    plan = decide(ours(DRAINED, drain=True), leader_worker_set=group(), pods=mixed)
    assert said(plan, "WorkloadCurrent") == ("False", "UpdatePending")


# ------------------------------------------------------------------ from one kind to the other


def test_a_busy_engine_of_one_pod_stays_so_until_it_is_drained() -> None:
    known: dict[str, Any] = {"stateful_set": stateful_set(), "pods": (pod(""),)}
    plan = decide(ours(SERVES), view=BUSY, **known)
    assert applied(plan) == ["Service", "PersistentVolumeClaim"]
    assert selector(plan) == {"clora.dev/engine": "main"}, "its Service still has the pod that runs"
    assert not scaled(plan)
    assert said(plan, "Ready") == ("True", "Serving")
    assert said(plan, "WorkloadCurrent") == ("False", "UpdatePending")
    assert "set spec.drain to true" in message(plan, "WorkloadCurrent")
    drained = decide(ours(DRAINED, drain=True), leader_worker_set=looked_at(group(replicas=0)), **known)
    assert scaled(drained) == [ScaleToZero("StatefulSet", "main", "8")]
    assert with_pods(drained) == []
    assert selector(drained) == {"clora.dev/engine": "main"}


def test_the_pod_stays_until_a_controller_looks_at_the_next_kind() -> None:
    """The kind may be installed and its controller not run: then no pods would come in the place of this one."""
    of, known = ours(DRAINED, drain=True), {"stateful_set": stateful_set(), "pods": (pod(""),)}
    plan = decide(of, **known)
    (apply,) = [action for action in plan.actions if isinstance(action, ApplyWorkload)]
    assert apply.manifests[-1]["kind"] == "LeaderWorkerSet"
    assert apply.manifests[-1]["spec"]["replicas"] == 0
    assert not scaled(plan)
    unseen = decide(of, leader_worker_set=group(replicas=0), applied=apply.digest, **known)
    assert not unseen.actions[:-1], "nothing but its connection"
    assert said(unseen, "WorkloadCurrent") == ("False", "UpdatePending")
    assert f"has not looked at LeaderWorkerSet {NAME}; see that it runs" in message(unseen, "WorkloadCurrent")
    assert "set trainer.nodes to 1" in message(unseen, "WorkloadCurrent")
    assert unseen.requeue_after is not None
    assert unseen.requeue_after <= 2
    back = decide(ours(DRAINED, nodes=1, drain=True), leader_worker_set=group(replicas=0), **known)
    assert said(back, "WorkloadCurrent") == ("True", "UpToDate")
    assert not scaled(back)


def test_the_next_kind_comes_when_the_last_pod_of_the_other_is_gone() -> None:
    ends = pod("", deletionTimestamp=ENDS)
    waits = decide(ours(DRAINED, drain=True), view=SILENT, stateful_set=stateful_set(0), pods=(ends,))
    assert with_pods(waits) == []
    assert selector(waits) == {"clora.dev/engine": "main"}
    assert "end" in message(waits, "WorkloadCurrent")
    assert waits.requeue_after is not None
    assert waits.requeue_after <= 2
    gone = decide(ours(DRAINED, drain=True), view=SILENT, stateful_set=stateful_set(0))
    assert with_pods(gone) == ["LeaderWorkerSet"]
    assert selector(gone) == {"clora.dev/engine": "main", "clora.dev/role": "leader"}


def test_and_back() -> None:
    known: dict[str, Any] = {"stateful_set": stateful_set(0), "leader_worker_set": group(), "pods": pods()}
    busy = decide(ours(SERVES, nodes=1), view=BUSY, **known)
    assert applied(busy) == ["Service", "PersistentVolumeClaim"]
    assert selector(busy) == {"clora.dev/engine": "main", "clora.dev/role": "leader"}
    assert not scaled(busy)
    assert busy.requeue_after is not None
    drained = decide(ours(DRAINED, nodes=1, drain=True), **known)
    assert scaled(drained) == [ScaleToZero("LeaderWorkerSet", NAME, "7")]
    assert "StatefulSet" not in applied(drained)
    worker = (pod("worker", deletionTimestamp=ENDS),)
    waits = decide(
        ours(DRAINED, nodes=1, drain=True), **(known | {"leader_worker_set": group(replicas=0), "pods": worker})
    )
    assert "StatefulSet" not in applied(waits)
    gone = decide(ours(DRAINED, nodes=1, drain=True), **(known | {"leader_worker_set": group(replicas=0), "pods": ()}))
    assert applied(gone)[-1] == "StatefulSet"
    assert not scaled(gone)


def test_two_at_once_are_one_too_many() -> None:
    """Somebody has scaled the empty one up."""
    both: dict[str, Any] = {"stateful_set": stateful_set(1), "leader_worker_set": group(), "pods": (*pods(), pod(""))}
    plan = decide(ours(SERVES), view=BUSY, applied=digest(manifests(ours())), **both)
    assert plan.actions[0] == ScaleToZero("StatefulSet", "main", "8")
    assert said(plan, "WorkloadCurrent") == ("True", "UpToDate")


def test_an_engine_that_sleeps_moves_by_itself() -> None:
    conditions = (condition("Ready", "False", "Asleep"), condition("Idle", "True", "Unused", since=9999))
    of = ours(*conditions, scaleDownAfterSeconds=600)
    plan = decide(of, wanted="", view=None, stateful_set=stateful_set(0))
    assert applied(plan)[-1] == "LeaderWorkerSet"
    (apply,) = [action for action in plan.actions if isinstance(action, ApplyWorkload)]
    assert apply.manifests[-1]["spec"]["replicas"] == 0
    awake = decide(of, wanted="team/one", view=None, leader_worker_set=group(OLD, replicas=0))
    (apply,) = [action for action in awake.actions if isinstance(action, ApplyWorkload)]
    assert apply.manifests[-1]["spec"]["replicas"] == 1
    ends = decide(of, wanted="team/one", view=None, leader_worker_set=group(replicas=0), pods=pods())
    assert "LeaderWorkerSet" not in applied(ends), "the pods of before it slept are still there"


# ------------------------------------------------------------------ a cluster without the kind


def test_without_the_kind_the_remedy_is_said_and_nothing_is_made() -> None:
    plan = decide(ours(), view=None, served=frozenset({"StatefulSet"}))
    assert said(plan, "Accepted") == ("False", "LeaderWorkerSetMissing")
    assert said(plan, "Ready") == ("False", "LeaderWorkerSetMissing")
    assert "install LWS" in message(plan, "Accepted")
    assert "set trainer.nodes to 1" in message(plan, "Accepted")
    assert not plan.actions
    assert plan.requeue_after is not None, "it may be installed"


def test_without_the_kind_the_pod_that_runs_goes_on() -> None:
    known: dict[str, Any] = {"stateful_set": stateful_set(), "pods": (pod(""),), "served": frozenset({"StatefulSet"})}
    for of, of_view in ((ours(SERVES), BUSY), (ours(DRAINED, drain=True), view())):
        plan = decide(of, view=of_view, **known)
        assert said(plan, "Ready") == ("True", "Serving")
        assert said(plan, "WorkloadCurrent") == ("False", "LeaderWorkerSetMissing")
        assert not scaled(plan)


def test_without_the_kind_the_pod_that_runs_is_not_said_to_sleep() -> None:
    """It could not end it, for none would come in its place."""
    of = ours(SERVES, condition("Idle", "True", "Unused", since=9999), scaleDownAfterSeconds=600)
    known: dict[str, Any] = {"stateful_set": stateful_set(), "pods": (pod(""),), "wanted": ""}
    plan = decide(of, served=frozenset({"StatefulSet"}), **known)
    assert said(plan, "Ready") == ("True", "Serving")
    assert Disconnect() not in plan.actions
    plan = decide(of, **known)
    assert said(plan, "Ready") == ("False", "Asleep")
    assert scaled(plan)


# ------------------------------------------------------------------ pods in trouble


def test_what_the_first_pod_waits_for_is_said() -> None:
    of = ours(condition("Ready", "False", "Waking"), scaleDownAfterSeconds=600)
    stuck = (pod("worker", deletionTimestamp=ENDS),)
    plan = decide(of, view=None, wanted="x", leader_worker_set=group(replicas=0), pods=stuck)
    assert f"pods of before have to end first ({NAME}-0-1)" in message(plan, "WorkloadCurrent")
    plan = decide(ours(), view=None, leader_worker_set=group())
    assert f"has not looked at LeaderWorkerSet {NAME}" in message(plan, "WorkloadCurrent")
    plan = decide(ours(), view=None, leader_worker_set=group() | {"status": {"conditions": []}})
    assert message(plan, "WorkloadCurrent") == "there is no pod yet"


def test_a_worker_in_trouble_is_told_while_the_engine_waits_for_it() -> None:
    pending = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "reason": "Unschedulable", "message": "0/3 nodes are available"}],
    }
    known: dict[str, Any] = {"leader_worker_set": group(), "pods": (pod("leader"), pod("worker", pending))}
    starting = view(down_since=ago(1), starting=True, error="the trainer waits for its nodes")
    plan = decide(ours(), view=starting, **known)
    assert said(plan, "Ready") == ("False", "PodUnschedulable")
    assert f"pod {NAME}-0-1 finds no node" in message(plan, "Ready")
    assert said(decide(ours(), view=view(ready=False), **known), "Ready") == ("False", "PodUnschedulable")
    assert said(decide(ours(), view=None, **known), "Ready") == ("False", "PodUnschedulable")
    assert said(decide(ours(), view=view(), **known), "Ready") == ("True", "Serving")


def test_a_group_that_waits_for_quota_is_queued() -> None:
    gated = pod("leader", {"phase": "Pending"}) | {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
    plan = decide(ours(), view=None, leader_worker_set=group(), pods=(gated,))
    assert said(plan, "Ready") == ("False", "Queued")
