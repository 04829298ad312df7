"""What users of other operators complain of, as far as no other test shows that it cannot happen here (the whole list,
with the test of each, is in tests/README.md)."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from kubernetes import client

from local.control_plane import ControlPlane
from tests.cluster_fixtures import audit_events
from tests.e2e.history import status_writes
from tests.integration.operator_fixtures import Stage, condition, stage, status, wait_for

pytestmark = pytest.mark.integration
__all__ = ["stage"]

SLOW = {"stepSeconds": "0.2"}
ENDLESS = 100_000


def test_running_means_loaded(stage: Stage, control_plane: ControlPlane) -> None:
    """An engine that takes its time to load: no status says Running or Attached before it has said that it did."""
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=3, arguments={"loadSeconds": "3"})
    attaching = cluster.wait_reason("one", "Attached", "Attaching")
    assert status(attaching)["state"] == "Attaching"
    cluster.wait_state("one", "Succeeded")
    (loaded,) = engine.events("loaded", uid)
    writes = list(status_writes(audit_events(control_plane), cluster.namespace))
    assert [write.at > loaded["at"] for write in writes if write.attached].count(True) >= 1
    assert not [write for write in writes if write.attached and write.at < loaded["at"]]


def test_one_hung_engine_holds_up_nobody_else(stage: Stage) -> None:
    """Stopped, it accepts connections and never answers; there are more of its experiments than the operator has
    workers."""
    hung, well = stage.start_engine("hung", max_experiments=20), stage.start_engine("well")
    stage.start_operator()
    cluster = stage.cluster
    for number in range(12):
        cluster.experiment(f"stuck-{number}", max_steps=ENDLESS, arguments=SLOW, engineRef={"name": "hung"})
    wait_for(lambda: len(hung.uids()) == 12, "all to be attached")
    hung.signal(signal.SIGSTOP)
    try:
        for number in range(12):
            cluster.patch(f"stuck-{number}", {"spec": {"maxSteps": ENDLESS + number}})  # each has to be told
        cluster.experiment("free", max_steps=2, engineRef={"name": "well"})
        cluster.wait_state("free", "Succeeded")
        cluster.wait_state("stuck-0", "Unknown")
    finally:
        hung.signal(signal.SIGCONT)
    cluster.wait_state("stuck-0", "Running")
    assert well.uids()


def test_a_failed_experiment_stays_failed(stage: Stage) -> None:
    """Whatever is restarted, and whatever is said of it afterwards."""
    engine = stage.start_engine()
    operator = stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", arguments={"failAtStep": "1", "retryable": "false"})
    failed = cluster.wait_state("one", "Failed")
    attached = len(engine.events("attach", uid))
    operator.kill()
    engine.kill()
    engine.start()
    operator.start()
    cluster.patch("one", {"metadata": {"labels": {"touched": "yes"}}, "spec": {"maxSteps": 50}})
    cluster.experiment("two")
    cluster.wait_state("two", "Succeeded")
    assert status(cluster.get("one")) == status(failed)
    assert len(engine.events("attach", uid)) == attached
    assert uid not in engine.uids()


def test_state_is_never_empty(stage: Stage) -> None:
    """Not even before there is an operator."""
    cluster = stage.cluster
    cluster.experiment("one")
    assert status(cluster.get("one"))["state"] == "Pending"
    stage.start_engine()
    stage.start_operator()
    cluster.wait_state("one", "Succeeded")


def test_a_quota_is_respected_and_named(stage: Stage, kube: client.ApiClient) -> None:
    """Of experiments: by the API server at once. Of what an engine needs: in its condition, and it heals."""
    cluster = stage.cluster
    core = client.CoreV1Api(kube)
    hard = {"count/loraexperiments.clora.dev": "1", "count/statefulsets.apps": "0"}
    core.create_namespaced_resource_quota(cluster.namespace, {"metadata": {"name": "small"}, "spec": {"hard": hard}})
    wait_for(lambda: quota(core, cluster.namespace).status.used is not None, "the quota to count")
    cluster.experiment("one")
    with pytest.raises(client.ApiException, match="exceeded quota: small"):
        cluster.experiment("two")

    stage.start_operator()
    cluster.create("loraengines", "own", {"model": {"name": "small"}, "image": "clora-engine:test"})
    refused = cluster.wait(
        "own", lambda o: "exceeded quota" in ready(o).get("message", ""), "the quota's message", plural="loraengines"
    )
    assert ready(refused)["status"] == "False"
    core.patch_namespaced_resource_quota(
        "small", cluster.namespace, {"spec": {"hard": {"count/statefulsets.apps": "1"}}}
    )
    apps = client.AppsV1Api(kube)
    wait_for(lambda: bool(apps.list_namespaced_stateful_set(cluster.namespace).items), "the engine's workload")


def quota(core: client.CoreV1Api, namespace: str) -> Any:
    return core.read_namespaced_resource_quota("small", namespace)


def ready(engine: dict[str, Any]) -> dict[str, Any]:
    return condition(engine, "Ready")
