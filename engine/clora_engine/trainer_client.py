"""TrainerClient: the engine's side of the trainer process.

Commands are queued here and sent one at a time, in the order that trainer_queue.py decides, so that a deleted adapter's
queued commands are never run. When the turn comes to a forward_backward that is small enough to gain by it, those of
other adapters that are waiting too join it in one pass. A large call is cut into pieces between which the calls of
others come in, so that no step of any size holds the trainer; it has its place in the queue at once, and is sent when
it has become bytes, in threads (trainer_wire.py). When the process dies, every pending and later call raises
TrainerDied and `died` is set: the owner ends the epoch; nothing is restarted here.

A caller that is cancelled while its command runs does not undo it: a forward_backward still adds its gradient. Such a
caller must load or delete its adapter before it trains on. When a piece of a call fails, or its caller is cancelled,
after others were made, the adapter has the gradient of half a call: the client refuses to train it until it was loaded
or deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from clora_api.v1alpha1.engine import Scheduling
from clora_engine import trainer_protocol as protocol
from clora_engine.busy_clock import BusyClock
from clora_engine.errors import EngineError, TrainerDied
from clora_engine.trainer_calls import Call, Piece, cost_of
from clora_engine.trainer_cut import count_trained, cut, joined_logprobs, joined_results, trained
from clora_engine.trainer_launch import OtherNodes, launch
from clora_engine.trainer_queue import TrainerQueue
from clora_engine.trainer_wire import apart, decoded_logprobs, encoded, tokens_of
from clora_engine.types import AdamParams, AdapterInfo, ForwardBackwardResult, LoraConfig, Loss, OptimResult, Row

log = logging.getLogger("clora.trainer")

T = TypeVar("T")
CLOSE_SECONDS = 10.0
_MEANING = {
    protocol.EXIT_RANK_LOST: " (it lost one of its processes; its log says how)",
    protocol.EXIT_DEVICE_FAILED: " (its device has failed)",
}
PASSES_PER_CALL = 16  # micro-batches after which another adapter's turn comes: seconds, and many to one swap


class TrainerClient:
    """Made by `start`. `died` is set when the process ended without `close`; `death` then says how.

    info: what the process reported of its base model, once it has. busy: the time in which a command ran.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        scheduling: Scheduling = Scheduling.FAIR_SHARE,
    ) -> None:
        self.died = asyncio.Event()
        self.death: TrainerDied | None = None
        self.info = protocol.StartInfo(0, 0, 0, 0, 0.0, slots=1, join_below=0)
        self.busy = BusyClock()
        self._process, self._reader, self._writer = process, reader, writer
        self._queue = TrainerQueue(scheduling)
        self._current: list[Call] = []
        self._half: set[str | None] = set()  # adapters that have the gradient of half a call
        self._last_words = ""  # of the process
        self._tokens_per_pass = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._task = asyncio.create_task(self._run(), name="trainer-client")

    @classmethod
    async def start(
        cls,
        model_path: str,
        *,
        model_name: str,
        dtype: str,
        device: str,
        threads: int,
        max_rank: int,
        tokens_per_microbatch: int,
        host_limit_bytes: int,
        slots: int | None = 1,
        max_adapters: int = 1,
        gradient_checkpointing: bool = False,
        spill_directory: str | None = None,
        processes: int = 1,
        shard_base: bool = False,
        scheduling: Scheduling = Scheduling.FAIR_SHARE,
        others: OtherNodes | None = None,
        sampler_copies: int = 0,
        sampler_kv_bytes: int = 0,
        host_free_bytes: int | None = None,
    ) -> TrainerClient:
        """Starts the process and loads the base model.

        device: "cpu", or "cuda:N", the N-th of the devices visible here. dtype: "float32" or "bfloat16". processes:
        that share the work, on GPUs one for each device from N on. threads: CPU threads of all of them together.
        others: the ranks of other nodes that share it too, as many on each; they are the process's from now on.
        shard_base: the base model is spread over all devices instead of copied to each. slots: as Trainer's, and
        calls are joined whenever they can; None: as many as pay by a measurement at the start, for at most
        max_adapters, and only calls that gain by it are joined. host_limit_bytes: shared by the processes of a node.
        scheduling: whose passes come first. sampler_copies, sampler_kv_bytes, host_free_bytes: what a sampler on the
        same host will take, and what was free there before (protocol.Start). The other arguments are Trainer's.

        Raises UserError for a model that cannot be trained or does not fit, and TrainerDied when the process ends
        before it is ready.
        """
        client = cls(*await launch(device, max(1, threads // processes), processes, others), scheduling)
        command = protocol.Start(
            model_path=model_path,
            model_name=model_name,
            dtype=dtype,
            device="cuda" if device.startswith("cuda") else device,
            max_rank=max_rank,
            tokens_per_microbatch=tokens_per_microbatch,
            host_limit_bytes=host_limit_bytes,
            slots=slots,
            max_adapters=max_adapters,
            gradient_checkpointing=gradient_checkpointing,
            spill_directory=spill_directory,
            shard_base=shard_base,
            sampler_copies=sampler_copies,
            sampler_kv_bytes=sampler_kv_bytes,
            host_free_bytes=host_free_bytes,
        )
        client._tokens_per_pass = tokens_per_microbatch * (processes + len(others.connections if others else ()))
        try:
            client.info = await client._call(None, command, protocol.StartInfo)
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def pid(self) -> int:
        return self._process.pid

    # ------------------------------------------------------------------------------------- scheduling

    def register(self, experiment: str, weight: int, remaining_tokens: int | None) -> None:
        """Make an experiment known to the queue until `remove`, or change its weight and the tokens of work that it has
        left (None: whatever is asked for): at once, also of what waits."""
        self._queue.register(experiment, weight, remaining_tokens)

    def remove(self, experiment: str) -> None:
        """Forget an experiment; what of it waits is still made."""
        self._queue.remove(experiment)

    # ------------------------------------------------------------------------------------- commands (see Trainer)

    async def create(self, adapter: str, config: LoraConfig) -> AdapterInfo:
        return await self._call(adapter, protocol.Create(adapter, config), AdapterInfo)

    async def load(
        self,
        adapter: str,
        directory: str | Path,
        *,
        optimizer: bool,
        config: LoraConfig | None = None,
        frozen: bool = False,
    ) -> AdapterInfo:
        command = protocol.Load(adapter, str(directory), optimizer, config, frozen)
        return await self._call(adapter, command, AdapterInfo)

    async def forward_backward(self, adapter: str, rows: list[Row], loss: Loss) -> ForwardBackwardResult:
        tokens = tokens_of(rows)
        counts: list[int] = []  # of each piece's trained tokens

        def commands() -> list[protocol.ForwardBackward]:
            pieces = trained(cut(rows, self._tokens_per_call))
            counts.extend(map(count_trained, pieces) if len(pieces) > 1 else ())
            return [protocol.ForwardBackward(adapter, piece, loss) for piece in pieces]

        bodies = await self._calls(adapter, protocol.ForwardBackward, commands, tokens)
        results = [msgspec.msgpack.decode(body, type=ForwardBackwardResult) for body in bodies]
        return joined_results(counts, results) if counts else results[0]

    async def forward(self, adapter: str, rows: list[Row], *, temperature: float = 1.0) -> list[list[list[float]]]:
        def commands() -> list[protocol.Forward]:
            return [protocol.Forward(adapter, piece, temperature) for piece in cut(rows, self._tokens_per_call)]

        tokens = tokens_of(rows)
        bodies = await self._calls(adapter, protocol.Forward, commands, tokens)
        return await apart(adapter, tokens, lambda: joined_logprobs(rows, [decoded_logprobs(body) for body in bodies]))

    async def optim_step(self, adapter: str, adam: AdamParams) -> OptimResult:
        return await self._call(adapter, protocol.OptimStep(adapter, adam), OptimResult)

    async def save(self, adapter: str, directory: str | Path, *, optimizer: bool) -> None:
        await self._call(adapter, protocol.Save(adapter, str(directory), optimizer), type(None))

    async def export(self, adapter: str, directory: str | Path) -> None:
        await self._call(adapter, protocol.Export(adapter, str(directory)), type(None))

    async def delete(self, adapter: str) -> None:
        """Deletes the adapter. Its calls that have no answer yet fail with EngineError (AdapterDeleted): those still
        queued are not run, and the result of one that runs is dropped."""
        for call in (*self._queue, *self._current):
            if call.adapter == adapter and not call.future.done():
                call.future.set_exception(
                    EngineError(f"adapter {adapter!r} was deleted meanwhile", reason="AdapterDeleted")
                )
        await self._call(adapter, protocol.Delete(adapter), type(None))

    async def close(self) -> None:
        """Ends the process and waits for it. Calls without an answer raise TrainerDied."""
        self._closing = True
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._task

    # ------------------------------------------------------------------------------------- inside

    @property
    def _tokens_per_call(self) -> int:
        return PASSES_PER_CALL * self._tokens_per_pass

    async def _call(self, adapter: str | None, command: protocol.Command, answer: type[T]) -> T:
        (body,) = await self._calls(adapter, type(command), lambda: [command], 0)
        return msgspec.msgpack.decode(body, type=answer)

    async def _calls(
        self,
        adapter: str | None,
        kind: type,
        commands: Callable[[], Sequence[protocol.Command | protocol.ForwardBackward]],
        tokens: int,
    ) -> list[bytes]:
        """The answers to the commands, all of one kind, that `commands` makes of so many tokens. Between them other
        adapters' may come, and none of this adapter's."""
        if self.death is not None or self._closing:
            raise TrainerDied(str(self.death or "the trainer was closed"))
        call = Call(adapter, kind, asyncio.get_running_loop().create_future(), tokens)
        self._queue.put(call)
        try:
            for command in await apart(adapter, tokens, commands):
                if not call.future.done():  # deleted, or the process has died
                    body = await apart(adapter, tokens, partial(encoded, command))
                    call.pieces.append(Piece(body, cost_of(command)))
        except BaseException:
            if not call.future.cancel():
                call.future.exception()  # told to nobody: this one is
            self._wake.set()
            raise
        call.ready = True
        self._wake.set()
        return await call.future

    async def _run(self) -> None:
        """Sends queued calls one by one until the process is gone; then fails all that are left."""
        lost = asyncio.create_task(self._process.wait())
        try:
            while not lost.done():
                while not lost.done() and (taken := self._take()):
                    self._current = taken
                    with self.busy:
                        await self._exchange(taken)
                    self._current = []
                    await asyncio.sleep(0)  # whoever was answered asks for its next thing first
                self._wake.clear()
                waiting = asyncio.create_task(self._wake.wait())
                await asyncio.wait((waiting, lost), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        except (OSError, EOFError):
            pass  # the stream ended: so did, or soon will, the process
        except Exception:
            log.exception("the trainer's answer could not be read; the process is ended")
            self._process.kill()
        self._end(await lost)

    def _take(self) -> list[Call]:
        """Takes the next call off the queue, and those that join it."""
        self._queue.keep(self._waits)
        return self._queue.take(self.info.slots, self.info.join_below, self._tokens_per_pass)

    def _waits(self, call: Call) -> bool:
        """Whether it is still to be made; the end of one that is not is seen to."""
        trains = call.kind in (protocol.ForwardBackward, protocol.OptimStep)
        if call.future.done() and call.halved:
            self._half.add(call.adapter)
        elif call.adapter in self._half and trains and not call.future.done():
            call.future.set_exception(
                EngineError(
                    f"adapter {call.adapter!r} has the gradient of half a call: load it again", reason="HalfGradient"
                )
            )
        return not call.future.done()

    async def _exchange(self, calls: list[Call]) -> None:
        body = calls[0].pieces[0].body
        if calls[0].trains:
            joined = [msgspec.Raw(call.pieces[0].body) for call in calls]
            body = msgspec.msgpack.encode(protocol.Joined(joined, self._queue.upcoming()))
        self._writer.write(protocol.header(body))
        self._writer.write(body)
        await self._writer.drain()
        (length,) = protocol.LENGTH.unpack(await self._reader.readexactly(protocol.LENGTH.size))
        reply = msgspec.msgpack.decode(await self._reader.readexactly(length), type=protocol.Reply)
        if reply.failure is not None and reply.failure.kind == TrainerDied.__name__:
            self._last_words = reply.failure.message
            raise EOFError
        replies = [reply] * len(calls)
        if calls[0].trains and reply.failure is None:
            replies = msgspec.msgpack.decode(reply.result, type=list[protocol.Reply])
        for call, answer in zip(calls, replies, strict=True):
            self._answered(call, answer)

    def _answered(self, call: Call, answer: protocol.Reply) -> None:
        if answer.failure is None:
            call.pieces.popleft()
            call.answers.append(bytes(answer.result))
            if call.kind in (protocol.Load, protocol.Delete):
                self._half -= {call.adapter}
        elif not call.future.done():
            call.future.set_exception(protocol.error_of(answer.failure))
        if not call.pieces and not call.future.done():
            call.future.set_result(call.answers)
        elif self._waits(call):
            self._queue.put_back(call)

    def _end(self, code: int) -> None:
        how = f"by signal {-code}" if code < 0 else f"with status {code}{_MEANING.get(code, '')}"
        words = f": {self._last_words}" if self._last_words else ""
        ended = f"the trainer process ended {how}{words}"
        self.death = TrainerDied("the trainer was closed" if self._closing else ended)
        for call in (*self._current, *self._queue):
            if not call.future.done():
                call.future.set_exception(TrainerDied(str(self.death)))
        self._queue.keep(lambda _: False)
        self._writer.close()
        if not self._closing:
            self.died.set()
