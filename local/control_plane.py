"""A Kubernetes control plane on loopback: etcd, API server, controller manager and scheduler. Needs no root.

    python -m local.control_plane up [--dir DIR]       prints `export KUBECONFIG=...`; does nothing where it is up
    python -m local.control_plane status [--dir DIR]   exit code 0 where every part runs and the API server is ready
    python -m local.control_plane down [--dir DIR]     ends its own processes; what was stored stays for the next `up`

Everything lives in DIR, so several can run side by side. There is no node: objects are stored, checked, owned,
garbage-collected and scheduled for real, but no pod ever runs (node.py adds one). From Python:

    with ControlPlane(folder) as cluster:
        cluster.kubeconfig
        cluster.restart("apiserver")
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

from local import components, pki, process
from local.api import Client
from local.build import built
from local.cache import LocalClusterError, cache_dir, exclusive, say
from local.process import Process

LOOPBACK = "127.0.0.1"
READY_SECONDS = 120.0  # a few in practice; much longer where the processors are busy
PORT_ATTEMPTS = 5

Part = Literal["etcd", "apiserver", "controller-manager", "scheduler"]
COMMANDS: dict[Part, Callable[[components.Site], list[str]]] = {
    "etcd": components.etcd,
    "apiserver": components.apiserver,
    "controller-manager": components.controller_manager,
    "scheduler": components.scheduler,
}


class ControlPlane:
    """One control plane in `folder`.

    port     of the API server; None takes a free one (and the same again at the next `up`, while it is free)
    audit    logs every write, and what pods' accounts read, to `audit_log`: an audit.k8s.io/v1 event a line
    As a context manager it goes up and down with the block, and its processes are killed with this process.
    """

    def __init__(self, folder: Path, *, port: int | None = None, audit: bool = False) -> None:
        self.folder = folder.absolute()
        self._wanted_port, self._audit = port, audit
        self._dies_with_parent = False

    # ------------------------------------------------------------------ what it is

    @property
    def kubeconfig(self) -> Path:
        """Of the administrator; mode 0600."""
        return self.folder / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        return self.folder / "log" / "audit.jsonl"

    @property
    def port(self) -> int:
        """Raises LocalClusterError where it was never up."""
        port = self._state()["port"]
        if port is None:
            raise LocalClusterError(f"there is no control plane in {self.folder}")
        return int(port)

    def processes(self) -> dict[Part, Process]:
        """Those that were started, whether or not they still run."""
        return {part: Process(**entry) for part, entry in self._state()["processes"].items()}

    def running(self) -> bool:
        processes = self.processes()
        return set(processes) == set(COMMANDS) and all(each.alive() for each in processes.values())

    def ready(self) -> bool:
        return self.running() and self._answers("/readyz")

    # ------------------------------------------------------------------ up and down

    def up(self) -> None:
        """Returns once the API server is ready and has made the `default` service account.

        Raises LocalClusterError, with the last lines of the log, where a part does not start; then nothing is left
        running.
        """
        with self._locked():
            if self.running() and self._answers("/readyz"):
                self._check_same_options()
                return
            self._end_all()  # parts of an `up` that was interrupted
            kubebox = built() / "kubebox"
            self._choose_port()
            try:
                self._start_all(kubebox)
            except BaseException:
                self._end_all(grace_seconds=0.0)  # an API server without etcd does not hear SIGTERM
                raise

    def down(self, *, delete: bool = False) -> None:
        """Ends the processes that `up` started and no others; with `delete`, forgets all that was stored."""
        if not self.folder.exists():
            return
        with self._locked():
            self._end_all()
            if delete:
                for name in ("etcd", "pki", "log"):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                for path in (*self.folder.glob("*.kubeconfig"), self._state_file, self.folder / "audit-policy.json"):
                    path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self._dies_with_parent = True
        self.up()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.down()

    # ------------------------------------------------------------------ faults, for tests

    def kill(self, part: Part) -> None:
        """SIGKILL: the part dies as in a crash, the rest goes on."""
        self.processes()[part].end(grace_seconds=0.0)

    def start(self, part: Part) -> None:
        """Starts a part that was killed, with the same address; returns once the API server is ready."""
        self._start(part, self._site(built() / "kubebox", self.port))
        self._wait(lambda: self._answers("/readyz"), "the API server to be ready")

    def restart(self, part: Part) -> None:
        self.kill(part)
        self.start(part)

    # ------------------------------------------------------------------ inside

    def _site(self, kubebox: Path, port: int) -> components.Site:
        return components.Site(self.folder, kubebox, LOOPBACK, LOOPBACK, port, self._audit)

    def _start_all(self, kubebox: Path) -> None:
        clients = [pki.ADMIN, pki.CONTROLLER_MANAGER, pki.SCHEDULER]
        pki.create(self.folder / "pki", clients, [LOOPBACK, components.FIRST_SERVICE_IP])
        (self.folder / "log").mkdir(exist_ok=True)
        (self.folder / "audit-policy.json").write_text(json.dumps(components.AUDIT_POLICY))
        self._start("etcd", self._site(kubebox, self.port))
        for attempt in range(1, PORT_ATTEMPTS + 1):
            site = self._site(kubebox, self.port)
            for client in clients:
                pki.write_kubeconfig(
                    self.folder / "pki", client.name, site.server, self.folder / f"{client.name}.kubeconfig"
                )
            self._start("apiserver", site)
            try:
                self._wait(lambda: self._answers("/readyz"), "the API server to be ready")
                break
            except LocalClusterError as error:
                # A port that was free can be taken by another program before the API server binds it.
                taken = "address already in use" in str(error)
                if not taken or self._wanted_port is not None or attempt == PORT_ATTEMPTS:
                    raise
                self._write_state(port=free_port())
        # Not earlier: the controller manager gives up where the API server does not answer within 10 seconds.
        self._start("controller-manager", site)
        self._start("scheduler", site)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._wait(lambda: self._answers(account), "the default service account")

    def _start(self, part: Part, site: components.Site) -> None:
        log = self._log(part)
        log.unlink(missing_ok=True)
        if part == "etcd":
            for left_over in self.folder.glob("*.sock*"):
                left_over.unlink()
        started = process.start(COMMANDS[part](site), cwd=self.folder, log=log, dies_with_parent=self._dies_with_parent)
        entries = {name: vars(each) for name, each in {**self.processes(), part: started}.items()}
        self._write_state(processes=entries)

    def _end_all(self, grace_seconds: float = 10.0) -> None:
        processes = self.processes()
        for part in ("scheduler", "controller-manager", "apiserver", "etcd"):  # nobody outlives whom it talks to
            if part in processes:
                processes[part].end(grace_seconds)
        self._write_state(processes={})

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not condition():
            for part, started in self.processes().items():
                if not started.alive():
                    raise LocalClusterError(f"{part} ended while waiting for {what}:\n{self._last_lines(part)}")
            if time.monotonic() > deadline:
                raise LocalClusterError(
                    f"waited {READY_SECONDS:.0f} s in vain for {what}; the logs are in {self.folder / 'log'}"
                )
            time.sleep(0.05)

    def _answers(self, path: str) -> bool:
        return Client(LOOPBACK, self.port, self.folder / "pki").succeeds(path)

    def _choose_port(self) -> None:
        port = self._wanted_port or self._state()["port"]
        if port is None or not _is_free(port):
            if self._wanted_port is not None:
                raise LocalClusterError(f"port {port} of {LOOPBACK} is taken: name another, or leave --port out")
            port = free_port()
        self._write_state(port=port, audit=self._audit)

    def _check_same_options(self) -> None:
        """What runs cannot be changed by a second `up`: say so rather than leave the option out."""
        state = self._state()
        if (self._wanted_port or state["port"]) != state["port"] or (self._audit and not state["audit"]):
            raise LocalClusterError(
                f"the control plane in {self.folder} is up with another --port or --audit: end it first"
            )

    def _log(self, part: Part) -> Path:
        return self.folder / "log" / f"{part}.log"

    def _last_lines(self, part: Part) -> str:
        return "\n".join(self._log(part).read_text(errors="replace").splitlines()[-15:])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with exclusive(self.folder / "lock", f"the control plane in {self.folder}"):
            yield

    @property
    def _state_file(self) -> Path:
        return self.folder / "state.json"

    def _state(self) -> dict[str, Any]:
        """port (int or null), audit (bool), processes (part -> pid and start_ticks)."""
        if not self._state_file.exists():
            return {"port": None, "audit": False, "processes": {}}
        state: dict[str, Any] = json.loads(self._state_file.read_bytes())
        return state

    def _write_state(self, **changes: object) -> None:
        pki.write_private(self._state_file, json.dumps({**self._state(), **changes}).encode())


def free_port(in_a_row: int = 1) -> int:
    """A port that nobody listens on, at any address, nor on those that follow it, so many in all; below those that the
    kernel gives to connections which go out: one of these could take it while the server that has it is started again.
    """
    ports = list(range(20000, 30000))
    random.shuffle(ports)
    return next(port for port in ports if all(_is_free(port + more) for more in range(in_a_row)))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the API server does: TIME_WAIT is no owner
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m local.control_plane", description="A local control plane.")
    parser.add_argument("command", choices=["up", "status", "down"])
    parser.add_argument(
        "--dir", type=Path, default=cache_dir() / "control-plane", help="where it keeps everything (%(default)s)"
    )
    parser.add_argument("--port", type=int, help="of the API server on 127.0.0.1 (default: a free one)")
    parser.add_argument(
        "--audit", action="store_true", help="log every write, and reads by service accounts, to DIR/log/audit.jsonl"
    )
    parser.add_argument("--delete", action="store_true", help="down: forget all that was stored, too")
    options = parser.parse_args(arguments)
    cluster = ControlPlane(options.dir, port=options.port, audit=options.audit)
    try:
        if options.command == "up":
            started = time.monotonic()
            cluster.up()
            say(f"the control plane is ready ({time.monotonic() - started:.1f} s)")
            print(f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}")
        elif options.command == "down":
            cluster.down(delete=options.delete)
        else:
            return _print_status(cluster)
    except LocalClusterError as error:
        say(f"error: {error}")
        return 1
    return 0


def _print_status(cluster: ControlPlane) -> int:
    processes = cluster.processes()
    for part in COMMANDS:
        found = processes.get(part)
        print(f"{part:20}", f"running, pid {found.pid}" if found and found.alive() else "not running")
    ready = cluster.ready()
    print(f"{'API server':20}", f"ready at https://{LOOPBACK}:{cluster.port}" if ready else "not ready")
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main())
