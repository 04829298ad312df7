"""The sampler of the simulated node: the engine's own gate in front of a clock that stands for vLLM.

Real: the gate with its queues, shares and policies (clora_engine.gate), and the choice of the rank. Simulated: how long
it takes to decode. All sequences that run on one GPU get a token each in `base + load × running` seconds; prompts cost
nothing of their own. Lengths are drawn from what a request says, so that every policy gets the same work.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType

from clora_api.v1alpha1.engine import Scheduling
from clora_engine.gate import Gate, Seat
from clora_engine.types import Sample, SamplingParams, Version

SAMPLING_RANKS = 4
"""GPUs that sample, each with the whole model."""
LENGTH_SIGMA = 0.6
"""Of the log-normal that a turn's length is drawn from; an assumption, not fitted."""
FOREVER = 1e9
"""Seconds; above any wait of a simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Seconds for one token of every sequence that runs on a GPU: base + load × sequences."""

    base: float
    load: float


class SimulatedLease:
    """As clora_engine.sampler.Lease: holds the rank."""

    def __init__(self, version: Version, rank: int, held: Counter[int]) -> None:
        self.version = version
        self.rank = rank
        self._held = held

    def __enter__(self) -> SimulatedLease:
        self._held[self.rank] += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._held[self.rank] -= 1


class SimulatedSampler:
    """A SamplerLike for clora_engine.rollout. seats: sequences that may run on one GPU at once. turn_tokens: a
    turn's mean length."""

    def __init__(self, decoding: Decoding, seats: int, scheduling: Scheduling, turn_tokens: float) -> None:
        loop = asyncio.get_running_loop()
        self.gate = Gate(
            ranks=SAMPLING_RANKS,
            seats=seats,
            scheduling=scheduling,
            max_queued=1_000_000,
            queue_timeout_seconds=FOREVER,
            is_open=lambda: True,
            now=loop.time,
        )
        self.tokens: Counter[str] = Counter()
        self._decoders = [_Decoder(decoding) for _ in range(SAMPLING_RANKS)]
        self._turn_tokens = turn_tokens
        self._steps: Counter[str] = Counter()
        self._held: Counter[int] = Counter()
        self._ids = count(1)

    @property
    def busy_seconds(self) -> float:
        """In which a GPU decoded, the mean over the GPUs."""
        return sum(decoder.busy_seconds for decoder in self._decoders) / SAMPLING_RANKS

    def publish(self, experiment: str, step: int) -> None:
        self._steps[experiment] = step

    def lease(self, experiment: str) -> SimulatedLease:
        version = Version(experiment, self._steps[experiment])
        return SimulatedLease(version, self.gate.emptiest(self._held), self._held)

    async def sample(
        self, lease: SimulatedLease, prompt_ids: Sequence[int], n: int, params: SamplingParams
    ) -> list[Sample]:
        """As clora_engine.sampler.Sampler.sample. A sample shows one token, its number: no two are alike."""
        tenant = lease.version.experiment
        draw = random.Random(f"{tenant} {prompt_ids}")  # noqa: S311 - no secret
        lengths = [min(params.max_tokens, _log_normal(draw, self._turn_tokens)) for _ in range(n)]
        seats = self.gate.enter(tenant, lease.rank, n, params.max_tokens, 0)
        await asyncio.gather(*(self._one(seat, tokens) for seat, tokens in zip(seats, lengths, strict=True)))
        self.tokens[tenant] += sum(lengths)
        return [Sample((i,), (0.0,), truncated=False) for i in range(n)]

    async def _one(self, seat: Seat, tokens: int) -> None:
        async with self.gate.taken(seat):
            await self._decoders[seat.rank].generate(tokens)
            self.gate.leave(seat, tokens)


def _log_normal(draw: random.Random, mean: float) -> int:
    return max(1, round(mean * math.exp(draw.gauss(0.0, LENGTH_SIGMA) - LENGTH_SIGMA**2 / 2)))


class _Decoder:
    """One GPU. `_clock` counts the tokens that a sequence has got which has always been there."""

    def __init__(self, decoding: Decoding) -> None:
        self.busy_seconds = 0.0
        self._decoding = decoding
        self._clock = self._since = 0.0
        self._running: list[tuple[float, int, asyncio.Future[None]]] = []  # by the clock at which they end
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def generate(self, tokens: int) -> None:
        self._catch_up()
        ended = self._loop.create_future()
        heapq.heappush(self._running, (self._clock + tokens, next(self._numbers), ended))
        self._set_timer()
        await ended

    def _token_seconds(self) -> float:
        return self._decoding.base + self._decoding.load * len(self._running)

    def _catch_up(self) -> None:
        now = self._loop.time()
        if self._running:
            self._clock += (now - self._since) / self._token_seconds()
            self.busy_seconds += now - self._since
        self._since = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._running:
            wait = max(0.0, self._running[0][0] - self._clock) * self._token_seconds()
            self._timer = self._loop.call_later(wait, self._end)

    def _end(self) -> None:
        self._catch_up()
        while self._running and self._running[0][0] <= self._clock + 1e-6:
            heapq.heappop(self._running)[2].set_result(None)
        self._set_timer()
