"""Engines that wait for quota: the operator with its documented rights, and Kueue's own controller and webhooks, before
a real API server. There is no node here: an admitted pod finds none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.integration.kueue_fixtures import Queue, kueue, priority_class
from tests.integration.lws_fixtures import lws
from tests.integration.operator_fixtures import Stage, condition, stage, wait_for

pytestmark = pytest.mark.integration
__all__ = ["kueue", "lws", "stage"]

QUEUED_BY_KUEUE = {"kueue.x-k8s.io/queue-name": "research"}
GPUS = 2  # of `spec`: one samples, one trains


def spec(**fields: Any) -> dict[str, Any]:
    small = {"sampler": {"gpus": 1}, "trainer": {"gpus": 1}}
    return {"model": {"name": "org/model"}, "image": "clora-engine:test", **small, **fields}


class Research:
    """Engines in Kueue's queue `research`."""

    def __init__(self, stage: Stage, kube: client.ApiClient, gpus: int) -> None:
        self.cluster, self.apps = stage.cluster, client.AppsV1Api(kube)
        self.queue = Queue(kube, stage.cluster.namespace, gpus)

    def create(self, name: str = "main", labels: dict[str, str] | None = None, **fields: Any) -> None:
        self.cluster.create("loraengines", name, spec(**fields), labels=QUEUED_BY_KUEUE | (labels or {}))

    def patch(self, name: str, body: dict[str, Any]) -> None:
        self.cluster.patch(name, body, "loraengines")

    def wait_reason(self, name: str, kind: str, reason: str) -> str:
        """The condition's message."""
        found = self.cluster.wait_reason(name, kind, reason, plural="loraengines")
        return str(condition(found, kind)["message"])

    def wait_queued(self, name: str = "main") -> str:
        return self.wait_reason(name, "Ready", "Queued")

    def wait_admitted(self, name: str = "main") -> None:
        self.wait_reason(name, "Ready", "PodUnschedulable")  # the scheduler has it, the cluster has no node

    def pods(self, name: str = "main") -> list[Any]:
        labels = f"clora.dev/engine={name}"
        return list(self.cluster.core.list_namespaced_pod(self.cluster.namespace, label_selector=labels).items)

    def stateful_set(self, name: str = "main") -> Any:
        return self.apps.read_namespaced_stateful_set(name, self.cluster.namespace)

    def clear(self) -> None:
        """Nothing of Kueue's keeps the namespace from going."""
        for engine in self.cluster.items("loraengines"):
            name = engine["metadata"]["name"]
            self.patch(name, {"metadata": {"finalizers": None}})
            self.cluster.delete(name, "loraengines")
        core, namespace = self.cluster.core, self.cluster.namespace
        wait_for(lambda: not core.list_namespaced_pod(namespace).items, "the pods to go")
        wait_for(lambda: not self.queue.workloads(), "Kueue's workloads to go")
        self.queue.delete()


@pytest.fixture
def research(stage: Stage, kube: client.ApiClient, kueue: None) -> Iterator[Callable[[int], Research]]:
    """Makes the queue, with so many GPUs."""
    made: list[Research] = []

    def make(gpus: int) -> Research:
        made.append(Research(stage, kube, gpus))
        return made[-1]

    yield make
    for one in made:
        one.clear()


def test_an_engine_waits_for_quota(stage: Stage, research: Callable[[int], Research]) -> None:
    team = research(0)
    stage.start_operator(QUEUE_WRITE_SECONDS="1")
    team.create()
    team.cluster.experiment("one")
    message = "pod main-0 waits in Kueue's queue research: it starts when the queue has quota for it"
    assert team.wait_queued() == message
    told = f"LoRAEngine main is not ready: {message}"
    team.cluster.wait("one", lambda o: condition(o, "Attached").get("message", "").startswith(told), told)
    (workload,) = team.queue.workloads()
    assert workload["spec"]["queueName"] == "research"
    (pods,) = workload["spec"]["podSets"]
    requests = pods["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert (pods["count"], requests["nvidia.com/gpu"]) == (1, str(GPUS))
    team.queue.set_gpus(GPUS)
    team.wait_admitted()
    team.wait_reason("main", "WorkloadCurrent", "UpToDate")


def test_engines_take_turns_by_sleeping(stage: Stage, research: Callable[[int], Research]) -> None:
    """One that sleeps gives its quota back, and one that wakes asks for it again."""
    team = research(GPUS)
    stage.start_operator(QUEUE_WRITE_SECONDS="1")
    team.create("first", scaleDownAfterSeconds=3600)
    team.wait_admitted("first")
    team.create("second")
    team.wait_queued("second")
    team.cluster.long_idle("first")
    team.wait_reason("first", "Ready", "Asleep")
    team.wait_admitted("second")
    team.cluster.experiment("one", engineRef={"name": "first"})
    message = team.wait_reason("first", "Ready", "WakingHeldBack")
    assert message == "pod first-0 waits in Kueue's queue research: it starts when the queue has quota for it"
    team.cluster.delete("second", "loraengines")
    team.cluster.wait(
        "first",
        lambda o: "finds no node" in condition(o, "Ready")["message"],
        "its pod to be admitted",
        plural="loraengines",
    )


def test_kueue_takes_an_engine_s_place(
    stage: Stage, research: Callable[[int], Research], kube: client.ApiClient
) -> None:
    """By priority: the pod goes, and comes again gated."""
    team = research(GPUS)
    for name, value in (("urgent", 1000), ("usual", 1)):
        priority_class(kube, name, value)
    stage.start_operator(QUEUE_WRITE_SECONDS="1")
    team.create("main", {"kueue.x-k8s.io/priority-class": "usual"})
    team.wait_admitted()
    (before,) = team.pods()
    team.create("above", {"kueue.x-k8s.io/priority-class": "urgent"})
    team.wait_admitted("above")
    assert team.wait_queued() == "pod main-0 waits in Kueue's queue research: it starts when the queue has quota for it"
    (after,) = team.pods()
    assert after.metadata.uid != before.metadata.uid
    team.cluster.delete("above", "loraengines")
    team.wait_admitted()


def test_what_kueue_refuses_is_said_with_its_remedy(stage: Stage, research: Callable[[int], Research]) -> None:
    """Requests and ports of a queued workload are fixed: the engine stays as it is until its workload is made anew."""
    team = research(8)
    stage.start_operator(QUEUE_WRITE_SECONDS="1")
    team.create()
    team.wait_admitted()
    before = team.stateful_set()
    team.patch("main", {"spec": {"trainer": {"gpus": 2}}})
    message = team.wait_reason("main", "WorkloadCurrent", "UpdateRefused")
    assert "field is immutable" in message
    assert message.endswith("kubectl delete statefulset main; the operator makes it anew")
    assert team.stateful_set().metadata.uid == before.metadata.uid
    team.wait_admitted()
    team.apps.delete_namespaced_stateful_set("main", team.cluster.namespace)
    team.wait_reason("main", "WorkloadCurrent", "UpToDate")
    team.wait_admitted()
    requests = team.stateful_set().spec.template.spec.containers[0].resources.requests
    assert requests["nvidia.com/gpu"] == "3"


def test_an_image_may_change_in_the_queue(stage: Stage, research: Callable[[int], Research]) -> None:
    team = research(GPUS)
    stage.start_operator(QUEUE_WRITE_SECONDS="1")
    team.create()
    team.wait_admitted()
    team.patch("main", {"spec": {"image": "clora-engine:next", "drain": True}})
    wait_for(
        lambda: [pod.spec.containers[0].image for pod in team.pods()] == ["clora-engine:next"], "the pod with the image"
    )
    team.wait_admitted()
    team.wait_reason("main", "WorkloadCurrent", "UpToDate")


def test_pods_of_one_engine_are_admitted_together(stage: Stage, research: Callable[[int], Research]) -> None:
    team = research(GPUS)  # the leader alone would fit
    stage.start_operator(QUEUE_WRITE_SECONDS="1")
    team.create(trainer={"nodes": 2, "gpus": 1})
    assert "waits in Kueue's queue research" in team.wait_queued()
    team.queue.set_gpus(GPUS + 1)
    team.wait_admitted()
    wait_for(lambda: [pod.spec.scheduling_gates for pod in team.pods()] == [None, None], "both pods without a gate")
