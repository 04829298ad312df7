"""All of clora in real pods: the chart's operator, an engine with the real vLLM, and an experiment that trains on it.

The pods are those of a release but for their image: they mount this machine's Python (local/image.py). All else is what
the chart and the operator make: accounts, volumes, probes, users, read-only root file systems.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from local import image
from local.cache import REPOSITORY
from local.model import NAME, model
from local.node import NodeCluster
from local.tools import tools
from tests.cluster_fixtures import wait_until
from tests.node.engine_pods import engine_manifest, experiment, model_claim, model_volume, stored

pytestmark = [pytest.mark.node, pytest.mark.timeout(1200)]

BIN = Path(sys.prefix) / "bin"
SYSTEM, TENANT = "clora-system", "tenant"
GROUP = ("clora.dev", "v1alpha1", TENANT)


def _run(cluster: NodeCluster, program: str, *arguments: str) -> str:
    command = [str(tools() / program), f"--kubeconfig={cluster.kubeconfig}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def release(node_cluster: NodeCluster, node_kube: client.ApiClient) -> NodeCluster:
    """`helm install --wait`: it returns once the operator's pod has passed its probes."""
    host, repository_and_tag = image.host_pod(), image.HOST.split(":")
    values = {
        "image": {"repository": repository_and_tag[0], "tag": repository_and_tag[1], "pullPolicy": "Never"},
        "command": [str(BIN / "clora-operator")],
        "env": host["env"],
        "extraVolumes": host["volumes"],
        "extraVolumeMounts": host["volumeMounts"],
        "settings": {"serviceAddressing": "ClusterIP"},  # the local node has no DNS
    }
    flags = [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]
    chart = str(REPOSITORY / "charts" / "clora")
    install = ["install", "clora", chart, f"--namespace={SYSTEM}", "--create-namespace", "--wait", "--timeout=180s"]
    # the kinds are there already (node_cluster): the release takes them over
    _run(node_cluster, "helm", *install, "--take-ownership", *flags)
    client.CoreV1Api(node_kube).create_namespace({"metadata": {"name": TENANT}})
    return node_cluster


@pytest.fixture(scope="module")
def engine(release: NodeCluster, node_kube: client.ApiClient) -> Iterator[str]:
    """A LoRAEngine with the small real model; its volume comes from the node's storage class."""
    core, custom = client.CoreV1Api(node_kube), client.CustomObjectsApi(node_kube)
    core.create_persistent_volume(model_volume(model()))
    core.create_namespaced_persistent_volume_claim(TENANT, model_claim())
    custom.create_namespaced_custom_object(*GROUP, "loraengines", engine_manifest(f"HuggingFaceTB/{NAME}"))
    yield "local"
    print(_run(release, "kubectl", "logs", "--namespace", TENANT, "local-0", "--tail=60"))


def _conditions(custom: client.CustomObjectsApi, plural: str, name: str) -> dict[str, str]:
    status = custom.get_namespaced_custom_object(*GROUP, plural, name).get("status", {})
    return {condition["type"]: condition["status"] for condition in status.get("conditions", [])}


def test_operator_runs_as_the_chart_says(release: NodeCluster, node_kube: client.ApiClient) -> None:
    (pod,) = client.CoreV1Api(node_kube).list_namespaced_pod(SYSTEM).items
    (status,) = pod.status.container_statuses
    assert (status.ready, status.restart_count) == (True, 0)
    kubectl = ("exec", "--namespace", SYSTEM, pod.metadata.name, "--", "/bin/sh", "-c")
    assert (
        _run(release, "kubectl", *kubectl, "id -u; touch /nope 2>/dev/null || echo read-only") == "65532\nread-only\n"
    )


def test_metrics_are_served_beside_the_operator(release: NodeCluster) -> None:
    path = f"/api/v1/namespaces/{SYSTEM}/services/clora-metrics:metrics/proxy/metrics"
    assert "process_resident_memory_bytes" in _run(release, "kubectl", "get", "--raw", path)


def test_an_experiment_trains_in_pods_and_outlives_its_engines_pod(
    release: NodeCluster, engine: str, node_kube: client.ApiClient
) -> None:
    core, custom = client.CoreV1Api(node_kube), client.CustomObjectsApi(node_kube)

    def is_true(plural: str, name: str, condition: str) -> bool:
        return _conditions(custom, plural, name).get(condition) == "True"

    wait_until(lambda: is_true("loraengines", engine, "Ready"), "the engine to be ready", seconds=600)
    created = custom.create_namespaced_custom_object(*GROUP, "loraexperiments", experiment("sums", 6))
    folder = stored(core, TENANT, "local-storage") / "experiments" / created["metadata"]["uid"]
    wait_until(lambda: _step(custom, "sums") >= 1, "a committed step", seconds=300)
    epoch = custom.get_namespaced_custom_object(*GROUP, "loraengines", engine)["status"]["epoch"]
    committed = _committed_metrics(folder)
    core.delete_namespaced_pod("local-0", TENANT, grace_period_seconds=1)
    wait_until(lambda: is_true("loraexperiments", "sums", "Succeeded"), "it to succeed after all", seconds=600)
    assert _step(custom, "sums") == 6
    assert custom.get_namespaced_custom_object(*GROUP, "loraexperiments", "sums")["status"]["restarts"] == 0
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert metrics.startswith(committed), "what was committed is there, byte for byte"
    assert [json.loads(line)["step"] for line in metrics.splitlines()] == list(range(7))
    assert custom.get_namespaced_custom_object(*GROUP, "loraengines", engine)["status"]["epoch"] > epoch


def test_a_drained_node_loses_no_step(release: NodeCluster, engine: str, node_kube: client.ApiClient) -> None:
    """`kubectl drain` takes the engine's and the operator's pods: the step is brought to its commit, and nobody is
    there meanwhile. With the node back, it goes on where it was."""
    core, custom = client.CoreV1Api(node_kube), client.CustomObjectsApi(node_kube)
    created = custom.create_namespaced_custom_object(*GROUP, "loraexperiments", experiment("drained", 5))
    wait_until(lambda: _step(custom, "drained") >= 1, "a committed step", seconds=300)
    (node,) = core.list_node().items
    flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=300s")
    _run(release, "kubectl", "drain", node.metadata.name, *flags)
    assert not [pod for pod in core.list_namespaced_pod(TENANT).items if pod.status.phase == "Running"]
    _run(release, "kubectl", "uncordon", node.metadata.name)
    wait_until(
        lambda: _conditions(custom, "loraexperiments", "drained").get("Succeeded") == "True",
        "it to succeed",
        seconds=600,
    )
    found = custom.get_namespaced_custom_object(*GROUP, "loraexperiments", "drained")["status"]
    assert (found["progress"]["step"], found["restarts"]) == (5, 0)
    path = f"/storage/experiments/{created['metadata']['uid']}/metrics.jsonl"
    lines = _run(release, "kubectl", "exec", "--namespace", TENANT, "local-0", "--", "cat", path).splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6))


def _committed_metrics(experiment_folder: Path) -> bytes:
    """As many bytes of its metrics as the latest commit covers, with at least the line of step 1."""
    latest = max(experiment_folder.glob("steps/*/manifest.json"))
    manifest = json.loads(latest.read_text())
    assert manifest["step"] >= 1
    return (experiment_folder / "metrics.jsonl").read_bytes()[: manifest["metrics_bytes"]]


def _step(custom: client.CustomObjectsApi, name: str) -> int:
    status = custom.get_namespaced_custom_object(*GROUP, "loraexperiments", name).get("status", {})
    return int(status.get("progress", {}).get("step", 0))
