"""Who may use an engine, and when: priorities and preemption, drains, other namespaces, the end after the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.integration.operator_fixtures import Cluster, Stage, condition, stage, status, wait_for

pytestmark = pytest.mark.integration
__all__ = ["stage"]

SLOW = {"stepSeconds": "0.3"}
ENDLESS = 100_000


@pytest.fixture
def priority_class(kube: client.ApiClient, namespace: str) -> Iterator[Callable[..., str]]:
    """Makes PriorityClasses, named after the test's namespace, for they belong to the whole cluster."""
    scheduling = client.SchedulingV1Api(kube)
    made = []

    def make(name: str, value: int, policy: str = "PreemptLowerPriority") -> str:
        body = {"metadata": {"name": f"{namespace}-{name}"}, "value": value, "preemptionPolicy": policy}
        scheduling.create_priority_class(body)
        made.append(f"{namespace}-{name}")
        return made[-1]

    yield make
    for name in made:
        scheduling.delete_priority_class(name)


def test_a_higher_priority_takes_the_lowest_ones_slot_and_gives_it_back(
    stage: Stage, priority_class: Callable[..., str]
) -> None:
    engine = stage.start_engine(max_experiments=2)
    operator = stage.start_operator()
    cluster, high, low = stage.cluster, priority_class("high", 1000), priority_class("low", -10)
    kept = cluster.experiment("a-kept", max_steps=ENDLESS, arguments=SLOW)
    goes = cluster.experiment("b-goes", max_steps=ENDLESS, arguments=SLOW, priorityClassName=low, backoffLimit=0)
    for name in ("a-kept", "b-goes"):
        cluster.wait(name, lambda o: status(o).get("progress", {}).get("step", 0) >= 1, "a step")
    patient = cluster.experiment("c-patient", arguments=SLOW, priorityClassName=priority_class("patient", 500, "Never"))
    cluster.wait_state("c-patient", "Queued")
    important = cluster.experiment("d-important", max_steps=ENDLESS, arguments=SLOW, priorityClassName=high)
    cluster.wait_state("d-important", "Running")
    waits = cluster.wait("b-goes", lambda o: condition(o, "Attached").get("reason") == "Preempted", "the preemption")
    assert condition(waits, "Attached")["status"] == "False"
    assert condition(waits, "Progressing")["status"] == "False"
    assert status(waits)["preemptedBy"] == "d-important"
    assert "d-important" in condition(waits, "Attached")["message"]
    assert status(waits)["state"] == "Queued"
    # the patient one has preempted nobody, and goes before the preempted one, whose priority is lower
    cluster.wait("c-patient", lambda o: status(o).get("queuePosition") == 1, "the first place")
    cluster.wait("b-goes", lambda o: status(o).get("queuePosition") == 2, "the second place")
    operator.kill()  # nothing of it is only in memory
    operator.start()
    cluster.patch("d-important", {"spec": {"maxSteps": 1}})
    cluster.wait_state("d-important", "Succeeded")
    cluster.wait_state("c-patient", "Succeeded")
    cluster.wait_state("b-goes", "Running")
    cluster.patch("b-goes", {"spec": {"maxSteps": 1}})
    done = cluster.wait_state("b-goes", "Succeeded")
    assert status(done)["restarts"] == 0
    assert "preemptedBy" not in status(done)
    _, second = engine.events("attach", goes)
    assert second["step"] == engine.events("leave", goes)[0]["step"] > 0  # from its last commit
    assert [len(engine.events("attach", uid)) for uid in (kept, patient, important)] == [1, 1, 1]
    assert cluster.wait_events("b-goes", "Preempted").count("Preempted") == 1
    assert status(cluster.get("a-kept"))["state"] == "Running"


def test_a_change_that_the_engine_refuses_keeps_no_slot(stage: Stage, priority_class: Callable[..., str]) -> None:
    """As of an engine of an earlier release: what runs goes on, and leaves, with its last commit, when it has to."""
    engine = stage.start_engine(max_experiments=1)
    operator = stage.start_operator()
    cluster = stage.cluster
    low = cluster.experiment("low", max_steps=ENDLESS, arguments=SLOW | {"unknownField": "stopWhen"})
    cluster.wait("low", lambda o: status(o).get("progress", {}).get("step", 0) >= 1, "a step")
    cluster.patch("low", {"spec": {"stopWhen": {"metric": "rewardMean", "atLeast": "0.9"}}})
    refused = cluster.wait_reason("low", "Accepted", "InvalidSpec")
    assert condition(refused, "Accepted")["message"] == "spec.stopWhen: there is no such field"
    assert condition(refused, "Attached")["status"] == "True"
    operator.kill()  # it asks again, and is refused again
    operator.start()
    high = cluster.experiment("high", max_steps=4, arguments=SLOW, priorityClassName=priority_class("high", 1000))
    cluster.wait_state("high", "Succeeded")
    waits = cluster.wait_reason("low", "Attached", "InvalidSpec")
    assert condition(waits, "Attached")["status"] == "False"
    assert low not in engine.uids()
    left = engine.events("leave", low)[-1]["step"]
    assert left == engine.commits(low)[-1] > 0
    cluster.patch("low", {"spec": {"stopWhen": None}})
    cluster.wait("low", lambda o: status(o)["progress"]["step"] > left, "it to go on")
    assert [event["step"] for event in engine.events("loaded", low)] == [0, left]
    assert len(engine.events("attach", high)) == 1
    assert status(cluster.get("low"))["restarts"] == 0


def test_a_changed_priority_counts_at_once(stage: Stage, priority_class: Callable[..., str]) -> None:
    engine = stage.start_engine(max_experiments=1)
    stage.start_operator(RESYNC_SECONDS="600")
    cluster = stage.cluster
    first = cluster.experiment("first", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("first", "Running")
    second = cluster.experiment("second", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("second", "Queued")
    cluster.patch("second", {"spec": {"priorityClassName": priority_class("high", 5)}})
    cluster.wait_state("second", "Running")
    cluster.wait_reason("first", "Attached", "Preempted")
    cluster.patch("first", {"spec": {"priorityClassName": priority_class("higher", 6)}})
    cluster.wait_state("first", "Running")
    cluster.wait_reason("second", "Attached", "Preempted")
    assert [len(engine.events("attach", uid)) for uid in (first, second)] == [2, 1]


def test_a_priority_class_that_comes_later(stage: Stage, priority_class: Callable[..., str]) -> None:
    engine = stage.start_engine(max_experiments=1)
    stage.start_operator(RESYNC_SECONDS="1")
    cluster = stage.cluster
    holder = cluster.experiment("holder", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("holder", "Running")
    name = f"{cluster.namespace}-late"
    uid = cluster.experiment("one", max_steps=3, priorityClassName=name)
    refused = cluster.wait_reason("one", "Accepted", "PriorityClassNotFound")
    assert name in condition(refused, "Accepted")["message"]
    assert uid not in engine.uids()
    priority_class("late", 5)
    cluster.wait_state("one", "Succeeded")
    wait_for(lambda: len(engine.events("attach", holder)) == 2, "the holder to be back")


def test_an_operator_that_may_not_read_priority_classes_says_so(
    stage: Stage, kube: client.ApiClient, priority_class: Callable[..., str]
) -> None:
    """As with a chart that is installed for single namespaces."""
    client.RbacAuthorizationV1Api(kube).replace_cluster_role(
        f"clora-operator-{stage.cluster.namespace}",
        {"metadata": {"name": f"clora-operator-{stage.cluster.namespace}"}, "rules": []},
    )
    stage.start_engine()
    stage.start_operator()
    stage.cluster.experiment("one", priorityClassName=priority_class("high", 5))
    refused = stage.cluster.wait_reason("one", "Accepted", "PriorityClassUnreadable")
    assert "priorityclasses.scheduling.k8s.io" in condition(refused, "Accepted")["message"]
    stage.cluster.patch("one", {"spec": {"priorityClassName": None}})
    stage.cluster.wait_state("one", "Succeeded")


@pytest.mark.parametrize(("policy", "arguments"), [("Retain", {}), ("Delete", {"failAtStep": "2"})])
def test_what_has_ended_goes_at_once_by_the_ordinary_way(stage: Stage, policy: str, arguments: dict[str, str]) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    limits: dict[str, Any] = {"ttlSecondsAfterFinished": 0, "backoffLimit": 0, "deletionPolicy": policy}
    uid = stage.cluster.experiment("one", arguments=arguments | {"retryable": "false"}, **limits)
    stage.cluster.wait_gone("one")
    assert engine.events("attach", uid)
    assert uid not in engine.uids()
    assert engine.has_files(uid) == (policy == "Retain")


def test_an_operator_that_was_away_deletes_what_is_overdue_and_nothing_else(stage: Stage) -> None:
    stage.start_engine()
    operator = stage.start_operator()
    cluster = stage.cluster
    for name, seconds in (("soon", 3), ("later", 3600)):
        cluster.experiment(name, ttlSecondsAfterFinished=seconds)
    ended = cluster.wait_state("soon", "Succeeded")
    cluster.wait_state("later", "Succeeded")
    operator.kill()
    assert cluster.get("soon")["metadata"]["uid"] == ended["metadata"]["uid"]
    operator.start()
    cluster.wait_gone("soon")
    assert status(cluster.get("later"))["state"] == "Succeeded"
    cluster.patch("later", {"spec": {"ttlSecondsAfterFinished": 1}})  # it can change afterwards
    cluster.wait_gone("later")


def test_a_drained_engine_is_left_and_come_back_to(stage: Stage) -> None:
    engine = stage.start_engine(max_experiments=2)
    operator = stage.start_operator()
    cluster = stage.cluster
    running = {name: cluster.experiment(name, max_steps=12, arguments=SLOW, backoffLimit=0) for name in ("one", "two")}
    for name in running:
        cluster.wait(name, lambda o: status(o).get("progress", {}).get("step", 0) >= 1, "a step")
    cluster.patch("main", {"spec": {"drain": True}}, "loraengines")
    cluster.wait_reason("main", "Drained", "Drained", plural="loraengines")
    for name in running:
        left = cluster.wait(name, lambda o: condition(o, "Attached").get("status") == "False", "the detachment")
        assert condition(left, "Attached")["reason"] == "EngineDraining"
        assert status(left)["state"] == "Queued"
    assert condition(cluster.get("main", "loraengines"), "Ready")["status"] == "True"
    new = cluster.experiment("three", max_steps=1)
    cluster.wait_reason("three", "Attached", "EngineDraining")
    operator.kill()
    engine.kill()  # what an update of the engine amounts to
    engine.start()
    operator.start()
    cluster.wait("main", lambda o: status(o).get("epoch") == 2, "the new epoch", plural="loraengines")
    assert engine.uids() == set()
    assert condition(cluster.get("main", "loraengines"), "Drained")["status"] == "True"
    cluster.patch("main", {"spec": {"drain": False}}, "loraengines")
    for name, uid in running.items():
        done = cluster.wait_state(name, "Succeeded")
        assert status(done)["restarts"] == 0
        _, second = engine.events("attach", uid)
        assert second["step"] == engine.events("leave", uid)[0]["step"] > 0
        assert cluster.wait_events(name, "EngineDraining").count("EngineDraining") == 1
    cluster.wait_state("three", "Succeeded")
    assert len(engine.events("attach", new)) == 1
    assert condition(cluster.get("main", "loraengines"), "Drained")["reason"] == "NotDraining"


def test_a_drained_engines_pod_is_replaced_when_its_template_is_new(stage: Stage) -> None:
    """There is no node: the pod never starts, as one whose image cannot be pulled, and so it holds nobody."""
    stage.start_operator()
    cluster = stage.cluster
    cluster.create("loraengines", "big", {"model": {"name": "org/model"}, "image": "clora-engine:wrong"})
    cluster.wait_reason("big", "WorkloadCurrent", "UpToDate", plural="loraengines")
    before = cluster.core.read_namespaced_pod("big-0", cluster.namespace)
    cluster.patch("big", {"spec": {"image": "clora-engine:right"}}, "loraengines")
    pending = cluster.wait_reason("big", "WorkloadCurrent", "UpdatePending", plural="loraengines")
    assert "set spec.drain to true" in condition(pending, "WorkloadCurrent")["message"]
    assert cluster.core.read_namespaced_pod("big-0", cluster.namespace).metadata.uid == before.metadata.uid
    cluster.patch("big", {"spec": {"drain": True}}, "loraengines")
    cluster.wait_reason("big", "WorkloadCurrent", "UpToDate", plural="loraengines")
    after = cluster.core.read_namespaced_pod("big-0", cluster.namespace)
    assert after.metadata.uid != before.metadata.uid
    assert after.spec.containers[0].image == "clora-engine:right"
    assert condition(cluster.get("big", "loraengines"), "Drained")["status"] == "True"


@pytest.fixture
def guests(stage: Stage, kube: client.ApiClient) -> Iterator[Cluster]:
    """A second team's namespace, with a label."""
    name = f"{stage.cluster.namespace}-guests"
    core = client.CoreV1Api(kube)
    core.create_namespace({"metadata": {"name": name, "labels": {"team": "guests"}}})
    yield stage.guest(kube, name)
    core.delete_namespace(name)


def test_an_engine_for_other_namespaces(stage: Stage, guests: Cluster) -> None:
    engine = stage.start_engine(max_experiments=3)
    operator = stage.start_operator()
    host = stage.cluster
    reference = {"name": "main", "namespace": host.namespace}
    config_map = {"metadata": {"name": "sets"}, "data": {"train": "{}"}}
    guests.core.create_namespaced_config_map(guests.namespace, config_map)
    data = {"configMap": {"name": "sets", "key": "train"}}
    first = guests.experiment("one", max_steps=ENDLESS, arguments=SLOW, engineRef=reference, data=data)
    refused = guests.wait_reason("one", "Accepted", "NamespaceNotAllowed")
    assert "allowedNamespaces" in condition(refused, "Accepted")["message"]
    assert first not in engine.uids()

    selector = {"from": "Selector", "selector": {"matchLabels": {"team": "guests"}}}
    limits = {"maxPerNamespace": 1}
    host.patch("main", {"spec": {"allowedNamespaces": selector, "capacity": limits}}, "loraengines")
    guests.wait_state("one", "Running")
    assert engine.get(f"/v1/experiments/{first}")["namespace"] == guests.namespace
    second = guests.experiment("two", max_steps=1, engineRef=reference)
    queued = guests.wait_state("two", "Queued")
    assert "maxPerNamespace 1" in condition(queued, "Attached")["message"]
    host.experiment("theirs", max_steps=1)
    host.wait_state("theirs", "Succeeded")  # another namespace is not held up
    operator.kill()
    operator.start()
    guests.delete("one")
    guests.wait_gone("one")
    assert first not in engine.uids()
    guests.wait_state("two", "Succeeded")
    assert [len(engine.events("attach", uid)) for uid in (first, second)] == [1, 1]
    secrets = guests.core.list_namespaced_secret(guests.namespace).items
    assert secrets == [], "the token stays with the engine"


def test_who_is_let_in_no_longer_commits_and_leaves(stage: Stage, guests: Cluster) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    host = stage.cluster
    host.patch("main", {"spec": {"allowedNamespaces": {"from": "All"}}}, "loraengines")
    reference = {"name": "main", "namespace": host.namespace}
    uid = guests.experiment("one", max_steps=12, arguments=SLOW, engineRef=reference)
    guests.wait("one", lambda o: status(o).get("progress", {}).get("step", 0) >= 1, "a step")
    host.patch("main", {"spec": {"allowedNamespaces": {"from": "Same"}}}, "loraengines")
    refused = guests.wait_reason("one", "Accepted", "NamespaceNotAllowed")
    assert condition(refused, "Attached")["status"] == "False"
    (left,) = engine.events("leave", uid)
    host.patch("main", {"spec": {"allowedNamespaces": {"from": "All"}}}, "loraengines")
    guests.wait_state("one", "Succeeded")
    assert engine.events("attach", uid)[1]["step"] == left["step"] > 0


def test_an_operator_that_may_not_read_namespaces_says_so(
    stage: Stage, guests: Cluster, kube: client.ApiClient
) -> None:
    name = f"clora-operator-{stage.cluster.namespace}"
    client.RbacAuthorizationV1Api(kube).replace_cluster_role(name, {"metadata": {"name": name}, "rules": []})
    stage.start_engine()
    stage.start_operator()
    selector = {"from": "Selector", "selector": {"matchLabels": {"team": "guests"}}}
    stage.cluster.patch("main", {"spec": {"allowedNamespaces": selector}}, "loraengines")
    reference = {"name": "main", "namespace": stage.cluster.namespace}
    guests.experiment("one", engineRef=reference)
    refused = guests.wait_reason("one", "Accepted", "NamespaceUnreadable")
    assert "get on namespaces" in condition(refused, "Accepted")["message"]
    stage.cluster.patch("main", {"spec": {"allowedNamespaces": {"from": "All", "selector": None}}}, "loraengines")
    guests.wait_state("one", "Succeeded")
