"""One life of vLLM: its processes from start to death, and the few calls that the sampler makes.

Every call ends when the core dies, with SamplerRestarted: vLLM itself leaves utility calls pending for ever then.
Restarting, versions and leases are the sampler's (`sampler.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from vllm import SamplingParams as VllmParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from clora_engine.errors import EngineError, SamplerRestarted, UserError
from clora_engine.sampler_config import SamplerConfig, engine_args, process_environment
from clora_engine.types import Sample, SamplingParams

T = TypeVar("T")

DEATH_POLL_SECONDS = 0.2
DIED = "vLLM's core died under the request; it is being restarted"
SHUTTING_DOWN = "Server shutting down"  # all that vLLM says to a utility call after a SIGTERM


@dataclass(frozen=True, slots=True)
class Output:
    """One sample and what it cost; cached_tokens of the prompt came from the prefix cache."""

    sample: Sample
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """What vLLM must know of a loaded version to sample with it."""

    name: str
    lora_id: int
    directory: Path

    def request(self) -> LoRARequest:
        return LoRARequest(self.name, self.lora_id, str(self.directory))


class SamplerCore:
    """vLLM's AsyncLLM and its processes, from `start` to `close` or death."""

    def __init__(self, llm: AsyncLLM, ranks: int, gauges: list[_Gauges]) -> None:
        self._llm = llm
        self._gauges = gauges
        self._ranks = ranks
        self._request_ids = count()
        self.samples = 0  # finished in this life
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._watch_death(), name="sampler-core-watch")

    @classmethod
    async def start(cls, config: SamplerConfig, lora_modules: tuple[str, ...]) -> SamplerCore:
        """Start vLLM and wait until its processes are ready (seconds to minutes). Raises EngineError if they don't
        come up. While this runs, the process environment holds what vLLM's processes inherit."""
        gauges: list[_Gauges] = []

        def build() -> AsyncLLM:
            args = engine_args(config, lora_modules)  # may look at the model's files, which may be gone
            with process_environment(config):
                return AsyncLLM.from_engine_args(args, stat_loggers=[_Gauges.factory(gauges)])

        building = asyncio.create_task(asyncio.to_thread(build))
        try:
            llm = await asyncio.shield(building)
        except asyncio.CancelledError:
            with suppress(Exception):
                await asyncio.to_thread((await building).shutdown)
            raise
        except EngineError:
            raise
        except (VLLMClientError, ValueError) as error:
            raise UserError(f"vLLM refuses the sampler's configuration: {error}", field="sampler") from error
        except Exception as error:
            raise EngineError(f"vLLM's core did not start: {error}", reason="SamplerUnavailable") from error
        core = cls(llm, config.data_parallel_size, gauges)
        await core._guard(llm.get_supported_tasks())
        return core

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self._ranks

    @property
    def running(self) -> int:
        return sum(gauge.running for gauge in self._gauges)

    @property
    def waiting(self) -> int:
        return sum(gauge.waiting for gauge in self._gauges)

    @property
    def alive(self) -> bool:
        """False as soon as any call could have noticed that it is dead."""
        return not (self._death.done() or self._llm.errored)

    async def died(self) -> None:
        """Returns when the core is dead."""
        await asyncio.shield(self._death)

    async def load(self, adapter: Adapter) -> None:
        """Load on every data-parallel rank, or on none: raises EngineError after taking it back where it was loaded.
        In two calls (vllm_plugin/read_ahead.py), between which requests go on."""
        try:
            await self._on_all_workers("read_lora", adapter.name, adapter.lora_id, str(adapter.directory))
            loaded = await self._on_all_ranks("add_lora", adapter.request())
        except SamplerRestarted:
            raise
        except Exception as error:
            await self.unload(adapter.lora_id)
            raise EngineError(f"vLLM could not load {adapter.name}: {error}", reason="InvalidAdapter") from error
        if not all(loaded):
            await self.unload(adapter.lora_id)
            raise EngineError(f"vLLM did not load {adapter.name} on every rank", reason="InvalidAdapter")

    async def unload(self, lora_id: int) -> None:
        """Take an adapter out everywhere. No request may be in flight with it. An unknown id is no error."""
        await self._on_all_workers("drop_lora", lora_id)

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        adapter: Adapter | None,
        rank: int,
        seed: int | None,
        priority: int = 0,
    ) -> Output:
        """One sample. Cancelling it aborts the request in the core before this returns. When the KV cache runs out,
        vLLM preempts the request with the highest `priority`, and computes it again later."""
        stream = self._llm.generate(
            tokens_input(prompt_ids),
            _vllm_params(params, seed),
            f"r{next(self._request_ids)}",
            lora_request=adapter.request() if adapter else None,
            data_parallel_rank=rank if self._ranks > 1 else None,
            priority=priority,
        )
        return await self._guard(self._finish(stream))

    async def close(self) -> None:
        """End all processes of this core; safe after its death."""
        self._watch.cancel()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # or it reports the end as a failure
        await asyncio.to_thread(self._llm.shutdown)
        if not self._death.done():
            self._death.set_result(None)

    async def _finish(self, stream: AsyncIterator[RequestOutput]) -> Output:
        final: RequestOutput | None = None
        try:
            async for output in stream:
                final = output
        except VLLMClientError as error:
            raise UserError(f"vLLM refuses the request: {error}", field="sampling") from error
        assert final is not None
        assert final.finished
        if final.outputs[0].finish_reason == "abort":  # of its own accord: it has been told to end, by a SIGTERM
            raise await self._ending()
        self.samples += 1
        return _output(final)

    async def _on_all_workers(self, method: str, *args: Any) -> None:
        """A method of read_ahead.py, on every worker of every rank."""
        await self._on_all_ranks("collective_rpc", method, None, args)

    async def _on_all_ranks(self, method: str, *args: Any) -> list[Any]:
        return await self._guard(self._utility(method, *args))

    async def _utility(self, method: str, *args: Any) -> list[Any]:
        try:
            return list(await self._llm.engine_core.call_utility_all_async(method, *args))
        except Exception as error:
            if str(error) == SHUTTING_DOWN:
                raise await self._ending() from error
            raise

    async def _ending(self) -> SamplerRestarted:
        """The failure of a call that a core refuses or cuts short because it ends: neither the call's fault nor its
        adapter's. There is nothing to try again before it is dead."""
        await self.died()
        return SamplerRestarted(DIED)

    async def _guard(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`, but not beyond the core's death."""
        task = asyncio.ensure_future(call)
        try:
            either: set[asyncio.Future[Any]] = {task, self._death}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise SamplerRestarted(DIED)
            return task.result()
        except EngineDeadError as error:
            raise SamplerRestarted(DIED) from error
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _watch_death(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110  vLLM offers no event
            await asyncio.sleep(DEATH_POLL_SECONDS)
        if not self._death.done():
            self._death.set_result(None)


def _vllm_params(params: SamplingParams, seed: int | None) -> VllmParams:
    return VllmParams(
        temperature=params.temperature,
        max_tokens=params.max_tokens,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,  # only the stop tokens that were given end a sample
        seed=seed,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _output(final: RequestOutput) -> Output:
    completion = final.outputs[0]
    ids = tuple(completion.token_ids)
    assert completion.logprobs is not None
    logprobs = tuple(at[token].logprob for token, at in zip(ids, completion.logprobs, strict=True))
    if not all(map(isfinite, logprobs)):
        raise EngineError("log-probs are not finite: the adapter has diverged", reason="AdapterDiverged")
    return Output(
        Sample(ids, logprobs, truncated=completion.finish_reason == "length"),
        prompt_tokens=len(final.prompt_token_ids or ()),
        cached_tokens=final.num_cached_tokens or 0,
    )


class _Gauges(StatLoggerBase):  # type: ignore[misc]
    """The last numbers of requests that one rank's scheduler reported."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.running = 0
        self.waiting = 0

    @staticmethod
    def factory(made: list[_Gauges]) -> Any:
        def make(vllm_config: Any, engine_index: int = 0) -> _Gauges:
            made.append(_Gauges(vllm_config, engine_index))
            return made[-1]

        return make

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs

    def log_engine_initialized(self) -> None:
        pass
