"""The local node runs real pods with volumes, services, probes, exec and logs."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from local import image
from local.cache import LocalClusterError
from local.node import NodeCluster
from local.tools import tools
from tests.cluster_fixtures import wait_until

pytestmark = pytest.mark.node

# Serves /data, which it can write only by its fsGroup, and counts its own starts there.
PROGRAM = """
import http.server, os, sys
print("started", flush=True, file=open("/data/starts", "a"))
print("hello from", os.getuid(), flush=True)
os.chdir("/data")
http.server.HTTPServer(("", 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def _stateful_set() -> dict[str, Any]:
    host = image.host_pod()
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    container = {
        "name": "main",
        "image": image.HOST,
        "command": [sys.executable, "-c", PROGRAM],
        "env": host["env"],
        "volumeMounts": [*host["volumeMounts"], {"name": "data", "mountPath": "/data"}],
        "readinessProbe": {"httpGet": {"path": "/starts", "port": 8000}, "periodSeconds": 1},
        "resources": {"limits": {"memory": "256Mi"}},
        "securityContext": {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False},
    }
    pod = {
        "terminationGracePeriodSeconds": 1,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": host["volumes"],
    }
    return {
        "metadata": {"name": "web"},
        "spec": {
            "serviceName": "web",
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": pod},
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
        },
    }


def _get(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/starts", timeout=10) as answer:
        return str(answer.read().decode())


def test_stateful_set_with_a_claim_a_service_logs_and_exec(
    node_cluster: NodeCluster, node_kube: client.ApiClient, node_namespace: str
) -> None:
    core, apps = client.CoreV1Api(node_kube), client.AppsV1Api(node_kube)
    ports = [{"port": 80, "targetPort": 8000}]
    service = core.create_namespaced_service(
        node_namespace, {"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": ports}}
    )
    apps.create_namespaced_stateful_set(node_namespace, _stateful_set())

    def ready() -> bool:
        return bool(apps.read_namespaced_stateful_set("web", node_namespace).status.ready_replicas)

    wait_until(ready, "the pod to be ready")
    assert core.read_namespaced_pod_log("web-0", node_namespace).startswith("hello from 65532\n")
    kubectl = [str(tools() / "kubectl"), f"--kubeconfig={node_cluster.kubeconfig}", f"--namespace={node_namespace}"]
    assert subprocess.check_output([*kubectl, "exec", "web-0", "--", "cat", "/data/starts"], text=True) == "started\n"

    pod = core.read_namespaced_pod("web-0", node_namespace)
    assert _get(f"{pod.status.pod_ip}:8000") == "started\n"
    slices = client.DiscoveryV1Api(node_kube)
    wait_until(
        lambda: any(each.endpoints for each in slices.list_namespaced_endpoint_slice(node_namespace).items),
        "the service to know the pod",
    )
    wait_until(lambda: _answers(service.spec.cluster_ip), "the proxy to know the service")
    assert _get(service.spec.cluster_ip) == "started\n"

    core.delete_namespaced_pod("web-0", node_namespace)
    wait_until(lambda: _uid(core, node_namespace) not in (None, pod.metadata.uid) and ready(), "the pod to be back")
    wait_until(lambda: _answers(service.spec.cluster_ip), "the proxy to know the new pod")
    assert _get(service.spec.cluster_ip) == "started\nstarted\n", "the volume is the same"

    volume = core.read_namespaced_persistent_volume_claim("data-web-0", node_namespace).spec.volume_name
    apps.delete_namespaced_stateful_set("web", node_namespace)
    core.delete_namespaced_persistent_volume_claim("data-web-0", node_namespace)
    wait_until(
        lambda: volume not in [each.metadata.name for each in core.list_persistent_volume().items],
        "the volume of the deleted claim to go",
    )


def _answers(address: str) -> bool:
    try:
        _get(address)
    except OSError:
        return False
    return True


def _uid(core: client.CoreV1Api, namespace: str) -> str | None:
    try:
        return str(core.read_namespaced_pod("web-0", namespace).metadata.uid)
    except client.ApiException:
        return None


def test_a_pod_reaches_the_api_server_with_its_own_account(node_kube: client.ApiClient, node_namespace: str) -> None:
    program = (
        "from kubernetes import client, config\n"
        "config.load_incluster_config()\n"
        "try:\n"
        "    client.CoreV1Api().list_namespaced_secret('kube-system')\n"
        "except client.ApiException as error:\n"
        "    print(error.status, end='')\n"
    )
    host, core = image.host_pod(), client.CoreV1Api(node_kube)
    container = {"name": "main", "image": image.HOST, "command": [sys.executable, "-c", program]}
    container["volumeMounts"] = host["volumeMounts"]
    spec = {"restartPolicy": "Never", "containers": [container], "volumes": host["volumes"]}
    core.create_namespaced_pod(node_namespace, {"metadata": {"name": "asks"}, "spec": spec})
    wait_until(
        lambda: core.read_namespaced_pod("asks", node_namespace).status.phase in ("Succeeded", "Failed"),
        "the pod to end",
        seconds=120.0,
    )
    assert core.read_namespaced_pod_log("asks", node_namespace) == "403", "known, and refused by RBAC"


def test_a_second_node_on_this_machine_is_refused_by_name(node_cluster: NodeCluster, tmp_path: Path) -> None:
    with pytest.raises(LocalClusterError, match=rf"up already, with its state in {node_cluster.folder} .*down --dir"):
        NodeCluster(tmp_path / "other").up()
    NodeCluster(tmp_path / "other").down()
    assert node_cluster.ready(), "another folder's `down` leaves it alone"
