"""The leader's door for the other nodes of its trainer: waits, as long as it takes, until all of their ranks are there.

It stands in the engine's process, which can say whom it waits for while nothing else runs, and keeps the token away
from the trainer's process. Each rank of another node has one connection, made by that node (follow.py); all of them are
handed to rank 0 when the last has come, and the door is closed: who comes later is refused by the system, and comes
again. A stranger costs a task for some seconds, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import Callable

import msgspec

from clora_engine import trainer_handshake as handshake
from clora_engine.trainer_handshake import Challenge, Claim, HandshakeError, Repeated, Verdict
from clora_engine.trainer_launch import OtherNodes

log = logging.getLogger("clora.trainer")

MOST_STRANGERS = 64  # connections that have proved nothing yet
SAID_AGAIN_SECONDS = 30.0
WRONG_TOKEN = "it has another token than the engine"  # noqa: S105 - a sentence


class TrainerNodes:
    """The ranks of the nodes 1 to `nodes` - 1, as they come.

    listener, meeting_place: sockets that are bound; the second is for the ranks' own meeting. gpus: of each node, 0 on
    CPUs. threads: of torch in each process. token: the engine's, as it is now.
    """

    def __init__(
        self,
        listener: socket.socket,
        meeting_place: socket.socket,
        *,
        nodes: int,
        gpus: int,
        threads: int,
        version: str,
        token: Callable[[], bytes],
    ) -> None:
        self._listener, self._meeting_place = listener, meeting_place
        self._nodes, self._gpus, self._threads = nodes, gpus, threads
        self._version, self._token = version, token
        self._there: dict[int, socket.socket] = {}
        self._complete = False  # and handed over
        self.addresses: tuple[str, ...] = ()  # of the other nodes, once all are there
        self._coming: set[int] = set()  # ranks that are being told that they are taken
        self._changed = asyncio.Event()
        self._strangers: list[asyncio.Task[None]] = []
        self._refused = Repeated(SAID_AGAIN_SECONDS)
        self._loop = asyncio.get_running_loop()
        for one in (listener, meeting_place):
            one.listen(128)
            one.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="trainer-nodes")
        log.info("%s", self.waits_for)

    @property
    def _per_node(self) -> int:
        return max(1, self._gpus)

    @property
    def _missing(self) -> list[int]:
        if self._complete:
            return []
        ranks = range(self._per_node, self._nodes * self._per_node)
        return sorted({rank // self._per_node for rank in ranks if rank not in self._there})

    @property
    def waits_for(self) -> str:
        """A phrase, or nothing once all are there."""
        if not (missing := self._missing):
            return ""
        names = ", ".join(f"node {node}" for node in missing)
        refused = f"; last refused: {self._refused.last}" if self._refused.last else ""
        return f"waits for {len(missing)} of {self._nodes} trainer nodes: {names}{refused}"

    async def all_there(self) -> OtherNodes:
        """The connections, once there is one of every rank; they and the meeting place are the caller's then."""
        while self._missing:
            self._changed.clear()
            await self._changed.wait()
        self._complete = True
        for one in self._there.values():
            self._loop.remove_reader(one)
        await self._shut()
        connections, self._there = dict(sorted(self._there.items())), {}
        for one in (*connections.values(), self._meeting_place):
            one.setblocking(True)
        log.info("all %d trainer nodes are there", self._nodes)
        self.addresses = tuple(sorted({one.getpeername()[0] for one in connections.values()}))
        address = next(iter(connections.values())).getsockname()[0]
        return OtherNodes(connections, self._meeting_place, address)

    async def close(self) -> None:
        """Sends everybody away who was not handed over."""
        await self._shut()
        for rank in list(self._there):
            self._leaves(rank)
        self._meeting_place.close()

    async def _shut(self) -> None:
        tasks = [self._accepting, *self._strangers]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._listener.close()

    # ------------------------------------------------------------------------------------- who comes

    async def _accept(self) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(self._listener)
            except OSError as error:  # no file is left, say
                log.warning("a trainer node's connection cannot be taken: %s", error)
                await asyncio.sleep(1)
                continue
            self._strangers = [task for task in self._strangers if not task.done()]
            if len(self._strangers) >= MOST_STRANGERS:
                self._strangers.pop(0).cancel()  # the one that has said nothing for longest
            self._strangers.append(asyncio.create_task(self._meet(connection, address[0])))
            await asyncio.sleep(0)  # while others wait, accepting does not: they would be taken before anybody is heard

    async def _meet(self, connection: socket.socket, address: str) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            try:
                handshake.prepare(connection)
                async with asyncio.timeout(handshake.SECONDS):
                    rank = await self._judge(connection)
            except (OSError, TimeoutError, HandshakeError) as error:
                log.debug("a connection from %s is no trainer node's: %s", address, error)
                return
            if rank is not None:
                stack.pop_all()
                log.info("rank %d of the trainer is there, on node %d", rank, rank // self._per_node)

    async def _judge(self, connection: socket.socket) -> int | None:
        """The rank that it is, None if it was refused."""
        token = self._token()
        challenge = msgspec.msgpack.encode(Challenge(handshake.nonce()))
        await handshake.send(connection, challenge)
        asked = await handshake.receive(connection)
        proved = await handshake.exactly(connection, handshake.PROOF_BYTES)
        if not hmac.compare_digest(proved, handshake.proof(token, handshake.NODE, challenge, asked)):
            handshake.decoded(asked, Claim)  # what is none has no answer
            self._say_refused(WRONG_TOKEN, "a connection")
            answer = msgspec.msgpack.encode(Verdict(WRONG_TOKEN))
            await handshake.send(connection, answer, handshake.NO_PROOF)
            return None
        claim = handshake.decoded(asked, Claim)
        verdict = self._verdict(claim)
        answer = msgspec.msgpack.encode(verdict)
        proved = handshake.proof(token, handshake.LEADER, challenge, asked, answer)
        if verdict.refusal:
            self._say_refused(verdict.refusal, f"node {claim.node}")
            await handshake.send(connection, answer, proved)
            return None
        self._coming.add(claim.rank)
        try:
            await handshake.send(connection, answer, proved)
        finally:
            self._coming.discard(claim.rank)
        self._there[claim.rank] = connection
        # It says nothing before rank 0 does: what comes is the end, or not a follower's.
        self._loop.add_reader(connection, self._leaves, claim.rank)
        self._refused.forget()
        self._changed.set()
        return claim.rank

    def _verdict(self, claim: Claim) -> Verdict:
        mine = Claim(self._version, claim.node, self._nodes, self._gpus, claim.rank, b"")
        for name, what in (
            ("protocol", "protocol"),
            ("clora", "clora"),
            ("nodes", "--trainer-nodes"),
            ("gpus", "GPUs"),
        ):
            theirs, ours = getattr(claim, name), getattr(mine, name)
            if theirs != ours:
                return Verdict(
                    f"node {claim.node} has {what} {theirs}, and the leader {ours}: give both the same image and flags"
                )
        if not 1 <= claim.node < self._nodes or claim.rank // self._per_node != claim.node:
            return Verdict(f"rank {claim.rank} of node {claim.node} is none of an engine of {self._nodes} nodes")
        if claim.rank in self._there or claim.rank in self._coming:
            return Verdict(f"rank {claim.rank} is there already: is there another node {claim.node}?", later=True)
        return Verdict(threads=self._threads)

    def _say_refused(self, why: str, who: str) -> None:
        if self._refused.due(f"{who}: {why}"):
            log.warning("refused %s", self._refused.last)

    def _leaves(self, rank: int) -> None:
        connection = self._there.pop(rank)
        self._loop.remove_reader(connection)
        connection.close()
        self._changed.set()
        log.warning("rank %d of the trainer has left; %s", rank, self.waits_for)
