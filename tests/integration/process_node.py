"""A node whose pods are processes of this machine: for charts on the control plane alone, where no container can run.

Scheduler, Deployment and Job controllers, grace periods and the rights of the pods' accounts are real. Of a pod it runs
the one container of the operator's image: its arguments and environment, with a token of its ServiceAccount instead of
the mounted one, and its readiness probe. Other pods are bound to the node and stay Pending, as where an image is still
being pulled. Leaves out images, volumes, users and networks: tests/node has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import httpx
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from local.cache import REPOSITORY
from local.control_plane import ControlPlane
from local.process import dying_with_parent

NAME = "processes"
IMAGE = "clora-operator:"
ROOM = {"cpu": "64", "memory": "256Gi", "pods": "100", "nvidia.com/gpu": "64"}


def account_kubeconfig(cluster: ControlPlane, api: client.ApiClient, namespace: str, account: str, path: Path) -> Path:
    """The administrator's kubeconfig with a token of the ServiceAccount instead of the certificate."""
    request = {"spec": {"expirationSeconds": 3600}}
    token = client.CoreV1Api(api).create_namespaced_service_account_token(account, namespace, request).status.token
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    content["users"][0]["user"] = {"token": token}
    path.touch(mode=0o600)
    path.write_text(json.dumps(content))
    return path


class ProcessNode:
    """As a context manager: registers the node and tends its pods in a thread; ends every process with the block."""

    def __init__(self, cluster: ControlPlane, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tend, name="process-node", daemon=True)
        self._beat = datetime.min.replace(tzinfo=UTC)
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        self._api = config.new_client_from_config(str(self._cluster.kubeconfig))
        self._core = client.CoreV1Api(self._api)
        self._core.create_node({"metadata": {"name": NAME, "labels": {"kubernetes.io/os": "linux"}}})
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=60)
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._api.close()

    def log(self, pods: str) -> str:
        """What the pods whose names start with `pods` have said, the newest last."""
        found = sorted(self._folder.glob(f"{pods}*.log"), key=lambda path: path.stat().st_mtime)
        return "".join(path.read_text() for path in found)

    # ------------------------------------------------------------------ the kubelet's work

    def _tend(self) -> None:
        while not self._stop.wait(0.1):
            try:
                self._heartbeat()
                for pod in self._core.list_pod_for_all_namespaces(field_selector=f"spec.nodeName={NAME}").items:
                    self._sync(pod)
            except (ApiException, OSError):  # gone meanwhile, or an API server that is being restarted
                continue

    def _heartbeat(self) -> None:
        """The node counts as lost after 50 s without one."""
        now = datetime.now(UTC)
        if (now - self._beat).total_seconds() < 10:
            return
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now.isoformat()}
        status = {"conditions": [ready], "capacity": ROOM, "allocatable": ROOM}
        self._core.patch_node_status(NAME, {"status": status})
        self._beat = now

    def _sync(self, pod: client.V1Pod) -> None:
        uid, phase = pod.metadata.uid, pod.status.phase
        if pod.metadata.deletion_timestamp is not None:
            self._end(pod)
        elif uid in self._processes:
            code = self._processes[uid].poll()
            if code is not None and phase == "Running":
                terminated = {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}
                self._report(pod, "Failed" if code else "Succeeded", {"terminated": terminated}, ready=False)
            elif phase == "Running" and not _is_ready(pod) and self._probe(pod):
                self._report(pod, "Running", {"running": {}}, ready=True)
        elif phase == "Pending" and pod.spec.containers[0].image.startswith(IMAGE):
            self._start(pod)
            self._report(pod, "Running", {"running": {}}, ready=pod.spec.containers[0].readiness_probe is None)

    def _start(self, pod: client.V1Pod) -> None:
        container, name = pod.spec.containers[0], pod.metadata.name
        account = pod.spec.service_account_name
        kubeconfig = self._folder / f"{name}.kubeconfig"
        account_kubeconfig(self._cluster, self._api, pod.metadata.namespace, account, kubeconfig)
        environment = {entry.name: entry.value for entry in container.env or ()}
        command = [sys.executable, "-m", "clora_operator", *(container.args or ())]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[pod.metadata.uid] = subprocess.Popen(
                dying_with_parent(command),
                cwd=REPOSITORY,
                env={**os.environ, **environment, "KUBECONFIG": str(kubeconfig)},
                stdout=log,
                stderr=log,
            )

    def _end(self, pod: client.V1Pod) -> None:
        process = self._processes.pop(pod.metadata.uid, None)
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout=pod.spec.termination_grace_period_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace, grace_period_seconds=0)

    def _probe(self, pod: client.V1Pod) -> bool:
        """Processes share this machine's ports: a test gives the operator one of its own, by the chart's `env`."""
        container = pod.spec.containers[0]
        environment = {entry.name: entry.value for entry in container.env or ()}
        port = environment.get("CLORA_OPERATOR_LIVENESS_PORT", "8080")
        try:
            path = container.readiness_probe.http_get.path
            return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def _report(self, pod: client.V1Pod, phase: str, state: dict[str, Any], *, ready: bool) -> None:
        container = pod.spec.containers[0]
        status = {
            "phase": phase,
            "conditions": _conditions("Ready", "ContainersReady", value=ready),
            "containerStatuses": [
                {
                    "name": container.name,
                    "image": container.image,
                    "imageID": "",
                    "restartCount": 0,
                    "ready": ready,
                    "state": state,
                }
            ],
        }
        self._core.patch_namespaced_pod_status(pod.metadata.name, pod.metadata.namespace, {"status": status})


def _conditions(*kinds: str, value: bool) -> Sequence[dict[str, str]]:
    now = datetime.now(UTC).isoformat()
    return [{"type": kind, "status": str(value), "lastTransitionTime": now} for kind in kinds]


def _is_ready(pod: client.V1Pod) -> bool:
    return any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())
