"""Engines that clora runs itself: the workload that the API server is given, and its updates."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from kubernetes import client

from tests.integration.operator_fixtures import Stage, condition, stage, status, wait_for

pytestmark = pytest.mark.integration
__all__ = ["stage"]


def spec(**fields: Any) -> dict[str, Any]:
    return {
        "model": {"name": "org/model", "revision": "abc", "claimName": "models", "path": "org/model"},
        "image": "clora-engine:test",
        "sampler": {"gpus": 4, "dataParallelSize": 4, "kvCacheMemory": "8Gi"},
        "dataVolumes": [{"name": "sets", "claimName": "sets"}],
        "podTemplate": {
            "metadata": {"annotations": {"example.com/a": "b"}},
            "spec": {
                "nodeSelector": {"gpu": "h200"},
                "containers": [{"name": "engine", "env": [{"name": "EXTRA", "value": "1"}]}],
            },
        },
        **fields,
    }


def test_the_workload(stage: Stage, kube: client.ApiClient) -> None:
    operator = stage.start_operator()
    cluster = stage.cluster
    cluster.create("loraengines", "big", spec())
    apps = client.AppsV1Api(kube)
    cluster.wait_reason("big", "Accepted", "SpecValid", plural="loraengines")
    wait_for(lambda: bool(apps.list_namespaced_stateful_set(cluster.namespace).items), "the StatefulSet")
    found = apps.read_namespaced_stateful_set("big", cluster.namespace)
    engine = cluster.get("big", "loraengines")
    assert [(o.kind, o.uid) for o in found.metadata.owner_references] == [("LoRAEngine", engine["metadata"]["uid"])]
    assert found.spec.update_strategy.type == "OnDelete"
    pod = found.spec.template.spec
    (container,) = pod.containers
    assert container.args[0] == "serve"
    for argument in (
        "--model=/models/org/model",
        "--model-name=org/model",
        "--revision=abc",
        "--data-volume=sets=/data/sets",
        "--token-file=/run/clora/token/token",
        "--kv-cache-memory=8Gi",
    ):
        assert argument in container.args
    assert {e.name for e in container.env} == {"HOME", "EXTRA"}
    assert pod.node_selector == {"gpu": "h200"}
    assert container.resources.limits == {"nvidia.com/gpu": "8"}
    assert pod.termination_grace_period_seconds == 120
    secret = cluster.core.read_namespaced_secret("big-token", cluster.namespace)
    token = base64.b64decode(secret.data["token"]).decode()
    assert len(token) >= 32
    assert token not in str(found)
    claim = cluster.core.read_namespaced_persistent_volume_claim("big-storage", cluster.namespace)
    assert claim.metadata.owner_references is None
    assert claim.spec.resources.requests == {"storage": "100Gi"}
    service = cluster.core.read_namespaced_service("big", cluster.namespace)
    assert service.spec.selector == {"clora.dev/engine": "big"}
    assert status(cluster.get("big", "loraengines"))["endpoint"] == f"http://big.{cluster.namespace}.svc:8080"
    assert "Traceback" not in operator.log.read_text()


def test_an_update_waits_for_its_pod(stage: Stage, kube: client.ApiClient) -> None:
    """UpdatePending until the pod is deleted; the same token, and the StatefulSet is left alone without a change."""
    stage.start_operator(SERVICE_ADDRESSING="ClusterIP")
    cluster = stage.cluster
    cluster.create("loraengines", "big", spec())
    cluster.wait_reason("big", "WorkloadCurrent", "UpToDate", plural="loraengines")
    apps = client.AppsV1Api(kube)
    before = apps.read_namespaced_stateful_set("big", cluster.namespace)
    token = cluster.core.read_namespaced_secret("big-token", cluster.namespace).data
    address = cluster.core.read_namespaced_service("big", cluster.namespace).spec.cluster_ip
    cluster.wait(
        "big", lambda o: status(o)["endpoint"] == f"http://{address}:8080", "its address", plural="loraengines"
    )
    pod = cluster.core.read_namespaced_pod("big-0", cluster.namespace)
    cluster.patch("big", {"spec": {"image": "clora-engine:next"}}, "loraengines")
    pending = cluster.wait_reason("big", "WorkloadCurrent", "UpdatePending", plural="loraengines")
    assert "delete pod big-0" in condition(pending, "WorkloadCurrent")["message"]
    assert cluster.core.read_namespaced_pod("big-0", cluster.namespace).metadata.uid == pod.metadata.uid
    cluster.core.delete_namespaced_pod("big-0", cluster.namespace, grace_period_seconds=0)
    cluster.wait_reason("big", "WorkloadCurrent", "UpToDate", plural="loraengines")
    after = apps.read_namespaced_stateful_set("big", cluster.namespace)
    assert after.metadata.generation == before.metadata.generation + 1
    assert cluster.core.read_namespaced_secret("big-token", cluster.namespace).data == token


def test_a_pod_that_waits_for_quota_is_queued_and_no_error(stage: Stage, kube: client.ApiClient) -> None:
    """Gated as Kueue gates a pod that its queue has no quota for."""
    stage.start_operator(QUEUE_WRITE_SECONDS="1")
    cluster = stage.cluster
    gated = spec(podTemplate={"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}})
    labels = {"kueue.x-k8s.io/queue-name": "research"}
    cluster.create("loraengines", "main", gated, labels=labels)
    cluster.experiment("one")
    cluster.wait_reason("main", "Ready", "Queued", plural="loraengines")
    message = "LoRAEngine main is not ready: pod main-0 waits in Kueue's queue research: it starts when the queue"
    cluster.wait("one", lambda o: condition(o, "Attached").get("message", "").startswith(message), message)
    workload = client.AppsV1Api(kube).read_namespaced_stateful_set("main", cluster.namespace)
    assert workload.metadata.labels.items() >= labels.items()
    cluster.wait_events("main", "Queued")
    events = cluster.core.list_namespaced_event(cluster.namespace, field_selector="involvedObject.name=main").items
    assert "Queued" in {event.reason for event in events if event.type == "Normal"}
    assert not [event.reason for event in events if event.type == "Warning" and event.reason == "Queued"]
    admitted = {"spec": {"schedulingGates": [{"$patch": "delete", "name": "kueue.x-k8s.io/admission"}]}}
    patched = cluster.core.patch_namespaced_pod("main-0", cluster.namespace, admitted)
    assert not patched.spec.scheduling_gates
    cluster.wait_reason("main", "Ready", "PodUnschedulable", plural="loraengines")  # the cluster has no node


def test_drift_is_put_right(stage: Stage, kube: client.ApiClient) -> None:
    stage.start_operator(RESYNC_SECONDS="1")
    cluster = stage.cluster
    cluster.create("loraengines", "big", spec())
    cluster.wait_reason("big", "WorkloadCurrent", "UpToDate", plural="loraengines")
    apps = client.AppsV1Api(kube)
    apps.patch_namespaced_stateful_set("big", cluster.namespace, {"spec": {"replicas": 2}})
    wait_for(
        lambda: apps.read_namespaced_stateful_set("big", cluster.namespace).spec.replicas == 1, "one replica again"
    )


def test_the_claim_goes_with_the_engine_only_if_asked(stage: Stage) -> None:
    stage.start_operator()
    cluster = stage.cluster
    cluster.create("loraengines", "kept", spec())
    cluster.create("loraengines", "thrown", spec(storage={"whenDeleted": "Delete", "size": "1Gi"}))
    for name in ("kept", "thrown"):
        cluster.wait_reason(name, "WorkloadCurrent", "UpToDate", plural="loraengines")

    def claims() -> set[str]:
        items = cluster.core.list_namespaced_persistent_volume_claim(cluster.namespace).items
        return {c.metadata.name for c in items if c.metadata.deletion_timestamp is None}

    assert claims() == {"kept-storage", "thrown-storage"}
    cluster.delete("kept", "loraengines")
    cluster.delete("thrown", "loraengines")
    wait_for(lambda: claims() == {"kept-storage"}, "the garbage collector")


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("1-starts-with-a-digit", {}, "metadata.name"),
        ("bad-template", {"podTemplate": {"spec": {"containers": [{"name": "engine", "image": ""}]}}}, "image"),
        ("bad-token", {"tokenSecretRef": {"name": "nobodys"}}, "Secret nobodys with key token"),
    ],
)
def test_an_engine_that_cannot_be(stage: Stage, name: str, fields: dict[str, Any], words: str) -> None:
    stage.start_operator()
    stage.cluster.create("loraengines", name, spec(**fields))
    refused = stage.cluster.wait(
        name, lambda o: condition(o, "Accepted").get("status") == "False", "a refusal", plural="loraengines"
    )
    assert words in condition(refused, "Accepted")["message"]
    assert condition(refused, "Ready")["status"] == "False"
