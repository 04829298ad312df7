"""What the trainer process answers, asked in this process over a socket pair."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from clora_engine import trainer_protocol as protocol
from clora_engine.trainer_process import TrainerServer
from clora_engine.types import ForwardBackwardResult, LoraConfig, Loss
from tests.numerics.tiny import batch, tiny_trainer, trained_tokens


@pytest.fixture
def engine_side() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    server = TrainerServer(theirs)
    server._trainer = tiny_trainer(slots=3)
    thread = threading.Thread(target=server.serve)
    thread.start()
    with theirs:
        with ours:
            yield ours
        thread.join()


def ask(connection: socket.socket, command: protocol.Command) -> protocol.Reply:
    body = msgspec.msgpack.encode(command)
    connection.sendall(protocol.header(body) + body)
    head = connection.recv(protocol.LENGTH.size, socket.MSG_WAITALL)
    (length,) = protocol.LENGTH.unpack(head)
    return msgspec.msgpack.decode(connection.recv(length, socket.MSG_WAITALL), type=protocol.Reply)


def call(adapter: str) -> msgspec.Raw:
    rows = batch(1)
    loss = Loss(name="PPO", denominator=trained_tokens(rows))
    return msgspec.Raw(msgspec.msgpack.encode(protocol.ForwardBackward(adapter, rows, loss)))


@pytest.mark.parametrize("bad", [{"adapter": "b", "rows": "none"}, {"adapter": "b", "rows": [], "loss": {}}, 7])
def test_a_call_that_cannot_be_read_fails_alone(engine_side: socket.socket, bad: object) -> None:
    for name in "ac":
        assert ask(engine_side, protocol.Create(name, LoraConfig(rank=8, alpha=8))).failure is None
    unreadable = msgspec.Raw(msgspec.msgpack.encode(bad))
    reply = ask(engine_side, protocol.Joined([call("a"), unreadable, call("c")]))
    assert reply.failure is None
    first, second, third = msgspec.msgpack.decode(reply.result, type=list[protocol.Reply])
    for good in (first, third):
        assert msgspec.msgpack.decode(good.result, type=ForwardBackwardResult).adapters == 2
    assert second.failure is not None
    assert (second.failure.kind, second.failure.field) == ("UserError", "rows")
