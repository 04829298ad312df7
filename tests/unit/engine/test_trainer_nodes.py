"""The leader's door for the trainer's other nodes: who is taken, who is not, and that nobody holds anybody up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clora_engine import trainer_handshake as handshake
from clora_engine import trainer_nodes
from clora_engine.follow import FollowConfig, Node
from clora_engine.trainer_handshake import Challenge, Claim, HandshakeError, Verdict
from clora_engine.trainer_nodes import TrainerNodes

TOKEN = b"a-token-of-these-tests"
CLAIM = Claim("1.0", node=1, nodes=2, gpus=2, rank=2, nonce=b"n" * 32)
DEEP = b"\x81\xa1x" + 3000 * b"\x91" + b"\xc0"  # a map with arrays within arrays
WAITS = "waits for 1 of 2 trainer nodes: node 1"


def bound() -> socket.socket:
    one = socket.socket()
    one.bind(("127.0.0.1", 0))
    return one


class Door(TrainerNodes):
    """Of an engine of two nodes with two GPUs each."""

    def __init__(self, **changes: Any) -> None:
        listener = bound()
        self.port = listener.getsockname()[1]
        options: dict[str, Any] = {
            "nodes": 2,
            "gpus": 2,
            "threads": 3,
            "version": "1.0",
            "token": lambda: TOKEN,
        } | changes
        super().__init__(listener, bound(), **options)
        self.clients: list[socket.socket] = []

    async def connect(self) -> socket.socket:
        connection = socket.socket()
        self.clients.append(connection)
        handshake.prepare(connection)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        return connection

    async def join(self, token: bytes = TOKEN, **changes: Any) -> tuple[socket.socket, Verdict]:
        connection = await self.connect()
        try:
            return connection, await handshake.ask(connection, token, msgspec.structs.replace(CLAIM, **changes))
        except BaseException:
            connection.close()
            raise


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    made = Door()
    yield made
    await made.close()
    for one in made.clients:
        one.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "SECONDS", 0.2)


async def until(door: Door, there: list[int]) -> None:
    """Waits until these ranks are there."""
    async with asyncio.timeout(10):
        while sorted(door._there) != there:
            door._changed.clear()
            await door._changed.wait()


async def closed(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(10):
            while await asyncio.get_running_loop().sock_recv(connection, 100):
                pass


async def test_once_all_ranks_are_there_their_connections_are_handed_over(door: Door) -> None:
    assert door.waits_for == WAITS
    waiting = asyncio.create_task(door.all_there())
    third, verdict = await door.join(rank=3)
    assert verdict.threads == 3
    await until(door, [3])
    assert not waiting.done()
    (second, _) = await door.join()
    others = await waiting
    assert door.waits_for == ""
    assert list(others.connections) == [2, 3]
    assert others.address == "127.0.0.1"
    for rank, theirs in ((2, second), (3, third)):
        ours = others.connections[rank]
        assert ours.getblocking()
        ours.sendall(b"command")
        assert await asyncio.get_running_loop().sock_recv(theirs, 100) == b"command"
        theirs.close()
    with pytest.raises(ConnectionRefusedError):
        await door.connect()
    others.close()


async def test_a_wrong_token_is_refused_and_stands_in_no_log(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(HandshakeError, match="without proof: it has another token than the engine") as caught:
        await door.join(b"the-token-of-another-engine")
    assert not caught.value.later
    assert door.waits_for == f"{WAITS}; last refused: a connection: it has another token than the engine"
    await door.join()
    assert "refused a connection: it has another token" in caplog.text
    assert TOKEN.decode() not in caplog.text
    assert "the-token-of-another-engine" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"clora": "0.9"}, "node 1 has clora 0.9, and the leader 1.0: give both the same image and flags"),
        ({"nodes": 3}, "node 1 has --trainer-nodes 3, and the leader 2"),
        ({"gpus": 1}, "node 1 has GPUs 1, and the leader 2"),
        ({"node": 0, "rank": 0}, "rank 0 of node 0 is none of an engine of 2 nodes"),
        ({"node": 2, "rank": 4}, "rank 4 of node 2 is none"),
        ({"rank": 1}, "rank 1 of node 1 is none"),
        ({"rank": -2}, "rank -2 of node 1 is none"),
    ],
)
async def test_who_does_not_fit_is_told_why_on_both_sides(door: Door, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(HandshakeError, match="the leader refuses this node") as caught:
        await door.join(**changes)
    assert why in str(caught.value)
    assert not caught.value.later
    assert why in door.waits_for


async def test_a_rank_is_taken_once_and_again_when_it_has_left(door: Door) -> None:
    first, _ = await door.join()
    with pytest.raises(HandshakeError, match="rank 2 is there already") as caught:
        await door.join()
    assert caught.value.later
    await door.join(rank=3)
    await until(door, [2, 3])
    first.close()
    await until(door, [3])
    assert door.waits_for == WAITS
    await door.join()
    others = await door.all_there()
    assert list(others.connections) == [2, 3]
    others.close()


async def test_a_rank_that_says_something_before_its_time_is_sent_away(door: Door) -> None:
    connection, _ = await door.join(rank=3)
    await asyncio.get_running_loop().sock_sendall(connection, b"?")
    await closed(connection)
    await door.join(rank=3)


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        handshake.LENGTH.pack(handshake.MOST_BYTES + 1),
        handshake.LENGTH.pack(handshake.MOST_BYTES) + b"half",
        handshake.LENGTH.pack(3) + b"???" + handshake.NO_PROOF,
        handshake.LENGTH.pack(1) + msgspec.msgpack.encode(None) + handshake.NO_PROOF,
        handshake.LENGTH.pack(len(DEEP)) + DEEP + handshake.NO_PROOF,
    ],
)
@pytest.mark.usefixtures("short")
async def test_strangers_are_sent_away_and_hold_nobody_up(door: Door, words: bytes) -> None:
    broken: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
    stranger = await door.connect()
    await asyncio.get_running_loop().sock_sendall(stranger, words)
    for rank in (2, 3):
        await door.join(rank=rank)
    await closed(stranger)
    (await door.all_there()).close()
    door._strangers.clear()
    gc.collect()  # tells of a task that has failed
    assert not broken


async def test_of_too_many_strangers_the_first_makes_room(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_nodes, "MOST_STRANGERS", 3)
    strangers = [await door.connect() for _ in range(3)]
    await door.join()
    await closed(strangers[0])
    for one in strangers[1:]:
        one.close()


async def test_strangers_that_come_all_at_once_are_no_more_than_others(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_nodes, "MOST_STRANGERS", 3)
    for _ in range(20):
        stranger = socket.socket()
        door.clients.append(stranger)
        stranger.connect(("127.0.0.1", door.port))  # the door sees none of them before all have come
    async with asyncio.timeout(10):
        for stranger in door.clients[:-3]:
            stranger.setblocking(False)
            await closed(stranger)
    for rank in (2, 3):
        await door.join(rank=rank)
    (await door.all_there()).close()


async def test_what_was_heard_cannot_be_said_again(door: Door) -> None:
    """A claim and its proof, sent to another challenge; and a leader's answer, as another node's claim."""
    loop, first = asyncio.get_running_loop(), await door.connect()
    challenge, asked = await handshake.receive(first), msgspec.msgpack.encode(CLAIM)
    proof = handshake.proof(TOKEN, handshake.NODE, challenge, asked)
    await handshake.send(first, asked, proof)
    assert not handshake.decoded(await handshake.receive(first), Verdict).refusal
    again = await door.connect()
    assert await handshake.receive(again) != challenge
    await loop.sock_sendall(again, handshake.LENGTH.pack(len(asked)) + asked + proof)
    assert handshake.decoded(await handshake.receive(again), Verdict).refusal == trainer_nodes.WRONG_TOKEN
    assert handshake.proof(TOKEN, handshake.LEADER, challenge, asked) != proof
    for one in (first, again):
        one.close()


@pytest.mark.parametrize(
    ("verdict", "token", "why"),
    [
        (Verdict(threads=2), b"guessed", "whoever answers there has not the engine's token"),
        (Verdict(), None, "whoever answers there has not the engine's token"),
        (Verdict("go away"), None, "the leader says, without proof: go away"),
        (Verdict("\nERROR: " + 1000 * "x"), None, f"the leader says, without proof: ?ERROR: {192 * 'x'}"),
    ],
)
async def test_a_node_follows_nobody_without_the_token(verdict: Verdict, token: bytes | None, why: str) -> None:
    async def pose(connection: socket.socket) -> None:
        challenge = msgspec.msgpack.encode(Challenge(b"0" * 32))
        await handshake.send(connection, challenge)
        asked = await handshake.receive(connection)
        answer = msgspec.msgpack.encode(verdict)
        proof = handshake.proof(token, handshake.LEADER, challenge, asked, answer) if token else handshake.NO_PROOF
        await handshake.send(connection, answer, proof)

    theirs, ours = socket.socketpair()
    with theirs, ours:
        for one in (theirs, ours):
            one.setblocking(False)
        posing = asyncio.create_task(pose(theirs))
        with pytest.raises(HandshakeError) as caught:
            await handshake.ask(ours, TOKEN, CLAIM)
        assert str(caught.value).partition(": --leader")[0] == why
        await posing


async def test_a_leader_of_nonsense_is_left() -> None:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        ours.setblocking(False)
        theirs.sendall(handshake.LENGTH.pack(len(DEEP)) + DEEP)
        with pytest.raises(HandshakeError, match="no part of a trainer's handshake"):
            await handshake.ask(ours, TOKEN, CLAIM)


@pytest.mark.usefixtures("short")
async def test_a_leader_that_says_nothing_is_left() -> None:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        ours.setblocking(False)
        with pytest.raises(TimeoutError):
            await handshake.ask(ours, TOKEN, CLAIM)


FOLLOW = FollowConfig(
    leader="127.0.0.1", trainer_port=1, node=1, nodes=2, gpus=2, model="m", token_file=Path("/t"), model_name="tiny"
)


async def test_a_node_connects_all_of_its_ranks_or_none(door: Door) -> None:
    node = Node(replace(FOLLOW, trainer_port=door.port), lambda: TOKEN)
    with pytest.raises(HandshakeError, match=f"has clora {version('clora')}, and the leader 1.0"):
        await node._connect()
    door._version = version("clora")
    taken, _ = await door.join(rank=3, clora=version("clora"))
    with pytest.raises(HandshakeError, match="rank 3 is there already"):
        await node._connect()
    await until(door, [3])  # the rank that was taken has been given up
    taken.close()
    await until(door, [])
    connections, threads = await node._connect()
    assert threads == 3
    others = await door.all_there()
    assert list(others.connections) == [2, 3]
    others.close()
    for one in connections:
        one.close()


async def test_a_node_tries_again_and_says_why(
    door: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that is wrong until its Secret was rotated here too."""
    monkeypatch.setattr("clora_engine.follow.REFUSED_WAIT", 0.01)
    tokens = iter([b"old", b"old"])
    door._version = version("clora")
    node = Node(replace(FOLLOW, trainer_port=door.port), lambda: next(tokens, TOKEN))
    met = asyncio.Event()

    async def serve(connections: list[socket.socket], *_: object) -> None:
        door.clients.extend(connections)
        met.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(node, "_serve", serve)
    living = asyncio.create_task(node.live(Path("m")))
    async with asyncio.timeout(10):
        await met.wait()
    living.cancel()
    said = [record.message for record in caplog.records if "without proof" in record.message]
    assert said == ["the leader says, without proof: it has another token than the engine; tried again"]
