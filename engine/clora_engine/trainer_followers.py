"""Rank 0 and the ranks that follow it: their processes, the commands that they are sent, and how all of them end.

Rank 0 is the process that the engine started. It starts the others, as torchrun would, and passes every command on to
them over a socket pair each: a follower serves that socket as rank 0 serves the engine's. A follower waits for its next
command as long as it takes, which no collective would. All ranks end with the first that does: rank 0 when a
follower's socket closes, a follower when rank 0's does.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from clora_engine import trainer_protocol as protocol
from clora_engine.trainer_protocol import EXIT_DEVICE_FAILED, EXIT_RANK_LOST
from clora_engine.trainer_ranks import forget

log = logging.getLogger("clora.trainer")

END_SECONDS = 2.0  # for a process whose socket is closed to be gone


class Followers:
    """The other ranks' processes, as rank 0 sees them.

    size: ranks, rank 0 included. threads: CPU threads of each.
    """

    def __init__(self, size: int, threads: int) -> None:
        self.rendezvous = Path(tempfile.mkdtemp(prefix="clora-ranks-"), "rendezvous")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._ending = False
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            with theirs:
                self._processes.append(self._start(rank, size, threads, theirs))
            self._sockets.append(ours)
        when_closed(self._sockets, self.lost)

    def _start(self, rank: int, size: int, threads: int, connection: socket.socket) -> subprocess.Popen[bytes]:
        fd = str(connection.fileno())
        return subprocess.Popen(  # noqa: S603 - our own module
            [
                *(sys.executable, "-m", "clora_engine.trainer_process", "--fd", fd, "--threads", str(threads)),
                *("--rank", str(rank), "--processes", str(size), "--rendezvous", str(self.rendezvous)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=(connection.fileno(),),
        )

    def send(self, body: bytes | bytearray) -> None:
        """Passes a command on to every follower."""
        try:
            for connection in self._sockets:
                connection.sendall(protocol.header(body))
                connection.sendall(body)
        except OSError:
            self.lost()

    def confirm(self, failed: bool) -> None:
        """Waits until every follower has carried the command out as rank 0 did. One that did not is no copy of rank 0
        any more: the process ends, as if that rank had died."""
        for rank, connection in enumerate(self._sockets, start=1):
            try:
                answer = connection.recv(1)
            except OSError:
                answer = b""
            if not answer:
                self.lost()
            if answer != confirmation(failed):
                self._give_up(f"rank {rank} did not fare as rank 0 did with a command", EXIT_RANK_LOST)

    def end(self) -> None:
        """Ends the followers, and waits until they are gone."""
        self._ending = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        forget(self.rendezvous)

    def lost(self) -> NoReturn:
        """A rank has ended, or does not come to where it is waited for: the process ends too, as that rank did."""
        if EXIT_DEVICE_FAILED in self._first_ends():
            self._give_up("the device of a rank failed", EXIT_DEVICE_FAILED)
        self._give_up("a rank of the trainer ended", EXIT_RANK_LOST)

    def _first_ends(self) -> set[int]:
        """The exit codes of those that have ended. A rank whose collective fails may hear of the end of another before
        that process is gone: for some moments one is waited for."""
        deadline = time.monotonic() + END_SECONDS
        while not (found := {code for one in self._processes if (code := one.poll()) is not None}):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return found

    def _give_up(self, why: str, code: int) -> NoReturn:
        while self._ending:  # another thread is at it
            time.sleep(1)
        log.critical("%s: the trainer ends", why)
        self.end()
        os._exit(code)


def confirmation(failed: bool) -> bytes:
    """What a follower answers to each command."""
    return b"\1" if failed else b"\0"


def when_closed(connections: list[socket.socket], act: Callable[[], None]) -> None:
    """Calls `act`, in a thread of its own, as soon as the other side of one of these is closed."""

    def watch() -> None:
        poll = select.poll()
        for connection in connections:
            poll.register(connection, select.POLLRDHUP)
        poll.poll()
        act()

    threading.Thread(target=watch, name="when-closed", daemon=True).start()
