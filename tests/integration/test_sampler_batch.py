"""What is sampled: base model and adapters side by side, against Hugging Face and PEFT."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from clora_engine.errors import UserError
from clora_engine.sampler import Sampler
from clora_engine.types import Sample, SamplingParams, Version
from tests.sampler_fixtures import GREEDY, Judge, prompt, publish, running_sampler, sampler_config, until

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

HALF: Any = 1.5
"""A number where an integer is due, as a caller without types may pass it."""
PROMPTS = [prompt(seed) for seed in range(4)]
TENANTS: dict[str, dict[str, Any]] = {
    "a": {"seed": 1, "rank": 8},
    "b": {"seed": 2, "rank": 3},
    "c": {"seed": 3, "rank": 1, "strength": 1.0, "modules": ["q_proj", "v_proj", "up_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def judge(model: Path) -> Judge:
    return Judge(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampler(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sampler]:
    async with running_sampler(sampler_config(model, tmp_path_factory.mktemp("v") / "root")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapters(sampler: Sampler) -> dict[str, Path]:
    """All slots full: three tenants of three ranks, one of them on some layers only."""
    return {name: await publish(sampler, Version(name, 0), **tenant) for name, tenant in TENANTS.items()}


async def ask(sampler: Sampler, tenant: str | None, params: SamplingParams = GREEDY) -> list[Sample]:
    """One sample of every prompt."""
    if tenant is None:
        return [sample for (sample,) in await asyncio.gather(*(sampler.sample(None, p, 1, params) for p in PROMPTS))]
    with sampler.lease(tenant) as lease:
        return [s for (s,) in await asyncio.gather(*(sampler.sample(lease, p, 1, params) for p in PROMPTS))]


async def test_base_and_adapters_in_one_batch_answer_as_peft_does_alone(
    sampler: Sampler, adapters: dict[str, Path], judge: Judge
) -> None:
    expected: dict[str | None, list[tuple[int, ...]]] = {None: judge.greedy(None, PROMPTS, GREEDY.max_tokens)}
    expected |= {name: judge.greedy(path, PROMPTS, GREEDY.max_tokens) for name, path in adapters.items()}
    for one, other in combinations(expected.values(), 2):  # strong enough that a mix-up shows at once
        assert all(a[:4] != b[:4] for a, b in zip(one, other, strict=True))
    assert sampler.stats().free_slots == 0

    answers = await asyncio.gather(*(ask(sampler, tenant) for tenant in expected))

    for (tenant, right), answer in zip(expected.items(), answers, strict=True):
        assert [sample.ids for sample in answer] == right, tenant
    for tenant, answer in zip(expected, answers, strict=True):
        alone = await ask(sampler, tenant)
        assert [sample.ids for sample in alone] == [sample.ids for sample in answer]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
async def test_logprobs_are_those_of_peft_at_the_sampling_temperature(
    sampler: Sampler, adapters: dict[str, Path], judge: Judge, temperature: float
) -> None:
    """At temperature 0 they are those of the model's own distribution (temperature 1)."""
    params = SamplingParams(temperature=temperature, max_tokens=12, stop_token_ids=(), seed=1)
    answers = await asyncio.gather(*(ask(sampler, tenant, params) for tenant in (None, *adapters)))
    for path, answer in zip((None, *adapters.values()), answers, strict=True):
        for ids, sample in zip(PROMPTS, answer, strict=True):
            right = judge.logprobs(path, ids, sample.ids, temperature or 1.0)
            torch.testing.assert_close(torch.tensor(sample.logprobs), right, atol=1e-3, rtol=0)


async def test_samples_of_one_prompt_differ_and_a_seed_brings_them_back(
    sampler: Sampler, adapters: dict[str, Path]
) -> None:
    """Beside other requests, and with a prompt as long as vLLM would otherwise cut in pieces."""
    params = SamplingParams(temperature=1.0, max_tokens=8, stop_token_ids=(), seed=7)
    long = prompt(9, 480)
    with sampler.lease("a") as lease:
        crowd = [asyncio.ensure_future(sampler.sample(None, prompt(i, 450), 4, params)) for i in range(20, 26)]
        first = await sampler.sample(lease, long, 4, params)
        await asyncio.gather(*crowd)
        second = await sampler.sample(lease, long, 4, params)
    assert len({sample.ids for sample in first}) == 4
    assert [sample.ids for sample in first] == [sample.ids for sample in second]


async def test_a_group_shares_its_prompt_and_a_second_turn_finds_the_first(
    sampler: Sampler, adapters: dict[str, Path]
) -> None:
    first = prompt(31, 96)
    with sampler.lease("b") as lease:
        before = sampler.stats()
        (sample, *_) = await sampler.sample(lease, first, 4, GREEDY)
        after = sampler.stats()
        assert after.prompt_tokens - before.prompt_tokens == 4 * 96
        assert after.cached_tokens - before.cached_tokens >= 3 * 64
        second = [*first, *sample.ids, *prompt(32, 40)]
        await sampler.sample(lease, second, 1, GREEDY)
        assert sampler.stats().cached_tokens - after.cached_tokens >= 96
    with sampler.lease("a") as other:
        before = sampler.stats()
        await sampler.sample(other, first, 1, GREEDY)
        assert sampler.stats().cached_tokens == before.cached_tokens  # nothing of another tenant's


async def test_stop_tokens_end_a_sample_and_belong_to_it(sampler: Sampler) -> None:
    ((whole,),) = [await sampler.sample(None, PROMPTS[0], 1, GREEDY)]
    assert whole.truncated
    assert len(whole.ids) == GREEDY.max_tokens
    stop = whole.ids[5]
    at = whole.ids.index(stop) + 1
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,))
    (sample,) = await sampler.sample(None, PROMPTS[0], 1, params)
    assert sample.ids == whole.ids[:at]
    assert len(sample.logprobs) == at
    assert not sample.truncated


async def test_the_context_ends_a_sample(sampler: Sampler) -> None:
    (sample,) = await sampler.sample(None, prompt(1, 505), 1, GREEDY)
    assert sample.truncated
    assert len(sample.ids) == 512 - 505


@pytest.mark.parametrize(
    ("ids", "n", "params", "match"),
    [
        (prompt(0, 512), 1, GREEDY, "512 tokens leaves no room in a context of 512"),
        ([], 1, GREEDY, "0 tokens"),
        ([1, 512], 1, GREEDY, r"\[0, 512\)"),
        ([1, -1], 1, GREEDY, r"\[0, 512\)"),
        ([1], 0, GREEDY, "at least 1"),
        ([1], 1, SamplingParams(temperature=1.0, max_tokens=0, stop_token_ids=()), "at least 1"),
        ([1], 1, SamplingParams(temperature=0.001, max_tokens=4, stop_token_ids=()), "temperature 0.001"),
        ([1], 1, SamplingParams(temperature=float("nan"), max_tokens=4, stop_token_ids=()), "temperature nan"),
        ([1], 1, SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(9999,)), "stop"),
        # what vLLM's core can't decode would end the thread that all its requests come through
        ([1, HALF], 1, GREEDY, "ids must be integers"),
        ([True], 1, GREEDY, "ids must be integers"),
        ([1], HALF, GREEDY, "integers of at least 1"),
        ([1], 1, SamplingParams(temperature=1.0, max_tokens=HALF, stop_token_ids=()), "integers of at least 1"),
        ([1], 1, SamplingParams(temperature=1.0, max_tokens=2**70, stop_token_ids=()), "at most"),
        ([1], 1, SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(HALF,)), "stop token ids"),
        ([1], 1, SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(), seed=-1), "seed"),
        ([1], 2, SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(), seed=2**63 - 1), "seed"),
    ],
)
async def test_an_impossible_request_fails_alone(
    sampler: Sampler, ids: list[int], n: int, params: SamplingParams, match: str
) -> None:
    beside = asyncio.ensure_future(sampler.sample(None, PROMPTS[0], 1, GREEDY))
    with pytest.raises(UserError, match=match):
        await sampler.sample(None, ids, n, params)
    ((sample,), generation) = (await beside, sampler.stats().generation)
    assert len(sample.ids) == GREEDY.max_tokens
    assert generation == 1


async def test_a_cancelled_request_is_aborted(sampler: Sampler, adapters: dict[str, Path]) -> None:
    endless = SamplingParams(temperature=1.0, max_tokens=490, stop_token_ids=())
    with sampler.lease("c") as lease:
        task = asyncio.ensure_future(sampler.sample(lease, PROMPTS[0], 8, endless))
        await until(lambda: sampler.stats().running == 8)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(version.in_flight == 0 for version in sampler.stats().versions)
        (sample,) = await sampler.sample(lease, PROMPTS[0], 1, GREEDY)
        await until(lambda: sampler.stats().running == 0)
    assert len(sample.ids) == GREEDY.max_tokens
