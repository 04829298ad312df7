"""The first process inside the node's namespaces: sets the node up, starts every part, and watches over them.

Started by node.py under `unshare`. When it ends, however it ends, the kernel ends everything in its namespaces: pods,
mounts and network with it. It ends by itself where any part dies, so that a broken node is not taken for a whole one.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from local import components, image, node_config, pki, volumes
from local.api import ApiError, Client
from local.cache import REPOSITORY

READY_SECONDS = 180.0
LINK_SECONDS = 30.0
# Whatever a container runtime leaves in these goes away with the node.
SCRATCH = (
    *("/run/netns", "/run/containerd", "/var/lib/cni", "/var/lib/kubelet"),
    *("/var/log/containers", "/var/log/pods"),
)
PROXY_BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "clora-local-proxy"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node-proxier"},
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": pki.PROXY.user}],
}


class Node:
    """All parts of one node, children of this process."""

    def __init__(self, folder: Path, kubebox: Path) -> None:
        self._folder = folder
        self._site = components.Site(folder, kubebox, "0.0.0.0", node_config.NODE_IP, node_config.PORT)  # noqa: S104
        self._parts: dict[int, str] = {}  # by pid
        self._started = datetime.now(UTC).replace(microsecond=0)  # Kubernetes' times have whole seconds
        self._client = Client(node_config.NODE_IP, node_config.PORT, folder / "pki")

    def start(self) -> None:
        """Returns once the node is Ready and pods can be made; raises TimeoutError or CalledProcessError."""
        _mounts()
        _network()
        self._start("containerd", ["containerd", "--config", str(self._folder / "containerd.toml")])
        self._start("etcd", components.etcd(self._site))
        self._start("apiserver", components.apiserver(self._site))
        self._wait("the API server", lambda: self._client.succeeds("/readyz"))
        self._start("controller-manager", components.controller_manager(self._site))
        self._start("scheduler", components.scheduler(self._site))
        self._import_images()
        self._create("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", PROXY_BINDING)
        self._create("/apis/storage.k8s.io/v1/storageclasses", volumes.STORAGE_CLASS)
        self._start("kubelet", components.kubelet(self._site, node_config.NODE))
        self._start("proxy", components.proxy(self._site, node_config.NODE))
        self._start("volumes", [sys.executable, "-m", "local.volumes", "--dir", str(self._folder)])
        self._wait("the node", self._is_ready)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._wait("the default service account", lambda: self._client.succeeds(account))

    def watch(self) -> str:
        """Reaps every process of the node that lost its parent; returns the name of the first part that ends."""
        while True:
            pid, status = os.wait()
            if pid in self._parts:
                return f"{self._parts[pid]} ended with status {os.waitstatus_to_exitcode(status)}"

    def _start(self, part: str, command: Sequence[str]) -> None:
        log = self._folder / "log" / f"{part}.log"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        with log.open("wb") as output:
            child = subprocess.Popen(  # noqa: S603
                command, cwd=self._folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        child.returncode = 0  # reaped by `watch`, not by Popen
        self._parts[child.pid] = part

    def _import_images(self) -> None:
        pause = self._site.kubebox.parent / "pause"
        ctr = ["ctr", "--address", node_config.CONTAINERD_SOCKET, "--namespace", "k8s.io"]
        self._wait("containerd", lambda: _run([*ctr, "version"], check=False).returncode == 0)
        for archive in (image.pause_image(pause), image.host_image(pause)):
            _run([*ctr, "images", "import", "--snapshotter", "native", "-"], given=archive)

    def _create(self, path: str, body: object) -> None:
        try:
            self._client.post(path, body)
        except ApiError as error:
            if error.status != 409:  # there since an earlier `up`
                raise

    def _is_ready(self) -> bool:
        try:
            node = self._client.get(f"/api/v1/nodes/{node_config.NODE}")
        except OSError:
            return False
        for condition in node["status"].get("conditions", []):
            if condition["type"] == "Ready" and condition["status"] == "True":
                # An earlier life of this folder left a Ready node behind: it must be this life's.
                return datetime.fromisoformat(condition["lastHeartbeatTime"]) >= self._started
        return False

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not condition():
            for pid, part in self._parts.items():
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    raise RuntimeError(f"{part} ended while waiting for {what}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {READY_SECONDS:.0f} s in vain for {what}")
            time.sleep(0.1)


def _run(command: Sequence[str], *, given: bytes = b"", check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, input=given, capture_output=True, check=check)  # noqa: S603


def _mounts() -> None:
    """Ours alone, and shared below: the kubelet's mounts reach the containers, and nothing reaches the machine."""
    _run(["mount", "--make-rprivate", "/"])
    for path in SCRATCH:
        Path(path).mkdir(parents=True, exist_ok=True)
        _run(["mount", "-t", "tmpfs", "tmpfs", path])
    _run(["mount", "--make-rshared", "/"])


def _network() -> None:
    """Waits for the link that node.py moves in here, and takes the node's address on it."""
    link, deadline = node_config.NODE_LINK, time.monotonic() + LINK_SECONDS
    while link not in (name for _index, name in socket.if_nameindex()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no link {link} after {LINK_SECONDS:.0f} s")
        time.sleep(0.02)
    _run(["ip", "address", "add", f"{node_config.NODE_IP}/{node_config.PREFIX}", "dev", link])
    _run(["ip", "link", "set", "lo", "up"])
    _run(["ip", "link", "set", link, "up"])
    # Without a default route a service's address is unreachable before the proxy's rules see it.
    _run(["ip", "route", "add", "default", "via", node_config.HOST_IP])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if bridged.exists():  # pods of one bridge reach each other's services through the proxy's rules
        bridged.write_text("1")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m local.node_init")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--kubebox", type=Path, required=True)
    options = parser.parse_args()
    node = Node(options.dir, options.kubebox)
    try:
        node.start()
    except subprocess.CalledProcessError as error:
        print(f"{error}\n{error.stderr.decode(errors='replace')}", flush=True)
        return 1
    except (OSError, RuntimeError) as error:
        print(error, flush=True)
        return 1
    (options.dir / "ready").touch()
    print(node.watch(), flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
