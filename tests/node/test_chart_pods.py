"""The chart's own pods on a real node, without an engine: the operator, `helm test`, and the uninstall hook.

As in a release but for their image (local/image.py): accounts and their mounted tokens, users, read-only root file
systems, the Job and its log.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from clora_api import FINALIZER
from local import image
from local.cache import REPOSITORY
from local.node import NodeCluster
from local.tools import tools
from tests.cluster_fixtures import wait_until
from tests.integration.operator_fixtures import Cluster

pytestmark = pytest.mark.node

SYSTEM = "clora-system"
HASH = "pod-template-hash"  # by which a ReplicaSet would take the pod for its own, and end it


def _helm(cluster: NodeCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(tools() / "helm"), f"--kubeconfig={cluster.kubeconfig}", *arguments, f"--namespace={SYSTEM}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def _values(**more: Any) -> list[str]:
    host, (repository, tag) = image.host_pod(), image.HOST.split(":")
    values = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "command": [str(Path(sys.executable).with_name("clora-operator"))],
        "env": host["env"],
        "extraVolumes": host["volumes"],
        "extraVolumeMounts": host["volumeMounts"],
        **more,
    }
    return [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]


def test_installed_tested_and_uninstalled_by_pods(
    node_cluster: NodeCluster, node_kube: client.ApiClient, node_namespace: str
) -> None:
    tenant = Cluster(node_kube, node_namespace)
    chart = str(REPOSITORY / "charts" / "clora")
    # the kinds are there already (node_cluster): the release takes them over
    install = ("install", "clora", chart, "--create-namespace", "--take-ownership", "--wait", "--timeout=180s")
    done = _helm(node_cluster, *install, *_values())
    assert done.returncode == 0, done.stderr
    tested = _helm(node_cluster, "test", "clora", "--logs")
    assert tested.returncode == 0, tested.stderr
    assert "ready" in tested.stdout

    tenant.experiment("stays")
    wait_until(lambda: tenant.get("stays")["metadata"].get("finalizers") == [FINALIZER], "the operator's finalizer")
    # a pod of the operator's that never runs stands for one that does not end
    (operator,) = tenant.core.list_namespaced_pod(SYSTEM, label_selector="app.kubernetes.io/name=clora").items
    lost = {
        "metadata": {"name": "lost", "labels": {k: v for k, v in operator.metadata.labels.items() if k != HASH}},
        "spec": {"nodeSelector": {"no": "such"}, "containers": [{"name": "operator", "image": image.HOST}]},
    }
    upgrade = ("upgrade", "clora", chart, "--wait", "--timeout=180s")
    assert _helm(node_cluster, *upgrade, *_values(uninstall={"timeoutSeconds": 20})).returncode == 0
    tenant.core.create_namespaced_pod(SYSTEM, lost)
    refused = _helm(node_cluster, "uninstall", "clora", "--timeout=180s")
    assert refused.returncode != 0
    assert "the operator still runs (pods lost)" in refused.stdout + refused.stderr, "helm prints what the hook said"
    assert tenant.get("stays")["metadata"]["finalizers"] == [FINALIZER]

    tenant.core.delete_namespaced_pod("lost", SYSTEM, grace_period_seconds=0)
    done = _helm(node_cluster, "uninstall", "clora", "--wait", "--timeout=180s")
    assert done.returncode == 0, done.stderr
    assert "finalizers" not in tenant.get("stays")["metadata"]
    wait_until(lambda: not tenant.core.list_namespaced_pod(SYSTEM).items, "the release's pods to be gone")
    assert client.BatchV1Api(node_kube).list_namespaced_job(SYSTEM).items == []
    tenant.delete("stays")
    assert not tenant.exists("stays")
