"""An engine that clora runs, in a real pod on a real node: volume, token file, probes, addresses, update, port-forward.

What runs in the pod is the simulated engine: pods with the real one are tested elsewhere, this is about the operator.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest
from kubernetes import client

from local import image
from local.node import NodeCluster
from tests.e2e.history import commits, engine_events, violations
from tests.integration.operator_fixtures import ROOT, Cluster, condition, staged, status, wait_for
from tests.integration.test_operator_sleep import Sleeper
from tests.node.engine_pods import stored

pytestmark = [pytest.mark.integration, pytest.mark.node]

SLOW = {"stepSeconds": "0.5"}
GPU = "nvidia.com/gpu"  # what an engine's pods ask for


def engine_spec() -> dict[str, Any]:
    """The host's Python stands in for an image; the rest is what a user would write."""
    host = image.host_pod()
    tests = {"name": "tests", "hostPath": {"path": str(ROOT / "tests"), "type": "Directory"}}
    container = {
        "name": "engine",
        "command": [sys.executable, "-m", "tests.integration.simulated_engine"],
        "workingDir": "/code",
        "env": [*host["env"], {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}],
        "volumeMounts": [*host["volumeMounts"], {"name": "tests", "mountPath": "/code/tests", "readOnly": True}],
    }
    return {
        "model": {"name": "simulated"},
        "image": image.HOST,
        "sampler": {"gpus": 0, "dataParallelSize": 1},
        "trainer": {"gpus": 0},
        "storage": {"size": "1Gi"},
        "resources": {"limits": {"memory": "512Mi"}},
        "podTemplate": {"spec": {"containers": [container], "volumes": [*host["volumes"], tests]}},
    }


def test_a_drained_engine_moves_to_its_new_template(
    node_cluster: NodeCluster, node_kube: client.ApiClient, node_namespace: str, tmp_path: Path
) -> None:
    """The old pod goes first, by itself, and what trained in it goes on in the new one. It has the node's only GPU: as
    another engine that waits for one shows, the two would not fit beside each other."""
    with (
        extended_resource(node_kube, GPU, 1),
        staged(node_cluster, node_kube, node_namespace, tmp_path) as stage,
    ):
        stage.start_operator(SERVICE_ADDRESSING="ClusterIP")
        cluster = stage.cluster
        cluster.create("loraengines", "main", on_gpu(engine_spec()))
        cluster.wait_reason("main", "Ready", "Serving", plural="loraengines")
        cluster.create("loraengines", "beside", on_gpu(engine_spec()))
        full = cluster.wait(
            "beside",
            lambda o: f"Insufficient {GPU}" in condition(o, "Ready").get("message", ""),
            "the scheduler to find no second GPU",
            plural="loraengines",
        )
        assert condition(full, "Ready")["reason"] == "PodUnschedulable"
        cluster.delete("beside", "loraengines")  # it would take the GPU as soon as the old pod is gone
        wait_for(lambda: names_of_pods(cluster) == ["main-0"], "its pod to go")
        cluster.experiment("one", max_steps=30, arguments=SLOW, backoffLimit=0)
        cluster.wait("one", lambda o: status(o).get("progress", {}).get("step", 0) >= 2, "two steps")
        old = cluster.core.read_namespaced_pod("main-0", node_namespace).metadata.uid
        cluster.patch("main", {"spec": {"sampler": {"maxNumSeqs": 8}, "drain": True}}, "loraengines")
        cluster.wait_reason("one", "Attached", "EngineDraining")
        drained = cluster.wait_reason("main", "Drained", "Drained", plural="loraengines")
        assert status(drained)["epoch"] == 1
        cluster.wait(
            "main",
            lambda o: condition(o, "WorkloadCurrent").get("reason") == "UpToDate" and status(o)["epoch"] == 2,
            "the new pod's engine",
            plural="loraengines",
            seconds=180,
        )
        assert cluster.core.read_namespaced_pod("main-0", node_namespace).metadata.uid != old
        waits = cluster.get("one")
        assert condition(waits, "Attached")["reason"] == "EngineDraining"
        assert status(waits)["checkpoint"]["step"] >= 2
        cluster.patch("main", {"spec": {"drain": False}}, "loraengines")
        done = cluster.wait_state("one", "Succeeded", seconds=120)
        assert (status(done)["progress"]["step"], status(done)["restarts"]) == (30, 0)
        assert status(done)["engine"]["epoch"] == 2
        cluster.delete("one")
        cluster.wait_gone("one")
        cluster.delete("main", "loraengines")
        cluster.wait_gone("main", plural="loraengines")
        wait_for(lambda: not names_of_pods(cluster), "the pod to give the GPU back")


@contextmanager
def extended_resource(kube: client.ApiClient, name: str, count: int) -> Iterator[None]:
    """Of the node, until the end of the block. kubelet keeps what it does not know, and lets pods ask for it."""
    core = client.CoreV1Api(kube)
    (node,) = [one.metadata.name for one in core.list_node().items]

    def patch(value: str | None) -> None:
        core.patch_node_status(node, {"status": {"capacity": {name: value}, "allocatable": {name: value}}})

    patch(str(count))
    yield
    patch(None)


def on_gpu(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "sampler": {"gpus": 1, "dataParallelSize": 1}}


def names_of_pods(cluster: Cluster) -> list[str]:
    return [pod.metadata.name for pod in cluster.core.list_namespaced_pod(cluster.namespace).items]


def clora(cluster: NodeCluster, namespace: str, *arguments: str) -> str:
    program = str(Path(sys.executable).with_name("clora"))
    command = [program, *arguments, "--kubeconfig", str(cluster.kubeconfig), "-n", namespace]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_idle_engine_gives_its_pod_back_and_wakes(
    node_cluster: NodeCluster, node_kube: client.ApiClient, node_namespace: str, tmp_path: Path
) -> None:
    """By the shortest time that there is; an experiment wakes it, and so do files that are to be deleted."""
    with staged(node_cluster, node_kube, node_namespace, tmp_path) as stage:
        stage.start_operator(SERVICE_ADDRESSING="ClusterIP")
        cluster, sleeper = stage.cluster, Sleeper(stage.cluster, node_kube)
        cluster.create("loraengines", "main", {**engine_spec(), "scaleDownAfterSeconds": 60})
        cluster.experiment("one", max_steps=10, arguments=SLOW)
        cluster.wait("one", lambda o: status(o).get("progress", {}).get("step", 0) >= 2, "two steps", seconds=180)
        assert condition(cluster.get("main", "loraengines"), "Idle")["status"] == "False"
        cluster.wait_state("one", "Succeeded")
        cluster.wait(
            "main",
            lambda o: condition(o, "Ready").get("reason") == "Asleep",
            "sleep",
            plural="loraengines",
            seconds=180,
        )
        wait_for(lambda: not cluster.core.list_namespaced_pod(node_namespace).items, "the pod to go")
        program = str(Path(sys.executable).with_name("clora"))
        pull = [program, "pull", "one", str(tmp_path / "adapter"), "--kubeconfig", str(node_cluster.kubeconfig)]
        refused = subprocess.run(
            [*pull, "-n", node_namespace], capture_output=True, text=True, timeout=120, check=False
        )
        assert refused.returncode != 0
        assert "LoRAEngine main is asleep" in refused.stderr

        cluster.experiment("two", max_steps=3, deletionPolicy="Delete")
        done = cluster.wait_state("two", "Succeeded", seconds=180)
        assert (status(done)["engine"]["epoch"], status(done)["restarts"]) == (2, 0)
        files = stored(cluster.core, node_namespace, "main-storage") / "experiments"
        kept, thrown = (files / cluster.get(name)["metadata"]["uid"] / "steps" for name in ("one", "two"))
        assert (kept / "00010" / "manifest.json").exists()
        assert (thrown / "00003" / "manifest.json").exists()

        sleeper.fall_asleep()
        cluster.delete("one")
        cluster.wait_gone("one")
        assert sleeper.replicas() == 0
        cluster.delete("two")
        cluster.wait_gone("two", seconds=180)
        # the engine's own status is written at its own pace, after the experiment's release
        cluster.wait("main", lambda o: status(o)["epoch"] == 3, "the epoch of its third life", plural="loraengines")
        for name in ("one", "two"):
            assert "ReleasedWithoutEngine" not in cluster.event_reasons(name)
        assert (kept / "00010" / "manifest.json").exists()
        assert not thrown.exists()
        cluster.delete("main", "loraengines")
        cluster.wait_gone("main", plural="loraengines")


def test_a_force_deleted_pod_whose_process_lives_on(
    node_cluster: NodeCluster, node_kube: client.ApiClient, node_namespace: str, tmp_path: Path
) -> None:
    """As on a node that hangs: for the API server the pod is gone, a new one has its name, its volume and its address,
    and the old engine trains on. The operator speaks to the new one, which takes the experiment over at its latest
    commit; what the old one would still commit is refused."""
    with staged(node_cluster, node_kube, node_namespace, tmp_path) as stage:
        stage.start_operator(SERVICE_ADDRESSING="ClusterIP")
        cluster = stage.cluster
        cluster.create("loraengines", "main", engine_spec())
        uid = cluster.experiment("one", max_steps=10_000, arguments=SLOW, backoffLimit=0)
        cluster.wait("one", lambda o: status(o).get("progress", {}).get("step", 0) >= 2, "two steps", seconds=180)
        storage = stored(cluster.core, node_namespace, "main-storage")
        (shim,) = shims_of("tests.integration.simulated_engine")
        os.kill(shim, SIGSTOP)  # it would end the container for kubelet
        try:
            cluster.core.delete_namespaced_pod("main-0", node_namespace, grace_period_seconds=0)
            cluster.wait("one", lambda o: status(o)["engine"]["epoch"] == 2, "the second epoch", seconds=180)
            wait_for(lambda: (uid, 1, "refused") in happened(storage), "the old engine to be refused")
            assert len(shims_of("tests.integration.simulated_engine")) == 2, "both live"
        finally:
            os.kill(shim, SIGCONT)
        wait_for(lambda: len(shims_of("tests.integration.simulated_engine")) == 1, "the old pod's process to end")
        taken_over = status(cluster.get("one"))["progress"]["step"]
        cluster.wait("one", lambda o: status(o)["progress"]["step"] > taken_over + 2, "more steps")
        cluster.patch("one", {"spec": {"suspend": True}})
        done = cluster.wait_reason("one", "Attached", "Suspended")
        kept = commits("main", storage)
        assert [commit.step for commit in kept] == list(range(status(done)["checkpoint"]["step"] + 1))
        assert {commit.epoch for commit in kept} == {1, 2}
        assert violations([], kept, []) == []
        assert status(done)["restarts"] == 0
        cluster.delete("one")
        cluster.wait_gone("one")
        cluster.delete("main", "loraengines")
        cluster.wait_gone("main", plural="loraengines")


def happened(storage: Path) -> set[tuple[str, int, str]]:
    return {(event.uid, event.epoch, event.event) for event in engine_events("main", storage)}


def shims_of(module: str) -> list[int]:
    """Processes of containerd that hold a container which runs `python -m module`, each by its pid on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended while we looked
            if f"-m\0{module}\0" not in (path / "cmdline").read_text():
                continue
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if "containerd-shim" in Path(f"/proc/{parent}/cmdline").read_text():
                found.append(parent)
    return found


def test_an_engine_in_a_pod(
    node_cluster: NodeCluster, node_kube: client.ApiClient, node_namespace: str, tmp_path: Path
) -> None:
    with staged(node_cluster, node_kube, node_namespace, tmp_path) as stage:
        stage.start_operator(SERVICE_ADDRESSING="ClusterIP")
        cluster = stage.cluster
        cluster.create("loraengines", "main", engine_spec())
        cluster.wait_reason("main", "Ready", "Serving", plural="loraengines")
        cluster.wait_reason("main", "WorkloadCurrent", "UpToDate", plural="loraengines")
        cluster.experiment("one", max_steps=40, arguments=SLOW)
        cluster.wait("one", lambda o: status(o).get("progress", {}).get("step", 0) >= 2, "two steps")

        # an update waits for its pod, and the pod's end costs nothing that is committed
        cluster.patch("main", {"spec": {"sampler": {"maxNumSeqs": 8}}}, "loraengines")
        cluster.wait_reason("main", "WorkloadCurrent", "UpdatePending", plural="loraengines")
        assert condition(cluster.get("one"), "Attached")["status"] == "True"
        cluster.core.delete_namespaced_pod("main-0", node_namespace, grace_period_seconds=1)
        cluster.wait_reason("main", "WorkloadCurrent", "UpToDate", plural="loraengines")
        cluster.wait("one", lambda o: status(o)["engine"]["epoch"] == 2, "the second epoch", seconds=120)
        done = cluster.wait_state("one", "Succeeded", seconds=120)
        assert status(done)["progress"]["step"] == 40
        assert status(done)["restarts"] == 0

        # the command line reaches the engine through a port-forward
        lines = [json.loads(line) for line in clora(node_cluster, node_namespace, "metrics", "one").splitlines()]
        assert lines[-1]["step"] == 40
        clora(node_cluster, node_namespace, "pull", "one", str(tmp_path / "adapter"))
        assert (tmp_path / "adapter" / "adapter_model.safetensors").read_text() == "40"
        assert "Succeeded" in clora(node_cluster, node_namespace, "watch", "one", "--until-done")

        cluster.delete("one")
        cluster.wait_gone("one")
        cluster.delete("main", "loraengines")
        cluster.wait_gone("main", plural="loraengines")
        claim = cluster.core.read_namespaced_persistent_volume_claim("main-storage", node_namespace)
        assert claim.metadata.deletion_timestamp is None
