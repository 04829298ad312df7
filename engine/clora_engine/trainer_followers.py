"""Rank 0 and the ranks that follow it: the commands that they are sent, and how all of them end.

Rank 0 is the process that the engine started. It starts the others of its node, as torchrun would; those of other nodes
are started there (follow.py), and their connections are handed to rank 0. It passes every command on to each over its
socket: a follower serves that socket as rank 0 serves the engine's. A follower waits for its next command as long as it
takes, which no collective would. All ranks end with the first that does: rank 0 when a follower's socket closes, a
follower when rank 0's does. One whose device fails says so before it ends.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn, Protocol

from clora_engine import trainer_protocol as protocol
from clora_engine.trainer_place import Place
from clora_engine.trainer_protocol import EXIT_DEVICE_FAILED, EXIT_RANK_LOST

log = logging.getLogger("clora.trainer")

END_SECONDS = 2.0  # for the first rank that ends to be told from those that end with it
DEVICE_FAILED = b"\2"  # a follower's last word


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Followers:
    """The other ranks, as rank 0 sees them.

    place: rank 0's, with a meeting. remote: connections to the ranks of other nodes, by rank.
    """

    def __init__(self, place: Place, remote: Mapping[int, socket.socket] | None = None) -> None:
        self._place = place
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: dict[int, socket.socket] = {}
        self._ending = False
        for rank in range(1, place.node_processes):
            ours, theirs = socket.socketpair()
            with theirs:
                self._processes.append(self._start(rank, theirs))
            self._sockets[rank] = ours
        self._sockets |= remote or {}
        when_closed(list(self._sockets.values()), self.lost)

    def _start(self, rank: int, connection: socket.socket) -> subprocess.Popen[bytes]:
        fd = str(connection.fileno())
        place = replace(self._place, rank=rank)
        return subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "clora_engine.trainer_process", "--fd", fd, *place.arguments()],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=(connection.fileno(),),
        )

    def send(self, body: bytes | bytearray) -> None:
        """Passes a command on to every follower."""
        try:
            for connection in self._sockets.values():
                connection.sendall(protocol.header(body))
                connection.sendall(body)
        except OSError:
            self.lost()

    def confirm(self, failed: bool) -> None:
        """Waits until every follower has carried the command out as rank 0 did. One that did not is no copy of rank 0
        any more: the process ends, as if that rank had died."""
        for rank, connection in self._sockets.items():
            try:
                answer = connection.recv(1, socket.MSG_PEEK)
            except OSError:
                answer = b""
            if answer in (b"", DEVICE_FAILED):
                self.lost()
            if answer != confirmation(failed):
                self._give_up(f"{self._name(rank)} did not fare as rank 0 did with a command", EXIT_RANK_LOST)
            connection.recv(1)

    def end(self) -> None:
        """Ends the followers of this node, and waits until they are gone; those of others end by themselves."""
        self._ending = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._place.forget()

    def lost(self) -> NoReturn:
        """A rank has ended, or does not come to where it is waited for: the process ends too, as that rank did."""
        said = self._last_words()
        for rank, word in said.items():
            if word == DEVICE_FAILED:
                self._give_up(f"the device of {self._name(rank)} failed", EXIT_DEVICE_FAILED)
        ended = [self._name(rank) for rank, word in said.items() if not word]
        self._give_up(f"{ended[0] if ended else 'a rank of the trainer'} ended", EXIT_RANK_LOST)

    def _name(self, rank: int) -> str:
        place = replace(self._place, rank=rank)
        return f"rank {rank}" + (f" on node {place.node}" if place.node else "")

    def _last_words(self) -> dict[int, bytes]:
        """What those have said that ended, nothing or DEVICE_FAILED. A rank whose collective fails may hear of the end
        of another before that one's socket is closed: for some moments one is waited for."""
        deadline = time.monotonic() + END_SECONDS
        while True:
            words = {rank: _last_word(connection) for rank, connection in self._sockets.items()}
            found = {rank: word for rank, word in words.items() if word is not None}
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.01)

    def _give_up(self, why: str, code: int) -> NoReturn:
        while self._ending:  # another thread is at it
            time.sleep(1)
        log.critical("%s: the trainer ends", why)
        self.end()
        os._exit(code)


def confirmation(failed: bool) -> bytes:
    """What a follower answers to each command."""
    return b"\1" if failed else b"\0"


def _last_word(connection: socket.socket) -> bytes | None:
    """None from a follower that goes on."""
    try:
        word = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""
    return word if word in (b"", DEVICE_FAILED) else None


def when_closed(connections: list[HasFileno], act: Callable[[], None]) -> None:
    """Calls `act`, in a thread of its own, as soon as the other side of one of these is closed."""

    def watch() -> None:
        poll = select.poll()
        for connection in connections:
            poll.register(connection, select.POLLRDHUP)
        poll.poll()
        act()

    threading.Thread(target=watch, name="when-closed", daemon=True).start()
