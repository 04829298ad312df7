"""The gate before the real vLLM: order, cancellation, time-outs, a core that dies, a KV cache that runs out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from clora_api.control import DesiredExperiment
from clora_api.v1alpha1.engine import Scheduling
from clora_engine.config import EngineConfig
from clora_engine.errors import CapacityError, SamplerRestarted, TransientError
from clora_engine.experiment import Experiment
from clora_engine.sampler import Sampler
from clora_engine.training import Services
from clora_engine.types import SamplingParams, Version
from tests.engine_fixtures import rl_spec
from tests.sampler_fixtures import (
    GREEDY,
    Judge,
    kill_core,
    prompt,
    publish,
    running_sampler,
    sampler_config,
    until,
)
from tests.unit.engine.chat_fixtures import CHATML, tiny_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

PROMPT = prompt(0)
SEATS = 32
NO_TRAINER: Any = SimpleNamespace(register=lambda *_: None)
"""Where nothing is trained."""


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, stop_token_ids=())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampler(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sampler]:
    root = tmp_path_factory.mktemp("v") / "root"
    async with running_sampler(sampler_config(model, root, max_num_seqs=SEATS, max_queued=6000)) as running:
        yield running


class Crowd:
    """Requests of one tenant for one sample each; its name goes into `everybody` as each ends."""

    def __init__(self, sampler: Sampler, tenant: str, everybody: list[str] | None = None) -> None:
        self.tenant = tenant
        self.ended = 0
        self._sampler = sampler
        self._everybody = everybody if everybody is not None else []
        self._lease = sampler.lease(tenant)
        self.tasks: list[asyncio.Task[tuple[int, ...]]] = []

    def ask(self, ids: list[int], params: SamplingParams) -> None:
        self.tasks.append(asyncio.create_task(self._one(ids, params)))

    async def _one(self, ids: list[int], params: SamplingParams) -> tuple[int, ...]:
        (sample,) = await self._sampler.sample(self._lease, ids, 1, params)
        self.ended += 1
        self._everybody.append(self.tenant)
        return sample.ids

    async def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self.tasks, return_exceptions=True):
            assert not isinstance(outcome, Exception) or isinstance(outcome, SamplerRestarted), outcome
        self._lease.release()


async def leave(sampler: Sampler, *tenants: str) -> None:
    """The tenants go, and nothing of them stays."""
    for tenant in tenants:
        sampler.drop(tenant)
    await until(lambda: sampler.stats().free_slots == sampler.config.slots)
    assert sampler._gate.tenants == frozenset()
    stats = sampler.stats()
    assert (stats.gate.taken, stats.gate.queued) == (0, 0)
    await until(lambda: (sampler.stats().running, sampler.stats().waiting) == (0, 0))


async def test_four_short_requests_beside_five_thousand_wait_for_nobody(sampler: Sampler) -> None:
    for seed, tenant in enumerate(("many", "few")):
        await publish(sampler, Version(tenant, 0), seed=seed)
        sampler.register(tenant, 100, 10_000)
    order: list[str] = []
    many, few = Crowd(sampler, "many", order), Crowd(sampler, "few", order)
    draw = random.Random(0)
    for _ in range(5000):
        many.ask(PROMPT, greedy(draw.randint(24, 64)))
    await until(lambda: many.ended >= 40)
    assert sampler.stats().gate.taken == 24, "a quarter of the seats is set aside for who has none"
    before = len(order)
    for _ in range(4):
        few.ask(PROMPT, greedy(8))
    await asyncio.gather(*few.tasks)
    # The few take 8 steps; none of the 24 that ran can have ended twice, for each takes 24 steps or more.
    assert order[before:].count("many") <= 24
    assert sampler.stats().waiting == 0, "vLLM's own queue stays empty"
    assert sampler.stats().gate.queued > 4000
    await many.cancel()
    await few.cancel()
    await leave(sampler, "many", "few")


async def test_tokens_follow_the_weights_of_experiments_also_when_they_change(sampler: Sampler, tmp_path: Path) -> None:
    """The light one is an experiment as the control API makes them, whose weight is PUT anew under full queues."""
    config = EngineConfig(model=str(sampler.config.model), storage=tmp_path, token_file=tmp_path / "token")
    services = Services(config, NO_TRAINER, sampler, tiny_tokenizer(CHATML))

    def desired(weight: int) -> DesiredExperiment:
        return DesiredExperiment.model_validate(
            {"uid": "light", "namespace": "team", "name": "light", "spec": rl_spec(weight=weight)}
        )

    experiment = Experiment(desired(100), services, 1, lambda: None)
    experiment._tell_work_left(await experiment._plan_now())
    sampler.register("heavy", 300, 10_000)
    for seed, tenant in enumerate(("light", "heavy")):
        await publish(sampler, Version(tenant, 0), seed=seed)
    light, heavy = Crowd(sampler, "light"), Crowd(sampler, "heavy")
    for _ in range(1500):
        light.ask(PROMPT, greedy(16))
        heavy.ask(PROMPT, greedy(16))
    await until(lambda: light.ended + heavy.ended >= 400)
    first = (light.ended, heavy.ended)
    assert first[1] / first[0] == pytest.approx(3, rel=0.25)
    experiment.update(desired(900))
    await until(lambda: light.ended + heavy.ended >= 800)
    assert (light.ended - first[0]) / (heavy.ended - first[1]) == pytest.approx(3, rel=0.25)
    await light.cancel()
    await heavy.cancel()
    await leave(sampler, "light", "heavy")


async def test_shortest_remaining_serves_less_work_first(model: Path, tmp_path: Path) -> None:
    config = sampler_config(model, tmp_path / "root", max_num_seqs=4, scheduling=Scheduling.SHORTEST_REMAINING)
    async with running_sampler(config) as sampler:
        for seed, (tenant, work) in enumerate((("long", 100_000), ("short", 200))):
            await publish(sampler, Version(tenant, 0), seed=seed)
            sampler.register(tenant, 100, work)
        order: list[str] = []
        long, short = Crowd(sampler, "long", order), Crowd(sampler, "short", order)
        for _ in range(40):
            long.ask(PROMPT, greedy(16))
        await until(lambda: long.ended >= 3)
        before = len(order)
        for _ in range(12):
            short.ask(PROMPT, greedy(16))
        await asyncio.gather(*short.tasks)
        # three of four seats are short's as soon as those that ran on them have ended: 12 in four turns
        assert order[before:].count("long") <= 3 + 4 + 1
        await asyncio.gather(*long.tasks)
        await long.cancel()
        await short.cancel()
        await leave(sampler, "long", "short")


async def test_cancelling_frees_seats_and_places_in_the_queue(sampler: Sampler, model: Path) -> None:
    directory = await publish(sampler, Version("e", 0), seed=1)
    sampler.register("e", 100, 1000)
    with sampler.lease("e") as lease:
        running = asyncio.ensure_future(sampler.sample(lease, PROMPT, SEATS, greedy(480)))
        await until(lambda: sampler.stats().running == SEATS)
        waiting = asyncio.ensure_future(sampler.sample(lease, PROMPT, 3, GREEDY))
        next_one = asyncio.ensure_future(sampler.sample(lease, PROMPT, 2, GREEDY))
        await until(lambda: sampler.stats().gate.queued == 5)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert sampler.stats().gate.queued == 2
        with pytest.raises(CapacityError, match=r"lower environment\.concurrency") as caught:
            await sampler.sample(lease, PROMPT, 6000, GREEDY)
        assert caught.value.reason == "SamplerQueueFull"
        assert not next_one.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert {s.ids for s in await next_one} == set(Judge(model).greedy(directory, [PROMPT], GREEDY.max_tokens))
    await leave(sampler, "e")


async def test_a_core_that_dies_takes_along_what_it_held_and_nothing_that_waits(model: Path, tmp_path: Path) -> None:
    judge = Judge(model)
    async with running_sampler(sampler_config(model, tmp_path / "root", max_num_seqs=4)) as sampler:
        directories = {t: await publish(sampler, Version(t, 0), seed=i) for i, t in enumerate(("a", "b"))}
        for tenant in directories:
            sampler.register(tenant, 100, 1000)
        crowds = [Crowd(sampler, tenant) for tenant in directories]
        for crowd in crowds:
            for _ in range(2):
                crowd.ask(PROMPT, greedy(480))
        await until(lambda: sampler.stats().running == 4)
        for crowd in crowds:
            for _ in range(20):
                crowd.ask(PROMPT, GREEDY)
        await until(lambda: sampler.stats().gate.queued == 40)
        kill_core()
        for crowd in crowds:
            right = judge.greedy(directories[crowd.tenant], [PROMPT], GREEDY.max_tokens)[0]
            outcomes = await asyncio.gather(*crowd.tasks, return_exceptions=True)
            assert all(isinstance(outcome, SamplerRestarted) for outcome in outcomes[:2])
            assert outcomes[2:] == [right] * 20
            await crowd.cancel()
        assert sampler.stats().generation == 2
        assert sampler.stats().gate.granted == 4 + 40
        await leave(sampler, *directories)


async def test_who_waits_or_runs_for_too_long_is_given_up_alone(model: Path, tmp_path: Path) -> None:
    config = sampler_config(
        model, tmp_path / "root", max_num_seqs=4, max_model_len=1024,
        queue_timeout_seconds=0.05, request_timeout_seconds=0.4,
    )  # fmt: skip
    async with running_sampler(config) as sampler:
        hung = asyncio.ensure_future(sampler.sample(None, PROMPT, 4, greedy(1000)))
        busy = asyncio.ensure_future(sampler.sample(None, PROMPT, 1, GREEDY))
        with pytest.raises(TransientError, match=r"begun no sequence for 0\.05 s") as caught:
            await busy
        assert caught.value.reason == "SamplerBusy"
        with pytest.raises(TransientError, match=r"more than 0\.4 s; it was aborted") as caught:
            await hung
        assert caught.value.reason == "SamplerTimeout"
        assert not isinstance(caught.value, SamplerRestarted)
        await leave(sampler)
        assert len(await sampler.sample(None, PROMPT, 4, greedy(1))) == 4
        assert sampler.stats().generation == 1


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
async def test_when_the_kv_cache_runs_out_what_is_above_its_share_gives_way_and_answers_as_ever(
    model: Path, tmp_path: Path, seeded: bool
) -> None:
    """8 sequences that grow to 7 blocks each, in a cache of 24 blocks (3 layers, 2 heads of 32, keys and values)."""
    block = 32 * 3 * 2 * 2 * 32 * 4
    small = sampler_config(model, tmp_path / "root", max_num_seqs=8, kv_cache_bytes=24 * block)
    prompts = [prompt(seed) for seed in range(8)]

    def params(i: int) -> SamplingParams:
        return SamplingParams(1.0, 180, (), seed=i) if seeded else greedy(180)

    async with running_sampler(small) as sampler:
        for seed, tenant in enumerate("ab"):
            await publish(sampler, Version(tenant, 0), seed=seed)
            sampler.register(tenant, 100, 1000)
        order: list[str] = []
        above, below = Crowd(sampler, "a", order), Crowd(sampler, "b", order)
        for i in range(6):
            above.ask(prompts[i], params(i))
        await until(lambda: sampler.stats().running == 6)
        for i in range(6, 8):
            below.ask(prompts[i], params(i))
        await until(lambda: sampler.stats().running == 8)
        await until(lambda: sampler.stats().waiting > 0)  # preempted: all eight were running
        crowded = [await task for task in above.tasks + below.tasks]
        assert order[-2:] == ["a", "a"], "the two above a's share of four"

        alone = []
        for i, ids in enumerate(prompts):
            with sampler.lease("a" if i < 6 else "b") as lease:
                (sample,) = await sampler.sample(lease, ids, 1, params(i))
            alone.append(sample.ids)
        assert crowded == alone
        assert sampler.stats().generation == 1
        await above.cancel()
        await below.cancel()
        await leave(sampler, "a", "b")
