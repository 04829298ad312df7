"""An engine that sleeps when it is idle and wakes on demand, before a real API server and StatefulSet controller.

There is no node here, so its pod stays Pending, which is known to hold nobody. Instead of waiting for minutes a test
moves back the time that condition Idle carries: that is the operator's only clock.
"""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client

from tests.integration.operator_fixtures import LONG_AGO, Cluster, Stage, condition, stage, status, wait_for

pytestmark = pytest.mark.integration
__all__ = ["stage"]

AFTER = 3600


def spec(**fields: Any) -> dict[str, Any]:
    """It asks for a GPU, so that no pod of it ever starts."""
    return {
        "model": {"name": "org/model"},
        "image": "clora-engine:test",
        "capacity": {"maxExperiments": 1},
        "scaleDownAfterSeconds": AFTER,
        **fields,
    }


class Sleeper:
    """One engine that clora runs, as its platform team sees it."""

    def __init__(self, cluster: Cluster, kube: client.ApiClient, name: str = "main") -> None:
        self.cluster, self.name, self.apps = cluster, name, client.AppsV1Api(kube)

    def replicas(self) -> int | None:
        found = self.apps.list_namespaced_stateful_set(
            self.cluster.namespace, field_selector=f"metadata.name={self.name}"
        ).items
        return int(found[0].spec.replicas) if found else None

    def wait_replicas(self, number: int) -> None:
        wait_for(lambda: self.replicas() == number, f"{number} replicas of {self.name}")

    def wait_reason(self, kind: str, reason: str) -> dict[str, Any]:
        return self.cluster.wait_reason(self.name, kind, reason, plural="loraengines")

    def fall_asleep(self) -> dict[str, Any]:
        self.cluster.long_idle(self.name)
        asleep = self.wait_reason("Ready", "Asleep")
        self.wait_replicas(0)
        return asleep


@pytest.fixture
def sleeper(stage: Stage, kube: client.ApiClient) -> Sleeper:
    stage.cluster.create("loraengines", "main", spec())
    return Sleeper(stage.cluster, kube)


def test_it_sleeps_wakes_and_sleeps_again(stage: Stage, sleeper: Sleeper) -> None:
    stage.start_operator()
    cluster, core = stage.cluster, stage.cluster.core
    sleeper.wait_replicas(1)
    sleeper.wait_reason("WorkloadCurrent", "UpToDate")
    before = sleeper.apps.read_namespaced_stateful_set("main", cluster.namespace)
    token = core.read_namespaced_secret("main-token", cluster.namespace).data
    asleep = sleeper.fall_asleep()
    assert condition(asleep, "Ready")["status"] == "False"
    assert "wakes it" in condition(asleep, "Ready")["message"]
    sleeper.wait_reason("WorkloadCurrent", "Asleep")
    wait_for(lambda: not core.list_namespaced_pod(cluster.namespace).items, "the pod to go")
    assert "main-storage" in [
        c.metadata.name for c in core.list_namespaced_persistent_volume_claim(cluster.namespace).items
    ]

    cluster.experiment("one", arguments={"stepSeconds": "0"})
    sleeper.wait_replicas(1)
    waits = cluster.wait(
        "one", lambda o: "is waking" in condition(o, "Attached").get("message", ""), "the word that its engine wakes"
    )
    assert condition(waits, "Attached")["reason"] == "WaitingForEngine"
    woken = sleeper.wait_reason("Ready", "WakingHeldBack")  # there is no node here
    assert "finds no node" in condition(woken, "Ready")["message"]
    assert condition(woken, "Idle")["reason"] == "Wanted"
    assert "LoRAExperiment one" in condition(woken, "Idle")["message"]
    sleeper.wait_reason("WorkloadCurrent", "UpToDate")  # waking is no update
    after = sleeper.apps.read_namespaced_stateful_set("main", cluster.namespace)
    assert after.status.update_revision == before.status.update_revision
    assert core.read_namespaced_secret("main-token", cluster.namespace).data == token

    cluster.patch("one", {"spec": {"suspend": True}})
    idle = sleeper.wait_reason("Idle", "Unused")
    assert condition(idle, "Idle")["lastTransitionTime"] > LONG_AGO
    assert sleeper.replicas() == 1  # the time runs from now on
    sleeper.fall_asleep()
    cluster.patch("one", {"spec": {"suspend": False}})
    sleeper.wait_replicas(1)
    cluster.delete("one")
    cluster.wait_gone("one")
    sleeper.fall_asleep()
    cluster.wait_events("main", "Asleep")
    cluster.patch("main", {"spec": {"scaleDownAfterSeconds": None}}, "loraengines")
    sleeper.wait_replicas(1)
    assert condition(sleeper.wait_reason("Idle", "StaysAwake"), "Idle")["status"] == "False"


def test_a_restarted_operator_forgets_nothing(stage: Stage, sleeper: Sleeper) -> None:
    operator = stage.start_operator(RESYNC_SECONDS="1")
    cluster = stage.cluster
    sleeper.fall_asleep()
    generation = sleeper.apps.read_namespaced_stateful_set("main", cluster.namespace).metadata.generation
    operator.kill()
    operator.start()
    cluster.patch("main", {"metadata": {"labels": {"seen": "yes"}}}, "loraengines")
    sleeper.apps.patch_namespaced_stateful_set("main", cluster.namespace, {"spec": {"replicas": 2}})
    sleeper.wait_replicas(0)  # drift is put right
    assert condition(cluster.get("main", "loraengines"), "Ready")["reason"] == "Asleep"
    assert sleeper.apps.read_namespaced_stateful_set("main", cluster.namespace).metadata.generation == generation + 2
    operator.kill()
    cluster.experiment("one")  # while there is no operator
    operator.start()
    sleeper.wait_replicas(1)
    sleeper.wait_reason("Idle", "Wanted")


def test_labels_wake_an_engine_rather_than_to_queue(stage: Stage, kube: client.ApiClient) -> None:
    """The awake one with room first; when it is full, the one that sleeps."""
    stage.start_engine("awake", max_experiments=1)
    cluster = stage.cluster
    cluster.create("loraengines", "asleep", spec(), labels={"pool": "tests"})
    sleeper = Sleeper(cluster, kube, "asleep")
    stage.start_operator()
    sleeper.fall_asleep()
    by_labels: dict[str, Any] = {"engineRef": None, "engineSelector": {"matchLabels": {"pool": "tests"}}}
    cluster.experiment("first", max_steps=100_000, arguments={"stepSeconds": "0.3"}, **by_labels)
    assert status(cluster.wait_state("first", "Running"))["engine"]["name"] == "awake"
    assert sleeper.replicas() == 0
    cluster.experiment("second", **by_labels)
    sleeper.wait_replicas(1)
    waits = cluster.wait_reason("second", "Attached", "WaitingForEngine")
    assert "asleep" in condition(waits, "Attached")["message"]
    cluster.delete("first")  # its slot is nearer than the engine that loads
    done = cluster.wait_state("second", "Succeeded")
    assert status(done)["engine"]["name"] == "awake"
    sleeper.fall_asleep()


@pytest.mark.parametrize(("policy", "replicas"), [("Retain", 0), ("Delete", 1)])
def test_a_release_wakes_the_engine_only_for_files_that_go(
    stage: Stage, sleeper: Sleeper, policy: str, replicas: int
) -> None:
    stage.start_operator(RELEASE_DEADLINE_SECONDS="1")
    cluster = stage.cluster
    cluster.experiment("one", suspend=True, deletionPolicy=policy)
    cluster.wait_reason("one", "Attached", "Suspended")
    told = {"status": {"engine": {"name": "main", "epoch": 1}}}  # as if it had run there before
    cluster.patch_status("one", told)
    sleeper.fall_asleep()
    cluster.delete("one")
    sleeper.wait_replicas(replicas)
    if policy == "Retain":
        cluster.wait_gone("one")
        assert sleeper.replicas() == 0
        assert "ReleasedWithoutEngine" not in cluster.event_reasons("one")
        return
    woken = sleeper.wait_reason("Idle", "Wanted")
    assert "LoRAExperiment one" in condition(woken, "Idle")["message"]
    assert cluster.exists("one")  # past the deadline for an engine that is awake: this one has yet to load
    cluster.delete("main", "loraengines")
    cluster.wait_gone("one")
    cluster.wait_events("one", "ReleasedWithoutEngine")
