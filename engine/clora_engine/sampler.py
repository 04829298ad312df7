"""The sampler: serves many versions of many adapters, and the base model, from one warm vLLM.

A version is an immutable directory with an id and a name of its own. `publish` loads it on every data-parallel rank
and then switches new leases over; `lease` holds the version that is the latest now until it is released, so that all
turns of a trajectory group come from one policy; what is neither latest nor leased is unloaded and removed. Nothing is
ever loaded in place, no slot is taken from a version that may still be asked for, no prefix cache is reset.

Every sequence passes the gate, base-model ones as a tenant of their own. vLLM's core may die (`generation` counts its
lives): the requests that it held raise SamplerRestarted, the core is started again, all versions are loaded again from
their directories, and requests that wait at the gate, or come meanwhile, go on waiting.

Left out: who may sample how much, and when (gate.py, gate_queue.py); tokenizing (token ids in and out).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from clora_engine.adapter_files import BaseShapes
from clora_engine.busy_clock import BusyClock
from clora_engine.errors import EngineError, SamplerRestarted, TransientError
from clora_engine.gate import Gate, GateStats, Seat
from clora_engine.sampler_config import SamplerConfig
from clora_engine.sampler_core import Output
from clora_engine.sampler_request import check_request
from clora_engine.sampler_selftest import self_test
from clora_engine.sampler_versions import LiveVersions, VersionStats
from clora_engine.types import Sample, SamplingParams, Version
from clora_engine.versions import Entry
from clora_engine.versions_root import empty_root, prepare_root
from clora_engine.vllm_plugin.compat import check_vllm

__all__ = ["Counts", "Lease", "Sampler", "SamplerConfig", "SamplerStats", "VersionStats"]

BASE_TENANT = "(base model)"
"""At the gate, who samples from the base model; no experiment's uid has brackets."""

TIMEOUT_TOKENS = 4096
"""Samples that may become longer get request_timeout_seconds for every so many tokens."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What requests have got: how many, and their tokens as SamplerStats counts them."""

    requests: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def after(self, outputs: Sequence[Output]) -> Counts:
        return Counts(
            self.requests + 1,
            self.generated_tokens + sum(len(output.sample.ids) for output in outputs),
            self.prompt_tokens + sum(output.prompt_tokens for output in outputs),
            self.cached_tokens + sum(output.cached_tokens for output in outputs),
        )


@dataclass(frozen=True, slots=True)
class SamplerStats:
    """generation: lives of vLLM's core so far (0: never up). Token counts are totals since the sampler started, served
    requests included; cached_tokens are the part of prompt_tokens that the prefix cache saved. served: those alone."""

    generation: int
    up: bool
    running: int
    waiting: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    free_slots: int
    versions: tuple[VersionStats, ...]
    gate: GateStats
    busy_seconds: float  # in which vLLM had at least one sequence
    served: Counts


class Lease:
    """A version held for one trajectory group, as a context manager or until `release`. `rank` is the data-parallel
    rank of all its requests: later turns find the earlier ones in that rank's prefix cache. serving: held for a
    tenant's request, which is counted apart from what the experiment samples itself."""

    def __init__(self, sampler: Sampler, entry: Entry, rank: int, serving: bool) -> None:
        self._sampler = sampler
        self._entry: Entry | None = entry
        self.version = entry.version
        self.rank = rank
        self.serving = serving

    def release(self) -> None:
        """Give the version back; a second call does nothing. Requests in flight still finish on it."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._sampler._leases[self.rank] -= 1
            self._sampler._versions.release(entry)

    def held(self) -> Entry:
        if self._entry is None:
            raise EngineError(f"the lease of {self.version} was released")
        return self._entry

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class Sampler:
    """See the module. All methods belong to the event loop that called `start`."""

    def __init__(self, config: SamplerConfig) -> None:
        self.config = config
        self._versions = LiveVersions(config)
        self._supervisor = self._versions.supervisor
        self._gate = Gate(
            ranks=config.data_parallel_size,
            seats=config.max_num_seqs,
            scheduling=config.scheduling,
            max_queued=config.max_queued,
            queue_timeout_seconds=config.queue_timeout_seconds,
            is_open=lambda: (core := self._supervisor.core) is not None and core.alive,
            now=time.monotonic,
        )
        self._following: asyncio.Task[None] | None = None
        self._leases: Counter[int] = Counter()  # held, by rank
        self._directories = count()
        self._counts = Counts()  # of all requests
        self._prompts: Counter[str] = Counter()  # tokens, by experiment
        self._cached: Counter[str] = Counter()
        self._served = Counts()  # of tenants' alone
        self._base: BaseShapes | None = None
        self._busy = BusyClock()

    # ------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start vLLM and let it pass the self-test. Raises UserError for a configuration that cannot work, EngineError
        when vLLM does not come up, or fails the self-test."""
        check_vllm()
        prepare_root(self.config.versions_root)
        self._base = await asyncio.to_thread(BaseShapes.of_model, self.config.model)
        await self._supervisor.start(self._base, partial(self_test, config=self.config, base=self._base))
        self._following = asyncio.create_task(self._follow_core(), name="sampler-gate")

    async def close(self) -> None:
        """End vLLM and remove all versions. What is pending raises EngineError."""
        await self._supervisor.close()
        if self._following is not None:
            await self._following
        await self._versions.settle()
        await asyncio.to_thread(empty_root, self.config.versions_root)

    async def __aenter__(self) -> Sampler:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------ versions

    def new_directory(self) -> Path:
        """A path below the versions root that nothing has used; the caller makes the directory and fills it."""
        return self.config.versions_root / f"v{next(self._directories):06d}-{secrets.token_hex(4)}"

    async def publish(self, version: Version, directory: Path) -> None:
        """Load an adapter and make it its experiment's latest version. Owns `directory`, a PEFT directory directly
        below the versions root, from here on: it is removed with the version, or when publishing fails.

        Waits while all slots are taken by versions that are still leased. Of publishes at once, the last one asked for
        is the latest. Raises UserError (InvalidAdapter) for an adapter that does not fit, CapacityError when no slot
        can come free, EngineError when vLLM does not load it, or when the experiment is dropped meanwhile; then nothing
        has changed. A core that dies meanwhile is waited for, once if it dies while it loads this adapter.
        """
        assert self._base is not None, "start the sampler first"
        await self._versions.publish(version, directory, self._base)

    def when_lost(self, act: Callable[[Version], None]) -> None:
        """`act` is called with each version that a new core could not load again: nobody can lease it any more."""
        self._versions.on_lost = act

    def lease(self, experiment: str, *, serving: bool = False) -> Lease:
        """Hold the experiment's latest version. Raises EngineError (NoVersion) when it has published none."""
        entry = self._versions.lease(experiment)
        rank = self._gate.emptiest(self._leases)  # a lease counts too: its first request may be yet to come
        self._leases[rank] += 1
        return Lease(self, entry, rank, serving)

    def drop(self, experiment: str) -> None:
        """Retire all versions of an experiment and forget it at the gate; what is leased or sampled goes last."""
        self._gate.remove(experiment)
        self._versions.drop(experiment)

    # ------------------------------------------------------------------------------------------ sampling

    async def sample(
        self, lease: Lease | None, prompt_ids: Sequence[int], n: int, params: SamplingParams
    ) -> list[Sample]:
        """n samples of one prompt under the leased version, or under the base model (None). They share the prompt's
        KV cache; sample i has seed `params.seed + i` if there is a seed.

        Raises UserError for a prompt that is too long or holds unknown ids, or for impossible parameters; CapacityError
        (SamplerQueueFull) when too much of this experiment waits already; TransientError when it waited too long
        (SamplerBusy) or vLLM held it for too long (SamplerTimeout), SamplerRestarted when vLLM's core dies under it.
        Cancelling takes the requests out of the queue, or aborts them.
        """
        assert self._base is not None, "start the sampler first"
        limits = {"vocabulary": self._base.vocabulary, "max_model_len": self.config.max_model_len}
        prompt = check_request(prompt_ids, n, params, **limits)
        tenant = lease.version.experiment if lease else BASE_TENANT
        rank = lease.rank if lease else self._gate.emptiest(self._leases)
        tokens = min(params.max_tokens, self.config.max_model_len - len(prompt))
        entry = lease.held() if lease else None
        serving = lease is not None and lease.serving
        with self._versions.in_flight(entry):
            seats = self._gate.enter(tenant, rank, n, tokens, len(prompt), serving=serving)
            try:
                calls = [
                    self._one(seat, entry, prompt, params, seed)
                    for seat, seed in zip(seats, _seeds(params, n), strict=True)
                ]
                outputs = await _all_or_none(calls)
            finally:
                for seat in seats:
                    self._gate.leave(seat)
        self._counts = self._counts.after(outputs)
        if serving:
            self._served = self._served.after(outputs)
        elif lease is not None:
            self._prompts[tenant] += sum(output.prompt_tokens for output in outputs)
            self._cached[tenant] += sum(output.cached_tokens for output in outputs)
        return [output.sample for output in outputs]

    async def _one(
        self, seat: Seat, entry: Entry | None, prompt: list[int], params: SamplingParams, seed: int | None
    ) -> Output:
        """One sample, when its turn has come."""
        async with self._gate.taken(seat):
            core = await self._supervisor.running()
            adapter = self._versions.adapter(entry)  # the core may have been restarted since it was queued
            seconds = self.config.request_timeout_seconds * max(1.0, seat.ticket.max_tokens / TIMEOUT_TOKENS)
            try:
                with self._busy:
                    async with asyncio.timeout(seconds):
                        output = await core.generate(prompt, params, adapter, seat.rank, seed, seat.priority)
            except TimeoutError:
                raise TransientError(
                    f"vLLM held a sequence for more than {seconds:g} s; it was aborted", reason="SamplerTimeout"
                ) from None
            except SamplerRestarted:
                self._supervisor.raise_if_ended()
                raise
            self._gate.leave(seat, len(output.sample.ids), output.prompt_tokens - output.cached_tokens)
            return output

    # ------------------------------------------------------------------------------------------ scheduling

    def register(self, experiment: str, weight: int, remaining_tokens: int | None) -> None:
        """Make an experiment known to the gate until `drop`, or change its weight and the tokens that it has left to
        sample (None: whatever is asked for): at once, also of what waits."""
        self._gate.register(experiment, weight, remaining_tokens)

    def seconds_waited(self, experiment: str) -> float:
        """Seconds since it was registered in which all that it sampled waited for others, or for its own tenants'
        requests."""
        return self._gate.seconds_waited(experiment)

    def prompt_tokens(self, experiment: str) -> tuple[int, int]:
        """Prompt tokens that the experiment has sampled after since the sampler started, each sample's counted, and
        how many of them the prefix cache saved; without those of tenants' requests."""
        return self._prompts[experiment], self._cached[experiment]

    def stats(self) -> SamplerStats:
        core = self._supervisor.core
        return SamplerStats(
            generation=self._supervisor.generation,
            up=core is not None,
            running=core.running if core else 0,
            waiting=core.waiting if core else 0,
            generated_tokens=self._counts.generated_tokens,
            prompt_tokens=self._counts.prompt_tokens,
            cached_tokens=self._counts.cached_tokens,
            free_slots=self._versions.free,
            versions=self._versions.stats(),
            gate=self._gate.stats(),
            busy_seconds=self._busy.seconds,
            served=self._served,
        )

    # ------------------------------------------------------------------------------------------ inside

    async def _follow_core(self) -> None:
        """Lets the gate grant seats whenever a core has come up, and ends the waiting when none will."""
        try:
            while True:
                self._gate.dispatch()
                await self._supervisor.change()
        except EngineError as ended:
            self._gate.close(ended)


def _seeds(params: SamplingParams, n: int) -> list[int | None]:
    return [None if params.seed is None else params.seed + i for i in range(n)]


async def _all_or_none(calls: list[Coroutine[Any, Any, Output]]) -> list[Output]:
    """All results; the first failure, or a cancellation, ends the others too before it is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
