"""The trainer of the simulated node, in two ways.

`ClientTrainer`: the engine's own client (clora_engine.trainer_client), with its queue, its order of calls and its
joining, talks its own protocol to a process that only lets time pass: in forward_backward, for all else takes nothing.

`StepTrainer`: all calls of one experiment's step are one turn, and up to K turns that wait make one pass.

A pass of k steps takes fixed + k × (1 - fixed) of a step's seconds; `fixed` is the part that does not grow with tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

import msgspec

from clora_api.v1alpha1.engine import Scheduling
from clora_engine import trainer_protocol as protocol
from clora_engine.trainer_client import TrainerClient
from clora_engine.types import AdamParams, ForwardBackwardResult, Loss, OptimResult, Row

ADAM = AdamParams(learning_rate=1e-5)
LOSS = Loss(name="PPO", denominator=1.0)
ANY_SIZE = 1 << 30
TOKENS_EACH = 16
"""Tokens for each position that the client is told of: without threads in virtual time, batches must be small."""


def _pass_seconds(seconds: float, fixed: float, steps: int) -> float:
    return seconds * (fixed + (1.0 - fixed) * steps)


class ClientTrainer:
    """A step's calls through the engine's own client, in the order of clora_engine.training. slots: calls that one pass
    can join; every call is taken to be small enough for it."""

    def __init__(self, seconds: float, slots: int, fixed: float, scheduling: Scheduling) -> None:
        reader = asyncio.StreamReader()
        self._process = _Process(seconds, fixed, reader)
        self._client = TrainerClient(
            cast(asyncio.subprocess.Process, self._process),
            reader,
            cast(asyncio.StreamWriter, self._process),
            scheduling,
        )
        self._client.info = protocol.StartInfo(0, 0, 0, 0, 0.0, slots=slots, join_below=ANY_SIZE)
        self._client._tokens_per_pass = ANY_SIZE  # what TrainerClient.start would set

    @property
    def busy_seconds(self) -> float:
        return self._process.busy_seconds

    def register(self, experiment: str, weight: int, remaining_tokens: int) -> None:
        self._client.register(experiment, weight, remaining_tokens // TOKENS_EACH)

    def remove(self, experiment: str) -> None:
        self._client.remove(experiment)

    async def step(self, experiment: str, tokens: int) -> None:
        """forward_backward, optim_step, and the export that is published."""
        rows = [Row(prompt=[0] * (tokens // TOKENS_EACH), completions=[])]
        await self._client.forward_backward(experiment, rows, LOSS)
        await self._client.optim_step(experiment, ADAM)
        await self._client.export(experiment, "")

    async def commit(self, experiment: str) -> None:
        await self._client.save(experiment, "", optimizer=True)

    async def close(self) -> None:
        await self._client.close()


class _Process:
    """What a TrainerClient holds of its process, and the writing end of its stream."""

    def __init__(self, seconds: float, fixed: float, reader: asyncio.StreamReader) -> None:
        self.busy_seconds = 0.0
        self._seconds, self._fixed, self._reader = seconds, fixed, reader
        self._ended = asyncio.Event()
        self._frame = bytearray()

    def write(self, data: bytes) -> None:
        self._frame += data
        size = protocol.LENGTH.size
        if len(self._frame) < size or len(self._frame) - size < protocol.LENGTH.unpack(self._frame[:size])[0]:
            return
        command = msgspec.msgpack.decode(bytes(self._frame[size:]), type=protocol.Command)
        self._frame.clear()
        seconds = 0.0
        if isinstance(command, protocol.Joined):
            seconds = _pass_seconds(self._seconds, self._fixed, len(command.calls))
        self.busy_seconds += seconds
        body = msgspec.msgpack.encode(_reply(_answer(command)))
        asyncio.get_running_loop().call_later(seconds, self._reader.feed_data, protocol.header(body) + body)

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        self._ended.set()

    kill = close

    async def wait(self) -> int:
        await self._ended.wait()
        return 0


def _reply(answer: object) -> protocol.Reply:
    return protocol.Reply(result=msgspec.Raw(msgspec.msgpack.encode(answer)))


def _answer(command: protocol.Command) -> object:
    match command:
        case protocol.Joined():
            done = ForwardBackwardResult(
                loss=0.0, metrics={}, tokens=0, plain_tokens=0, adapters=len(command.calls), seconds=0.0
            )
            return [_reply(done) for _ in command.calls]
        case protocol.OptimStep():
            return OptimResult(step=0, grad_norm=0.0, skipped=False, seconds=0.0)
    return None


class StepTrainer:
    """See the module."""

    def __init__(self, seconds: float, slots: int, fixed: float) -> None:
        self.busy_seconds = 0.0
        self._seconds, self._slots, self._fixed = seconds, slots, fixed
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._pass: asyncio.Task[None] | None = None

    def register(self, experiment: str, weight: int, remaining_tokens: int) -> None:
        pass  # first come, first served

    def remove(self, experiment: str) -> None:
        pass

    async def step(self, experiment: str, tokens: int) -> None:
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        if self._pass is None or self._pass.done():
            self._pass = asyncio.create_task(self._passes())
        await done

    async def commit(self, experiment: str) -> None:
        pass  # part of the step's turn

    async def close(self) -> None:
        pass

    async def _passes(self) -> None:
        while self._waiting:
            turns = [self._waiting.popleft() for _ in range(min(self._slots, len(self._waiting)))]
            seconds = _pass_seconds(self._seconds, self._fixed, len(turns))
            self.busy_seconds += seconds
            await asyncio.sleep(seconds)
            for done in turns:
                done.set_result(None)
