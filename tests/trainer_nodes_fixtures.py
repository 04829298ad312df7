"""A trainer of two nodes on one machine: the leader is this process, the other node is `clora-engine follow`.

With a network namespace of its own (root) the other node has another loopback, and reaches the leader over a pair of
virtual interfaces alone; in a mount namespace of its own it does not see the leader's folders.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from local.control_plane import free_port
from local.process import dying_with_parent

TOKEN = "token-of-the-tests"
IS_ROOT = os.geteuid() == 0


OTHER_END = "other"  # the interface in the other node's namespace


@dataclass(frozen=True)
class Network:
    """How the other node reaches the leader, and its own address. namespace: its file; empty: that of the machine.
    hidden: folders that it must not see."""

    leader: str = "127.0.0.1"
    other: str = "127.0.0.1"
    namespace: str = ""
    hidden: Sequence[Path] = ()

    def command(self, words: Sequence[str]) -> list[str]:
        if not self.namespace:
            return list(words)
        over = "".join(f"mount -t tmpfs none {shlex.quote(str(folder))} && " for folder in self.hidden)
        return [*self._inside, "unshare", "--mount", "sh", "-c", f"{over}exec {shlex.join(words)}"]

    def switch(self, on: bool) -> None:
        """Connects the other node, or cuts it off: nothing is told to anybody."""
        self.ip("link", "set", OTHER_END, "up" if on else "down")

    def ip(self, *words: str) -> None:
        subprocess.run([*self._inside, "ip", *words], check=True)

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", f"--net={self.namespace}"]


@contextmanager
def own_network(hidden: Sequence[Path]) -> Iterator[Network]:
    """A namespace with one interface, whose other end is the leader's. It has no name, so that it goes, and both ends
    with it, when the process that holds it ends: with this one at the latest."""
    number = os.getpid() % 32768
    subnet = ipaddress.ip_address("198.18.0.0") + 4 * number  # of the range for tests of networks (RFC 2544), four each
    ours, waits = f"cl{number}", "echo there; exec sleep infinity"
    words = dying_with_parent(["unshare", "--net", "sh", "-c", waits])
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"there\n"
            made = Network(str(subnet + 1), str(subnet + 2), f"/proc/{holder.pid}/ns/net", hidden)
            for line in (
                f"ip link add {ours} type veth peer name {OTHER_END} netns {holder.pid}",
                f"ip address add {subnet + 1}/30 dev {ours}",
                f"ip link set {ours} up",
            ):
                subprocess.run(shlex.split(line), check=True)
            made.ip("address", "add", f"{subnet + 2}/30", "dev", OTHER_END)
            made.ip("link", "set", OTHER_END, "up")
            made.ip("link", "set", "lo", "up")
            yield made
        finally:
            holder.kill()
            subprocess.run(["ip", "link", "delete", ours], check=False, capture_output=True)


def trainer_port() -> int:
    """A free port whose next one is free too."""
    return free_port(2)


@dataclass
class OtherNode:
    """`clora-engine follow` as node 1 of 2."""

    folder: Path
    model: Path
    port: int
    network: Network = field(default_factory=Network)
    token: str = TOKEN
    flags: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / "node.log").read_text(errors="replace")

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "token").write_text(self.token)
        words = [
            *(sys.executable, "-m", "clora_engine", "follow", f"--leader={self.network.leader}"),
            *(f"--trainer-port={self.port}", "--node=1", "--trainer-nodes=2", "--model-name=tiny"),
            *(f"--model={self.model}", f"--token-file={self.folder / 'token'}", *self.flags),
        ]
        with (self.folder / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.network.command(words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        assert self.process is not None
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(30)

    @property
    def pid(self) -> int:
        """Of follow itself: `nsenter`, `unshare` and the shell become it."""
        assert self.process is not None
        return self.process.pid

    def terminate(self) -> int:
        """As kubelet does: it ends once the leader's trainer has."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(10)

    def interrupt(self) -> int:
        """At once, as by Ctrl-C."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(10)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def says(self, words: str, seconds: float = 60.0) -> None:
        """Waits until its log holds the words."""
        deadline = time.monotonic() + seconds
        while words not in self.log:
            assert time.monotonic() < deadline, f"{words!r} is not in its log:\n{self.log}"
            time.sleep(0.05)  # a log tells nobody that it grows
