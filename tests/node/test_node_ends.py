"""However a local node ends, nothing of it stays on the machine, and it comes up again with what it had stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL

import pytest
from kubernetes import client, config

from local import image, node_config
from local.cache import REPOSITORY
from local.node import CGROUPS, MACHINE_STATE, NodeCluster, machine_owner
from tests.cluster_fixtures import wait_until

pytestmark = pytest.mark.node


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "node"
    NodeCluster(tmp_path / "node").down()


def _command(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "local.node", name, "--dir", str(folder)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)


def _run_a_pod(folder: Path) -> None:
    with config.new_client_from_config(str(folder / "admin.kubeconfig")) as api:
        core = client.CoreV1Api(api)
        core.create_namespaced_pod(
            "default",
            {"metadata": {"name": "waits"}, "spec": {"containers": [{"name": "main", "image": image.HOST}]}},
        )
        wait_until(lambda: core.read_namespaced_pod("waits", "default").status.phase == "Running", "the pod to run")


def _namespace_of_processes() -> str:
    owner = machine_owner()
    assert owner is not None
    return os.readlink(f"/proc/{owner.holder.pid}/ns/pid_for_children")


def _processes(namespace: str) -> dict[int, str]:
    """Command lines of the processes of one process namespace, by pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            zombie = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if os.readlink(path / "ns" / "pid") == namespace and not zombie:
                found[int(path.name)] = (path / "cmdline").read_text()
        except OSError:  # ended while we looked, or not ours to look at
            continue
    return found


def _traces() -> list[str]:
    """What a node adds to the machine: link, routes, mounts, control groups, record."""
    links = json.loads(subprocess.check_output(["ip", "-json", "link"]))
    routes = json.loads(subprocess.check_output(["ip", "-json", "route"]))
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    groups = [*CGROUPS.glob(node_config.CGROUP), *CGROUPS.glob(f"*/{node_config.CGROUP}")]
    return [
        *(each["ifname"] for each in links if each["ifname"] == node_config.HOST_LINK),
        *(each["dst"] for each in routes if each.get("gateway") == node_config.NODE_IP),
        *(line for line in mounts if any(word in line for word in ("kubelet", "containerd", "/run/netns"))),
        *(str(group) for group in groups),
        *([str(MACHINE_STATE)] if MACHINE_STATE.exists() else []),
    ]


def test_down_leaves_nothing_and_up_finds_what_was_stored(folder: Path) -> None:
    first = _command("up", folder)
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"export KUBECONFIG={folder}/admin.kubeconfig\n"
    _run_a_pod(folder)
    namespace = _namespace_of_processes()
    assert len(_processes(namespace)) > 8, "every part and the pod"
    assert len(_traces()) > 4
    again = _command("up", folder)
    assert (again.stdout, _namespace_of_processes()) == (first.stdout, namespace), "the second `up` does nothing"

    assert _command("down", folder).returncode == 0
    assert _processes(namespace) == {}
    assert _traces() == []

    assert _command("up", folder).returncode == 0
    with config.new_client_from_config(str(folder / "admin.kubeconfig")) as api:
        core = client.CoreV1Api(api)

        def restarted() -> bool:
            status = core.read_namespaced_pod("waits", "default").status
            states = status.container_statuses or []
            return status.phase == "Running" and any(state.restart_count == 1 and state.ready for state in states)

        wait_until(restarted, "the pod of the node's earlier life to run again")


@pytest.mark.parametrize("victim", ["holder", "init"])
def test_kill_9_takes_everything_along(folder: Path, victim: str) -> None:
    assert _command("up", folder).returncode == 0
    _run_a_pod(folder)
    namespace, owner = _namespace_of_processes(), machine_owner()
    assert owner is not None
    holder = owner.holder.pid
    children = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()
    os.kill(holder if victim == "holder" else int(children[0]), SIGKILL)
    wait_until(lambda: not _processes(namespace), "every process of the node to end")
    wait_until(lambda: machine_owner() is None, "the node to count as gone")
    assert _command("status", folder).returncode == 1
    assert _command("down", folder).returncode == 0
    assert _traces() == []


def test_a_dead_part_ends_the_node(folder: Path) -> None:
    assert _command("up", folder).returncode == 0
    namespace = _namespace_of_processes()
    kubelet = next(pid for pid, command in _processes(namespace).items() if "kubelet\0--config" in command)
    os.kill(kubelet, SIGKILL)
    wait_until(lambda: not _processes(namespace), "every process of the node to end")
    assert "kubelet ended with status -9" in (folder / "log" / "node.log").read_text()
