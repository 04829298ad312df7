"""A local control plane with one real node, which runs pods. Needs root.

    python -m local.node up [--dir DIR]       prints `export KUBECONFIG=...`; does nothing where it is up
    python -m local.node status [--dir DIR]   exit code 0 where it is up and the API server is ready
    python -m local.node down [--dir DIR]     ends it, pods and all, at once; what was stored stays for the next `up`

containerd, runc, CNI plugins, kubelet and kube-proxy run in network, mount and process namespaces of their own, held
by one process: when that ends, even by kill -9, the kernel ends and takes down all of it. What is left then, folders
of control groups, the next `up` or `down` removes. This machine reaches pods and services by their addresses; they
reach this machine at 10.231.0.1 and nothing beyond. There is no cluster DNS and no image is pulled (see image.py).

One machine has one such node at a time: its addresses, links and control groups are the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Self

from local import components, node_config, pki, process
from local.api import Client
from local.build import built
from local.cache import REPOSITORY, LocalClusterError, cache_dir, exclusive, say
from local.process import Process

PACKAGES = ("containerd", "runc", "containernetworking-plugins", "iptables", "iproute2")
PROGRAMS = ("containerd", "ctr", "runc", "iptables", "ip", "unshare")
CGROUPS = Path("/sys/fs/cgroup")
UP_SECONDS = 240.0
CLIENTS = (pki.ADMIN, pki.CONTROLLER_MANAGER, pki.SCHEDULER, pki.PROXY, pki.node_client(node_config.NODE))
ROUTES = (components.POD_CIDR, components.SERVICE_CIDR)
# Known to every clone on this machine, and forgotten when it boots.
MACHINE_STATE = Path("/run/clora-node.json")
MACHINE_LOCK = Path("/run/clora-node.lock")


@dataclass(frozen=True)
class Owner:
    """Whose node this machine has: the folder it was started with, and the process that holds its namespaces."""

    folder: Path
    holder: Process


def machine_owner() -> Owner | None:
    """None where no node is up on this machine."""
    try:
        state = json.loads(MACHINE_STATE.read_bytes())
    except FileNotFoundError:
        return None
    owner = Owner(Path(state["folder"]), Process(state["pid"], state["start_ticks"]))
    return owner if owner.holder.alive() else None


class NodeCluster:
    """The node that keeps its state in `folder`. As a context manager it goes up and down with the block, and is
    killed with this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._dies_with_parent = False

    @property
    def kubeconfig(self) -> Path:
        """Of the administrator; mode 0600. Works on this machine, outside the node's namespaces too."""
        return self.folder / "admin.kubeconfig"

    def running(self) -> bool:
        owner = machine_owner()
        return owner is not None and owner.folder == self.folder

    def ready(self) -> bool:
        client = Client(node_config.NODE_IP, node_config.PORT, self.folder / "pki") if self.running() else None
        return client is not None and (self.folder / "ready").exists() and client.succeeds("/readyz")

    def up(self) -> None:
        """Returns once the node is Ready. Raises LocalClusterError where root or a program is missing, where another
        folder's node is up on this machine, or where a part does not start; then nothing is left."""
        if os.geteuid() != 0:
            raise LocalClusterError(
                "a node that runs pods needs root (namespaces, mounts, packet filters); "
                "the control plane alone does not: python -m local.control_plane"
            )
        with _machine():
            owner = machine_owner()
            if owner and owner.folder != self.folder:
                raise LocalClusterError(
                    f"this machine's node is up already, with its state in {owner.folder} (pid {owner.holder.pid}); "
                    f"end it first: python -m local.node down --dir {shlex.quote(str(owner.folder))}"
                )
            if owner and self.ready():
                return
            _install_packages()
            _remove_what_is_left()
            try:
                self._start(built() / "kubebox")
            except BaseException:
                _remove_what_is_left()
                raise

    def down(self, *, delete: bool = False) -> None:
        """Ends the node at once: pods get no grace. With `delete`, what was stored goes too, volumes included."""
        with _machine():
            owner = machine_owner()
            if owner is None or owner.folder == self.folder:
                _remove_what_is_left()
            if delete:
                for name in ("etcd", "pki", "log", "cni", "containerd", "kubelet", "volumes"):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                for pattern in ("*.kubeconfig", "kubelet.json", "containerd.toml", "resolv.conf", "ready", "*.sock:0"):
                    for path in self.folder.glob(pattern):
                        path.unlink()

    def __enter__(self) -> Self:
        self._dies_with_parent = True
        self.up()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.down()

    def _start(self, kubebox: Path) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / "log").mkdir(exist_ok=True)
        (self.folder / "ready").unlink(missing_ok=True)
        pki.create(self.folder / "pki", CLIENTS, [node_config.NODE_IP, components.FIRST_SERVICE_IP])
        for client in CLIENTS:
            server, target = f"https://{node_config.NODE_IP}:{node_config.PORT}", f"{client.name}.kubeconfig"
            pki.write_kubeconfig(self.folder / "pki", client.name, server, self.folder / target)
        node_config.write(self.folder)
        _make_cgroups()
        unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        init = [sys.executable, "-m", "local.node_init", "--dir", str(self.folder), "--kubebox", str(kubebox)]
        log = self.folder / "log" / "node.log"
        log.unlink(missing_ok=True)
        holder = process.start([*unshare, *init], cwd=REPOSITORY, log=log, dies_with_parent=self._dies_with_parent)
        state = {"folder": str(self.folder), "pid": holder.pid, "start_ticks": holder.start_ticks}
        pki.write_private(MACHINE_STATE, json.dumps(state).encode())
        _connect(holder)
        deadline = time.monotonic() + UP_SECONDS
        while not (self.folder / "ready").exists():
            if not holder.alive() or time.monotonic() > deadline:
                words = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise LocalClusterError(f"the node did not start; the logs are in {log.parent}:\n{words}")
            time.sleep(0.05)


@contextmanager
def _machine() -> Iterator[None]:
    with exclusive(MACHINE_LOCK, "this machine's node"):
        yield


def _install_packages() -> None:
    def missing() -> list[str]:
        programs = [name for name in PROGRAMS if shutil.which(name) is None]
        return programs + [str(path) for path in (node_config.CNI_PROGRAMS / "bridge",) if not path.exists()]

    if not missing():
        return
    if shutil.which("apt-get") is None:
        raise LocalClusterError(f"missing: {', '.join(missing())}; install Debian's {' '.join(PACKAGES)} or their like")
    say(f"installing {' '.join(PACKAGES)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode != 0:
            raise LocalClusterError(f"{' '.join(command[:2])} failed:\n{done.stderr.strip()}")
    if missing():
        raise LocalClusterError(f"still missing after apt-get install: {', '.join(missing())}")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise LocalClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _connect(holder: Process) -> None:
    """A link between this machine and the holder's network namespace, and the routes over it."""
    ours, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{holder.pid}/ns/net")
    while holder.alive() and theirs.readlink() == ours.readlink():  # until unshare has left ours
        time.sleep(0.01)
    link, peer = node_config.HOST_LINK, node_config.NODE_LINK
    _run(["ip", "link", "add", link, "type", "veth", "peer", "name", peer, "netns", str(holder.pid)])
    _run(["ip", "address", "add", f"{node_config.HOST_IP}/{node_config.PREFIX}", "dev", link])
    _run(["ip", "link", "set", link, "up"])
    for route in ROUTES:
        _run(["ip", "route", "add", route, "via", node_config.NODE_IP])


def _cgroup_folders() -> list[Path]:
    """One a controller with cgroup v1, one in all with v2."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS / node_config.CGROUP]
    return [path.parent / node_config.CGROUP for path in CGROUPS.glob("*/cgroup.procs")]


def _make_cgroups() -> None:
    if (CGROUPS / "cgroup.controllers").exists():
        (CGROUPS / "cgroup.subtree_control").write_text("+cpu +cpuset +memory +pids")
    for folder in _cgroup_folders():
        folder.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # v1: empty in a new folder, and nothing runs with it empty
            if (folder.parent / "cpuset.cpus").exists():
                (folder / name).write_text((folder.parent / name).read_text())


def _remove_what_is_left() -> None:
    """Ends the holder, where it lives, and removes what the kernel does not remove with it."""
    owner = machine_owner()
    if owner:
        owner.holder.signal(SIGKILL)  # unshare takes no other; pid 1 of its namespaces dies with it
        owner.holder.wait(30.0)
    if Path(f"/sys/class/net/{node_config.HOST_LINK}").exists():
        with suppress(LocalClusterError):  # gone in the meantime, with the other end
            _run(["ip", "link", "delete", node_config.HOST_LINK])
    deadline = time.monotonic() + 30.0
    for folder in _cgroup_folders():
        while folder.exists():
            for inner in sorted(folder.rglob("*"), reverse=True):
                if inner.is_dir():
                    with suppress(OSError):
                        inner.rmdir()
            with suppress(OSError):
                folder.rmdir()
            if time.monotonic() > deadline:
                raise LocalClusterError(f"processes of an earlier node still run in {folder}: see its cgroup.procs")
            time.sleep(0.05)
    MACHINE_STATE.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m local.node", description="A local cluster that runs pods.")
    parser.add_argument("command", choices=["up", "status", "down"])
    parser.add_argument(
        "--dir", type=Path, default=cache_dir() / "node", help="where it keeps everything (%(default)s)"
    )
    parser.add_argument("--delete", action="store_true", help="down: forget all that was stored, too")
    options = parser.parse_args(arguments)
    cluster = NodeCluster(options.dir)
    try:
        if options.command == "up":
            started = time.monotonic()
            cluster.up()
            say(f"the node is ready ({time.monotonic() - started:.1f} s)")
            print(f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}")
        elif options.command == "down":
            cluster.down(delete=options.delete)
        else:
            ready = cluster.ready()
            print("ready" if ready else "not ready")
            return 0 if ready else 1
    except LocalClusterError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
