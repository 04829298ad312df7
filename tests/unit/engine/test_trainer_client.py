"""The client's queue while a large call becomes bytes; the process at its other end answers at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import msgspec
import pytest

from clora_engine import trainer_client, trainer_wire
from clora_engine import trainer_protocol as protocol
from clora_engine.errors import EngineError, TrainerDied, UserError
from clora_engine.trainer_client import TrainerClient
from clora_engine.trainer_wire import decoded_logprobs, encoded
from clora_engine.types import AdamParams, Completion, ForwardBackwardResult, LoraConfig, Loss, OptimResult, Row
from tests.numerics.tiny import batch

ADAM = AdamParams(learning_rate=1e-3)
LOSS = Loss(name="PPO", denominator=7.0)
LARGE = trainer_wire.INLINE_TOKENS + 1


def rows(tokens: int, several: int = 1) -> list[Row]:
    one = Completion(ids=[1] * tokens, weights=[1.0] * tokens, logprobs=[-0.5] * tokens, advantages=[0.25] * tokens)
    return [Row(prompt=[2], completions=[one]) for _ in range(several)]


class Process:
    """What a TrainerClient holds of its process, and the writing end of its stream. `came`: what it was asked."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._frame = bytearray()
        self._ended = asyncio.Event()
        self.came: list[str] = []
        self.passes: list[protocol.ForwardBackward] = []

    def write(self, data: bytes) -> None:
        self._frame += data
        size = protocol.LENGTH.size
        if len(self._frame) < size or len(self._frame) - size < protocol.LENGTH.unpack(self._frame[:size])[0]:
            return
        command = msgspec.msgpack.decode(bytes(self._frame[size:]), type=protocol.Command)
        self._frame.clear()
        body = msgspec.msgpack.encode(_reply(self._answer(command)))
        self._reader.feed_data(protocol.header(body) + body)

    def _answer(self, command: protocol.Command) -> object:
        if isinstance(command, protocol.Joined):
            calls = [msgspec.msgpack.decode(call, type=protocol.ForwardBackward) for call in command.calls]
            self.passes += calls
            self.came += [f"{call.adapter} pass" for call in calls]
            return [_reply(_result(len(calls))) for _ in calls]
        assert not isinstance(command, protocol.Start)
        self.came.append(f"{command.adapter} {type(command).__name__}")
        if isinstance(command, protocol.Forward):
            return [[[-1.5] * len(one.ids) for one in row.completions] for row in command.rows]
        stepped = OptimResult(step=1, grad_norm=0.0, skipped=False, seconds=0.0)
        return stepped if isinstance(command, protocol.OptimStep) else None

    async def drain(self) -> None:
        return None

    def close(self) -> None:
        self._ended.set()
        if not self._reader.at_eof():
            self._reader.feed_eof()

    kill = close

    async def wait(self) -> int:
        await self._ended.wait()
        return 3


def _reply(answer: object) -> protocol.Reply:
    return protocol.Reply(result=msgspec.Raw(msgspec.msgpack.encode(answer)))


def _result(adapters: int) -> ForwardBackwardResult:
    return ForwardBackwardResult(
        loss=2.0, metrics={"kl": 0.5}, tokens=3, plain_tokens=3, adapters=adapters, seconds=0.0
    )


class Held:
    """Holds up whatever is encoded for adapter "a" in a thread, and says when it has come there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._free = threading.Event(), threading.Event()
        self.on_loop = 0
        monkeypatch.setattr(trainer_client, "encoded", self._encoded)

    def let_go(self) -> None:
        self._free.set()

    def _encoded(self, command: Any) -> bytes:
        if threading.current_thread() is threading.main_thread():
            self.on_loop += 1
        elif command.adapter == "a":
            self.begun.set()
            assert self._free.wait(30)
        return encoded(command)

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 30)


def connected(slots: int = 1) -> tuple[TrainerClient, Process]:
    reader = asyncio.StreamReader()
    process = Process(reader)
    client = TrainerClient(cast(asyncio.subprocess.Process, process), reader, cast(asyncio.StreamWriter, process))
    client.info = protocol.StartInfo(0, 0, 0, 0, 0.0, slots=slots, join_below=1 << 30)
    client._tokens_per_pass = 1 << 20
    return client, process


async def test_others_go_on_while_a_large_call_becomes_bytes_and_its_adapters_order_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch)
    client, process = connected()
    large = asyncio.create_task(client.forward_backward("a", rows(LARGE), LOSS))
    after = [asyncio.create_task(client.optim_step("a", ADAM)), asyncio.create_task(client.delete("c"))]
    await held.until_begun()
    await client.forward_backward("b", rows(4), LOSS)
    await client.optim_step("b", ADAM)
    await client.forward_backward("b", rows(LARGE), LOSS)  # in the other thread
    await after[1]
    assert process.came == ["c Delete", "b pass", "b OptimStep", "b pass"]
    assert not any(task.done() for task in (large, after[0]))
    held.let_go()
    assert (await large).loss == 2.0
    await after[0]
    assert process.came[4:] == ["a pass", "a OptimStep"]
    assert process.passes[-1] == protocol.ForwardBackward("a", rows(LARGE), LOSS)
    await client.close()


async def test_large_calls_are_encoded_beside_the_event_loop_and_small_ones_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch)
    held.let_go()
    client, process = connected()
    client._tokens_per_pass = LARGE // trainer_client.PASSES_PER_CALL
    result = await client.forward_backward("a", rows(LARGE // 2, several=4), LOSS)
    assert held.on_loop == 0
    assert len(process.passes) > 1
    assert result.loss == 2.0 * len(process.passes)
    assert await client.forward("a", rows(LARGE)) == [[[-1.5] * LARGE]]
    assert held.on_loop == 0
    await client.forward_backward("a", rows(5), LOSS)
    assert await client.forward("a", rows(5)) == [[[-1.5] * 5]]
    assert held.on_loop == 2
    await client.close()


async def test_a_large_call_joins_no_pass_before_it_has_become_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    client, _ = connected(slots=3)
    large = asyncio.create_task(client.forward_backward("a", rows(LARGE), LOSS))
    await held.until_begun()
    small = [client.forward_backward(name, rows(4), LOSS) for name in "bc"]
    assert [result.adapters for result in await asyncio.gather(*small)] == [2, 2]
    held.let_go()
    assert (await large).adapters == 1
    await client.close()


async def test_cancelled_while_it_becomes_bytes_it_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    client, process = connected()
    large = asyncio.create_task(client.forward_backward("a", rows(LARGE), LOSS))
    after = asyncio.create_task(client.optim_step("a", ADAM))
    await held.until_begun()
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    await after
    held.let_go()
    await client.optim_step("a", ADAM)
    assert process.came == ["a OptimStep", "a OptimStep"]
    await client.close()


async def test_deleted_or_dead_meanwhile_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    client, process = connected()
    large = asyncio.create_task(client.forward_backward("a", rows(LARGE), LOSS))
    await held.until_begun()
    await client.delete("a")
    other = asyncio.create_task(client.forward("a", rows(LARGE)))  # behind it, in the same thread
    await asyncio.sleep(0)
    process.close()
    held.let_go()
    with pytest.raises(EngineError, match="deleted meanwhile"):
        await large
    with pytest.raises(TrainerDied, match="status 3"):
        await other
    assert process.came == ["a Delete"]
    await client.died.wait()


async def test_a_batch_that_no_frame_holds_is_refused_and_the_next_call_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 1 << 16)
    client, process = connected()
    with pytest.raises(UserError, match="too many for one call") as refused:
        await client.forward_backward("a", rows(LARGE), LOSS)
    assert refused.value.field == "rows"
    await client.optim_step("a", ADAM)
    assert process.came == ["a OptimStep"]
    await client.close()


@pytest.mark.parametrize(
    "command",
    [
        protocol.ForwardBackward("a", batch(3), LOSS),
        protocol.ForwardBackward("a", [], LOSS),
        protocol.Forward("a", [*batch(4), Row(prompt=[], completions=[])], 1.5),
        protocol.Create("a", LoraConfig(rank=8, alpha=16)),
        protocol.OptimStep("a", ADAM),
    ],
)
def test_in_parts_a_command_has_the_same_bytes(command: protocol.Command | protocol.ForwardBackward) -> None:
    assert encoded(command) == msgspec.msgpack.encode(command)


def test_logprobs_are_read_in_parts() -> None:
    logprobs = [[[-0.25, -1.0], []], [], [[-3.0]]]
    assert decoded_logprobs(msgspec.msgpack.encode(logprobs)) == logprobs
