"""How the nodes of a trainer know each other: both sides prove that they have the engine's token, and never send it.

    leader -> node   Challenge             a fresh nonce
    node -> leader   Claim, its proof      who it is, a nonce of its own
    leader -> node   Verdict, its proof    taken or refused, and why

A proof is the HMAC-SHA-256, keyed with the token, of the side's name and of all that was said until then, so that none
can be replayed, sent back to its sender, or used in the control API. A frame is its length (2 bytes, big-endian), a
msgpack body of bounded size, and 32 bytes of proof in those that have one. Whoever has a wrong token learns that alone.

Left out: encryption, and proofs of what follows on the connection. Like the gradients' own connections it needs a
network that lets nobody in between; the engine's pods have a network policy that admits each other alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import TypeVar

import msgspec

LENGTH = struct.Struct(">H")
MOST_BYTES = 4096  # of a body
PROOF_BYTES = hashlib.sha256().digest_size
NO_PROOF = bytes(PROOF_BYTES)
SECONDS = 15.0  # for all of it
LEADER, NODE = b"clora trainer leader", b"clora trainer node"

T = TypeVar("T", bound=msgspec.Struct)


class HandshakeError(Exception):
    """The other side is none of this trainer, or does not take this one; `later` when it may soon."""

    def __init__(self, message: str, *, later: bool = False) -> None:
        super().__init__(message)
        self.later = later


@dataclass(slots=True)
class Repeated:
    """A sentence for the log that comes again and again: said when it is another one, and every so many seconds.
    last: the one that was said."""

    seconds: float
    last: str = ""
    _at: float = 0.0

    def due(self, sentence: str) -> bool:
        """Whether it is to be said, which then counts as done."""
        now = time.monotonic()
        if sentence == self.last and now - self._at <= self.seconds:
            return False
        self.last, self._at = sentence, now
        return True

    def forget(self) -> None:
        """The next is said, whatever it is."""
        self.last, self._at = "", 0.0


def nonce() -> bytes:
    return secrets.token_bytes(32)


class Challenge(msgspec.Struct, frozen=True):
    nonce: bytes
    protocol: str = "clora-trainer/1"


class Claim(msgspec.Struct, frozen=True):
    """clora: its version. node: this one's number, of `nodes`, each with so many `gpus`. rank: the connection's."""

    clora: str
    node: int
    nodes: int
    gpus: int
    rank: int
    nonce: bytes
    protocol: str = "clora-trainer/1"


class Verdict(msgspec.Struct, frozen=True):
    """refusal: why it is not taken, empty when it is; later: it may be soon. threads: of torch, on a CPU, in each of
    the trainer's processes."""

    refusal: str = ""
    later: bool = False
    threads: int = 1


def proof(token: bytes, side: bytes, *said: bytes) -> bytes:
    """Of a side (LEADER or NODE) that has the token, over the bodies of all that was said."""
    mac = hmac.new(token, side, hashlib.sha256)
    for body in said:
        mac.update(LENGTH.pack(len(body)) + body)
    return mac.digest()


def prepare(connection: socket.socket) -> None:
    """Makes a connection ready for asyncio, and quick to notice that the other side's machine is gone: a dead node
    closes nothing."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 15),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 6),
        (socket.TCP_USER_TIMEOUT, 60_000),  # milliseconds, of what was sent and is not acknowledged
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def send(connection: socket.socket, body: bytes, proved: bytes = b"") -> None:
    await asyncio.get_running_loop().sock_sendall(connection, LENGTH.pack(len(body)) + body + proved)


async def receive(connection: socket.socket) -> bytes:
    """The next body. Raises HandshakeError when it is none, and OSError."""
    (length,) = LENGTH.unpack(await exactly(connection, LENGTH.size))
    if length > MOST_BYTES:
        raise HandshakeError("what came is no part of a trainer's handshake")
    return await exactly(connection, length)


async def exactly(connection: socket.socket, count: int) -> bytes:
    """Raises HandshakeError at the end of the stream."""
    data = b""
    while len(data) < count:
        more = await asyncio.get_running_loop().sock_recv(connection, count - len(data))
        if not more:
            raise HandshakeError("the other side closed the connection")
        data += more
    return data


def decoded(body: bytes, kind: type[T]) -> T:
    """Raises HandshakeError for what is none."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError):  # the latter for arrays within arrays
        raise HandshakeError("what came is no part of a trainer's handshake") from None


async def ask(connection: socket.socket, token: bytes, claim: Claim) -> Verdict:
    """The node's side. Raises HandshakeError when the leader refuses it, or is none, and TimeoutError and OSError."""
    async with asyncio.timeout(SECONDS):
        challenge = await receive(connection)
        if decoded(challenge, Challenge).protocol != claim.protocol:
            raise HandshakeError("the leader speaks another protocol: give leader and nodes the same image")
        asked = msgspec.msgpack.encode(claim)
        await send(connection, asked, proof(token, NODE, challenge, asked))
        answer = await receive(connection)
        proved = await exactly(connection, PROOF_BYTES)
    verdict = decoded(answer, Verdict)
    if not hmac.compare_digest(proved, proof(token, LEADER, challenge, asked, answer)):
        if proved == NO_PROOF and verdict.refusal:
            said = "".join(letter if letter.isprintable() else "?" for letter in verdict.refusal[:200])
            raise HandshakeError(f"the leader says, without proof: {said}", later=verdict.later)
        raise HandshakeError("whoever answers there has not the engine's token: --leader may name somebody else")
    if verdict.refusal:
        raise HandshakeError(f"the leader refuses this node: {verdict.refusal}", later=verdict.later)
    return verdict
