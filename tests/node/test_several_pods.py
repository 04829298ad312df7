"""An engine of two pods for real: LWS's controller makes them, kubelet runs them, and the trainer spans both.

As test_release.py, with the operator as a process and a tiny random model, for six lives of pods. The node has no DNS,
by which workers find their leader: pod_dns.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from local.node import NodeCluster
from local.node_config import HOST_IP
from tests.cluster_fixtures import wait_until
from tests.integration.lws_fixtures import lws_controller, lws_kinds
from tests.integration.operator_fixtures import Stage, condition, staged, status
from tests.node.engine_pods import engine_manifest, experiment, model_claim, model_volume, stored
from tests.node.pod_dns import pod_dns, pod_dns_config

pytestmark = [pytest.mark.node, pytest.mark.timeout(1800)]

STEPS = 10_000  # more than are made in this time


@pytest.fixture
def stage(
    node_cluster: NodeCluster, node_kube: client.ApiClient, node_namespace: str, tiny_model: Path, tmp_path: Path
) -> Iterator[Stage]:
    core = client.CoreV1Api(node_kube)
    for path in tiny_model.iterdir():
        path.chmod(0o644)  # the pod's user is another
    core.create_persistent_volume(model_volume(tiny_model, f"model-{node_namespace}"))
    core.create_namespaced_persistent_volume_claim(node_namespace, model_claim(f"model-{node_namespace}"))
    with (
        lws_kinds(node_kube),
        lws_controller(node_cluster.kubeconfig, node_kube, tmp_path / "lws", HOST_IP),
        pod_dns(node_kube, HOST_IP),
        staged(node_cluster, node_kube, node_namespace, tmp_path) as made,
    ):
        yield made
    core.delete_persistent_volume(f"model-{node_namespace}")


def spec_of_two(namespace: str) -> dict[str, Any]:
    spec: dict[str, Any] = engine_manifest("tiny")["spec"]
    spec["trainer"] |= {"nodes": 2}
    spec["podTemplate"]["spec"] |= pod_dns_config(namespace, HOST_IP)
    return spec


def pods_of(stage: Stage) -> dict[str, Any]:
    """By role."""
    selector = "clora.dev/engine=local"
    found = stage.cluster.core.list_namespaced_pod(stage.cluster.namespace, label_selector=selector).items
    return {pod.metadata.labels["clora.dev/role"]: pod for pod in found}


def log_of(stage: Stage) -> str:
    words = []
    for role, pod in pods_of(stage).items():
        log = stage.cluster.core.read_namespaced_pod_log(pod.metadata.name, stage.cluster.namespace, tail_lines=60)
        words.append(f"--- {role}\n{log}")
    return "\n".join(words)


def step(found: dict[str, Any]) -> int:
    return int(status(found).get("progress", {}).get("step", 0))


def test_an_experiment_trains_over_two_pods_and_outlives_either(stage: Stage) -> None:
    cluster = stage.cluster
    stage.start_operator(SERVICE_ADDRESSING="ClusterIP")
    cluster.create("loraengines", "local", spec_of_two(cluster.namespace))
    try:
        cluster.wait(
            "local",
            lambda o: condition(o, "Ready").get("reason") == "Serving",
            "the engine to be ready",
            plural="loraengines",
            seconds=900,
        )
        cluster.wait_reason("local", "WorkloadCurrent", "UpToDate", plural="loraengines")
        cluster.create("loraexperiments", "sums", experiment("sums", STEPS)["spec"])
        cluster.wait("sums", lambda o: step(o) >= 1, "a committed step", seconds=600)

        lost = pods_of(stage)["worker"].metadata
        cluster.core.delete_namespaced_pod(lost.name, cluster.namespace, grace_period_seconds=1)
        cluster.wait("sums", lambda o: status(o)["engine"]["epoch"] == 2, "the second epoch", seconds=600)
        before = step(cluster.get("sums"))
        cluster.wait("sums", lambda o: step(o) > before, "a step with the new worker", seconds=600)
        assert pods_of(stage)["worker"].metadata.uid != lost.uid

        lost = pods_of(stage)["leader"].metadata
        cluster.core.delete_namespaced_pod(lost.name, cluster.namespace, grace_period_seconds=1)
        cluster.wait("sums", lambda o: status(o)["engine"]["epoch"] == 3, "the third epoch", seconds=600)
        before = step(cluster.get("sums"))
        cluster.wait("sums", lambda o: step(o) > before, "a step with the new leader", seconds=600)
        cluster.patch("sums", {"spec": {"suspend": True}})
        done = cluster.wait_reason("sums", "Attached", "Suspended")
        assert status(done)["restarts"] == 0
        storage = stored(cluster.core, cluster.namespace, "local-storage")
        (folder,) = (storage / "experiments").iterdir()
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(status(done)["checkpoint"]["step"] + 1))
        assert condition(cluster.get("local", "loraengines"), "Ready")["status"] == "True"
    finally:
        print(log_of(stage))
    cluster.delete("sums")
    cluster.wait_gone("sums")
    cluster.delete("local", "loraengines")
    wait_until(lambda: not pods_of(stage), "the pods to go")
