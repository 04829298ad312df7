"""Why an engine's pod does not run, as the engine and its experiments tell it."""

from __future__ import annotations

from typing import Any

import pytest

from clora_operator.decide_engine import decide_engine
from clora_operator.decide_sleep import wakes_on_demand, waking
from clora_operator.placement import place
from clora_operator.pod_trouble import kueue_labels, pod_trouble, told_trouble
from clora_operator.workload import manifests
from tests.unit.operator.factories import NOW, SETTINGS, ago, condition, engine, observed_engine, said, view
from tests.unit.operator.test_decide_engine import as_stored
from tests.unit.operator.test_decide_sleep import ours as sleeper
from tests.unit.operator.test_placement import claim, room

QUEUE = {"kueue.x-k8s.io/queue-name": "research"}
GATED = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked by gates"}
NO_NODE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}


def pod(*, conditions: Any = (), gates: Any = (), containers: Any = (), **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "main-0", "uid": "u", **metadata},
        "spec": {"schedulingGates": [{"name": gate} for gate in gates]},
        "status": {"phase": "Pending", "conditions": list(conditions), "containerStatuses": list(containers)},
    }


def waiting(reason: str, message: str = "", ended: dict[str, Any] | None = None) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return {"name": "engine", "state": state, "lastState": {"terminated": ended} if ended else {}}


@pytest.mark.parametrize(
    ("of", "reason", "message"),
    [
        (
            pod(conditions=[GATED], gates=["kueue.x-k8s.io/admission"]),
            "Queued",
            "pod main-0 waits in Kueue's queue research: it starts when the queue has quota for it",
        ),
        (
            pod(conditions=[GATED], gates=["example.com/approval"]),
            "Queued",
            "pod main-0 is held back by its scheduling gates: example.com/approval",
        ),
        (
            pod(conditions=[NO_NODE]),
            "PodUnschedulable",
            "pod main-0 finds no node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        ),
        (
            pod(containers=[waiting("ImagePullBackOff", "Back-off pulling image")]),
            "PodFailing",
            "pod main-0, container engine: ImagePullBackOff: Back-off pulling image",
        ),
        (
            pod(containers=[waiting("CrashLoopBackOff", "back-off 40s", ended={"exitCode": 2, "reason": "Error"})]),
            "PodFailing",
            "pod main-0, container engine: CrashLoopBackOff (last ended with exit code 2, Error): back-off 40s",
        ),
        (
            pod(
                containers=[
                    waiting("CrashLoopBackOff", ended={"exitCode": 3, "reason": "Error", "message": "a GPU failed\n"})
                ]
            ),
            "PodFailing",
            "pod main-0, container engine: CrashLoopBackOff (last ended with exit code 3, Error: a GPU failed)",
        ),
    ],
)
def test_what_stands_in_a_pods_way_is_ready_s_reason(of: dict[str, Any], reason: str, message: str) -> None:
    main = engine(image="clora-engine:test", meta={"labels": QUEUE})
    plan = decide_engine(observed_engine(main, view=view(down_since=ago(60), error="refused"), pod=of), NOW, SETTINGS)
    assert said(plan, "Ready") == ("False", reason)
    assert plan.status is not None
    assert next(c["message"] for c in plan.status["conditions"] if c["type"] == "Ready") == message
    (event,) = [e for e in plan.events if e.reason == reason]
    assert event.type == ("Normal" if reason == "Queued" else "Warning")


@pytest.mark.parametrize(
    "of",
    [
        None,
        pod(),
        pod(conditions=[GATED]),  # its gates are gone
        pod(containers=[waiting("ContainerCreating")]),
        pod(containers=[{"name": "engine", "state": {"running": {}}}]),
        pod(conditions=[NO_NODE], deletionTimestamp="2026-01-01T00:00:00Z"),
    ],
)
def test_a_pod_on_its_way_is_in_no_trouble(of: dict[str, Any] | None) -> None:
    assert pod_trouble(of, QUEUE) is None


def test_an_engine_that_answers_speaks_for_itself() -> None:
    main = engine(image="clora-engine:test")
    plan = decide_engine(observed_engine(main, view=view(), pod=pod(conditions=[NO_NODE])), NOW, SETTINGS)
    assert said(plan, "Ready") == ("True", "Serving")


def test_kueue_finds_its_labels_on_the_workload() -> None:
    labels = {**QUEUE, "kueue.x-k8s.io/priority-class": "high", "team": "a"}
    assert kueue_labels(labels) == {name: value for name, value in labels.items() if name != "team"}
    children = manifests(engine(image="clora-engine:test", meta={"labels": labels}))
    found = {child["kind"]: child["metadata"]["labels"] for child in children}
    assert found["StatefulSet"].items() >= kueue_labels(labels).items()
    assert "team" not in found["StatefulSet"]
    assert not kueue_labels(found["Service"])


@pytest.mark.parametrize("reason", ["Asleep", "Waking", "WakingHeldBack"])
def test_an_engine_that_wakes_stays_so_whatever_its_pod_waits_for(reason: str) -> None:
    """It says that nothing is attached to it, so that nobody gives its files up before it has come."""
    main = sleeper(condition("Ready", "False", reason), condition("Idle", "False", "Wanted"))
    silent = view(down_since=ago(60), error="refused")
    plan = decide_engine(observed_engine(main, view=silent, pod=pod(conditions=[NO_NODE]), wanted="one"), NOW, SETTINGS)
    assert said(plan, "Ready") == ("False", "WakingHeldBack")
    told_now = ("Normal", "WakingHeldBack") in [(event.type, event.reason) for event in plan.events]
    assert told_now == (reason != "WakingHeldBack")
    told = as_stored(main, plan)
    assert waking(told)
    assert told_trouble(told) == "pod main-0 finds no node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    plan = decide_engine(observed_engine(main, view=silent, wanted="one"), NOW, SETTINGS)
    assert said(plan, "Ready") == ("False", "Waking")
    fine = as_stored(main, plan)
    assert waking(fine)
    assert told_trouble(fine) == ""


@pytest.mark.parametrize("of", [pod(conditions=[NO_NODE]), pod(conditions=[GATED], gates=["a/b"])])
def test_a_new_engine_whose_pod_does_not_run_yet_is_there_for_who_waits_for_it(of: dict[str, Any]) -> None:
    main = engine(image="clora-engine:test", scaleDownAfterSeconds=60)
    assert wakes_on_demand(as_stored(main, decide_engine(observed_engine(main, view=None, pod=of), NOW, SETTINGS)))


def test_an_experiment_that_waits_for_the_engine_is_told_why() -> None:
    told = place([room(ready=False, trouble="pod main-0 finds no node: 0/3")], [claim("a")])["a"]
    assert told.message == "LoRAEngine main is not ready: pod main-0 finds no node: 0/3"
    wakes = place([room(ready=False, wakes=True, trouble="pod main-0 finds no node: 0/3")], [claim("a")])["a"]
    assert wakes.message.endswith("is waking: pod main-0 finds no node: 0/3")
