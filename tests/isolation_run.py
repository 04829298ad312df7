"""Many tenants' traffic on one sampler, and afterwards, of every token: would its own version alone have said that?

`drive` lets groups of several turns come at random, each under one lease, while versions of all experiments are
published and retired around them and too few slots make publishes wait. What each group must be answered with is kept
by the driver, from the publishes that it saw return, and not asked from the sampler. `judge` then gives each version to
Hugging Face and PEFT, which know nothing of the others, and compares. `run` does both; benchmarks call it too.

A greedy answer is compared token by token, each after the sampler's own tokens before it: all equal exactly when PEFT's
greedy answer to the prompt is the same. Left out: the engine around the sampler, and speed.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from torch import Tensor

from clora_engine.errors import SamplerRestarted
from clora_engine.sampler import Lease, Sampler, SamplerConfig
from clora_engine.types import Sample, SamplingParams, Version
from tests.sampler_fixtures import Judge, base_shapes, kill_core, of_tokens, sampler_config, write_adapter

TIE = 1e-4
"""Logits closer than this may be ordered either way by two correct implementations in float32."""
DISTINCT_TOKENS = 4
MOST_TURNS, MOST_SAMPLES, MOST_TOKENS = 3, 4, 12
JUDGED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Traffic:
    """requests: calls of `sample`, of one or more samples each. strengths: of adapters on all kinds of layers and on
    some; any two adapters, and the base model, must differ at once, which depends on the model. kill_at: after how many
    requests vLLM's core is killed."""

    requests: int
    seed: int
    experiments: int = 8
    most_groups: int = 24
    first_prompts: int = 24
    strengths: tuple[float, float] = (0.6, 1.0)
    publish_share: float = 0.12
    retire_share: float = 0.02
    cancel_share: float = 0.02
    kill_at: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One sample, and the version that had to give it (None: the base model)."""

    version: Version | None
    prompt: list[int]
    temperature: float
    sample: Sample


@dataclass(slots=True)
class Recording:
    """What came of the traffic. directories: a copy of every published version."""

    prompts: list[list[int]]
    directories: dict[Version | None, Path | None] = field(default_factory=lambda: {None: None})
    answers: list[Answer] = field(default_factory=list)
    requests: int = 0
    cancelled: int = 0
    restarted: int = 0
    publishes: int = 0
    retirements: int = 0
    full: int = 0
    looks: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """What the comparison found; counts, but for the following.

    requests         finished calls of `sample`
    mismatches       samples with a token that their version alone would not have given, or a log-prob too far away
    mismatched       the versions of these
    cancelled        groups that were cancelled; restarted: that ended with vLLM's core
    excused          greedy samples that differ, but only at a tie
    alike            pairs of versions that some first prompt does not tell apart within 4 tokens: must be 0, or the run
                     proves little
    max_logprob_gap  over all tokens, in nats
    full_share       of the moments at which a group or a publish ended, how many found no free slot
    seconds          of the traffic alone
    """

    requests: int
    samples: int
    greedy_samples: int
    tokens: int
    mismatches: int
    mismatched: tuple[str, ...]
    excused: int
    alike: int
    max_logprob_gap: float
    versions_answered: int
    publishes: int
    retirements: int
    cancelled: int
    restarted: int
    full_share: float
    seconds: float


def run(model: Path, root: Path, *, requests: int = 2000, seed: int = 0, **config: Any) -> IsolationReport:
    """`root`: an empty directory for versions and their copies. `config` changes the sampler's configuration."""
    recording = asyncio.run(_run_traffic(isolation_config(model, root, **config), root / "copies", requests, seed))
    return judge(model, recording)


async def _run_traffic(config: SamplerConfig, copies: Path, requests: int, seed: int) -> Recording:
    async with Sampler(config) as sampler:
        return await drive(sampler, copies, Traffic(requests, seed))


def isolation_config(model: Path, root: Path, **changes: Any) -> SamplerConfig:
    """Ten slots for eight experiments: full while two older versions are leased."""
    return sampler_config(model, root / "versions", **({"slots": 10, "max_lora_rank": 16} | changes))


# --------------------------------------------------------------------------------------------- traffic


async def drive(sampler: Sampler, copies: Path, traffic: Traffic) -> Recording:
    """All requests, to the end. What happens next is drawn when something ends, never after a time."""
    driver = _Driver(sampler, copies, traffic)
    began = time.monotonic()
    await driver.run()
    driver.recording.seconds = time.monotonic() - began
    return driver.recording


class _Driver:
    def __init__(self, sampler: Sampler, copies: Path, traffic: Traffic) -> None:
        self._sampler, self._copies, self._traffic = sampler, copies, traffic
        self._draw = random.Random(traffic.seed)
        self._vocabulary = base_shapes(sampler.config.model).vocabulary
        prompts = [self._tokens(self._draw, self._draw.randint(16, 48)) for _ in range(traffic.first_prompts)]
        self.recording = Recording(prompts)
        self._experiments = [f"experiment-{i}" for i in range(traffic.experiments)]
        self._latest: dict[str, Version] = {}
        self._groups: set[asyncio.Task[None]] = set()
        self._publishes: dict[asyncio.Task[None], str] = {}
        self._asked, self._kill_at = 0, traffic.kill_at

    async def run(self) -> None:
        self._copies.mkdir(parents=True)
        for experiment in self._experiments:
            self._start_publish(experiment)
        while self._groups or self._publishes or self._asked < self._traffic.requests:
            self._start_groups()
            ended, _ = await asyncio.wait([*self._groups, *self._publishes], return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                self._end(task)
            if self._kill_at is not None and self.recording.requests >= self._kill_at:
                self._kill_at = None
                kill_core()
            self.recording.looks += 1
            self.recording.full += self._sampler.stats().free_slots == 0

    def _start_groups(self) -> None:
        """None to three more; at least one while nothing else would bring the run on."""
        room = self._traffic.most_groups - len(self._groups)
        wanted = max(self._draw.choice((0, 1, 1, 2, 3)), not self._groups)
        for _ in range(min(wanted, room)):
            if self._asked >= self._traffic.requests:
                return
            draw = random.Random(self._draw.random())
            turns = min(draw.randint(1, MOST_TURNS), self._traffic.requests - self._asked)
            self._asked += turns
            self._groups.add(asyncio.create_task(self._group(draw, turns)))

    def _end(self, task: asyncio.Task[None]) -> None:
        """Whatever ends may set off a publish, a retirement or a cancellation."""
        self._publishes.pop(task, None)
        self._groups.discard(task)
        if task.cancelled():
            self.recording.cancelled += 1
        elif isinstance(task.exception(), SamplerRestarted):
            self.recording.restarted += 1
        else:
            task.result()
        chance = self._draw.random
        if self._asked >= self._traffic.requests:
            return
        if chance() < self._traffic.publish_share * MOST_TURNS:
            self._start_publish(self._draw.choice(self._experiments))
        if chance() < self._traffic.retire_share * MOST_TURNS:
            self._retire(self._draw.choice(self._experiments))
        if self._groups and chance() < self._traffic.cancel_share * MOST_TURNS:
            self._draw.choice(list(self._groups)).cancel()

    def _start_publish(self, experiment: str) -> None:
        if experiment not in self._publishes.values():
            step = self.recording.publishes
            self.recording.publishes += 1
            task = asyncio.create_task(self._publish(Version(experiment, step)))
            self._publishes[task] = experiment

    def _retire(self, experiment: str) -> None:
        """Its next life begins at once, and waits for a slot like all others."""
        if experiment in self._latest and experiment not in self._publishes.values():
            self._sampler.drop(experiment)
            del self._latest[experiment]
            self.recording.retirements += 1
            self._start_publish(experiment)

    async def _publish(self, version: Version) -> None:
        """Ranks from 1 to the largest; every third adapter on a few kinds of layers only, the stronger for that."""
        draw = random.Random(version.step)
        suffixes = base_shapes(self._sampler.config.model).suffixes
        some = draw.random() < 1 / 3
        adapter: dict[str, Any] = {
            "seed": version.step,
            "rank": draw.randint(1, self._sampler.config.max_lora_rank),
            "modules": draw.sample(suffixes, max(2, len(suffixes) // 2)) if some else suffixes,
            "strength": self._traffic.strengths[some],
        }
        directory, copy = self._sampler.new_directory(), self._copies / str(version.step)
        await asyncio.to_thread(write_adapter, directory, self._sampler.config.model, **adapter)
        await asyncio.to_thread(shutil.copytree, directory, copy)
        self.recording.directories[version] = copy
        await self._sampler.publish(version, directory)
        self._latest[version.experiment] = version

    async def _group(self, draw: random.Random, turns: int) -> None:
        experiment = draw.choice([None, *self._experiments])
        version = self._latest.get(experiment or "")
        if version is None:
            return await self._turns(draw, turns, None, None)
        with self._sampler.lease(version.experiment) as lease:
            await self._turns(draw, turns, version, lease)

    async def _turns(self, draw: random.Random, turns: int, version: Version | None, lease: Lease | None) -> None:
        history = draw.choice(self.recording.prompts)
        for turn in range(turns):
            temperature = draw.choice((0.0, 0.0, 0.0, 1.0, 0.7))
            params = SamplingParams(temperature, draw.randint(DISTINCT_TOKENS, MOST_TOKENS), ())
            try:
                samples = await self._sampler.sample(lease, history, draw.randint(1, MOST_SAMPLES), params)
            except (asyncio.CancelledError, SamplerRestarted):
                self._asked -= turns - turn  # others ask in its place
                raise
            self.recording.requests += 1
            self.recording.answers += [Answer(version, history, temperature, sample) for sample in samples]
            history = [*history, *samples[0].ids, *self._tokens(draw, draw.randint(1, 8))]

    def _tokens(self, draw: random.Random, number: int) -> list[int]:
        return [draw.randrange(self._vocabulary) for _ in range(number)]


# --------------------------------------------------------------------------------------------- judgement


@dataclass(slots=True)
class _Verdict:
    mismatches: list[str] = field(default_factory=list)
    excused: int = 0
    max_logprob_gap: float = 0.0


def judge(model: Path, recording: Recording, *, logprob_tolerance: float = 1e-3) -> IsolationReport:
    """Compare every answer with what its version's directory says by itself."""
    by_version: dict[Version | None, list[Answer]] = defaultdict(list)
    for answer in recording.answers:
        by_version[answer.version].append(answer)
    verdict = _Verdict()
    firsts: dict[Version | None, list[tuple[int, ...]]] = {}
    for version, answers in by_version.items():
        alone = Judge(model)  # a model of its own: what was loaded before cannot touch it
        directory = recording.directories[version]
        firsts[version] = alone.greedy(directory, recording.prompts, DISTINCT_TOKENS)
        for at in range(0, len(answers), JUDGED_AT_ONCE):
            _compare(alone, directory, answers[at : at + JUDGED_AT_ONCE], verdict, logprob_tolerance)
    return IsolationReport(
        requests=recording.requests,
        samples=len(recording.answers),
        greedy_samples=sum(answer.temperature == 0 for answer in recording.answers),
        tokens=sum(len(answer.sample.ids) for answer in recording.answers),
        mismatches=len(verdict.mismatches),
        mismatched=tuple(sorted(set(verdict.mismatches))),
        excused=verdict.excused,
        alike=sum(any(map(_equal, zip(a, b, strict=True))) for a, b in combinations(firsts.values(), 2)),
        max_logprob_gap=verdict.max_logprob_gap,
        versions_answered=len(by_version),
        publishes=recording.publishes,
        retirements=recording.retirements,
        cancelled=recording.cancelled,
        restarted=recording.restarted,
        full_share=recording.full / recording.looks,
        seconds=recording.seconds,
    )


def _compare(
    alone: Judge, directory: Path | None, answers: Sequence[Answer], verdict: _Verdict, logprob_tolerance: float
) -> None:
    rows = alone.logits(directory, [[*answer.prompt, *answer.sample.ids] for answer in answers])
    for answer, row in zip(answers, rows, strict=True):
        logits_TV, ids = row[len(answer.prompt) - 1 : -1], answer.sample.ids
        logprobs_T = of_tokens(logits_TV, ids, answer.temperature or 1.0)
        gap = max(abs(a - b) for a, b in zip(logprobs_T.tolist(), answer.sample.logprobs, strict=True))
        verdict.max_logprob_gap = max(verdict.max_logprob_gap, gap)
        behind = _behind_the_best(logits_TV, ids) if answer.temperature == 0 else 0.0
        if gap > logprob_tolerance or behind >= TIE:
            verdict.mismatches.append(str(answer.version or "base model"))
        elif behind > 0:
            verdict.excused += 1


def _behind_the_best(logits_TV: Tensor, ids: Sequence[int]) -> float:
    """How far the tokens' logits are below the largest of their rows, at most; 0 for a greedy answer."""
    chosen_T = logits_TV[range(len(ids)), list(ids)]
    return float((logits_TV.max(-1).values - chosen_T).max())


def _equal(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    return pair[0] == pair[1]
