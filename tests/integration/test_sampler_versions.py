"""Versions on the real vLLM: publishing while others decode, leases, full slots, adapters that must be refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from clora_engine.errors import CapacityError, EngineError, UserError
from clora_engine.peft_files import CONFIG_FILE, WEIGHTS_FILE
from clora_engine.sampler import Sampler
from clora_engine.sampler_core import Adapter
from clora_engine.types import SamplingParams, Version
from tests.sampler_fixtures import (
    GREEDY,
    Judge,
    prompt,
    publish,
    running_sampler,
    sampler_config,
    until,
    write_adapter,
)

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

LONG = SamplingParams(temperature=0.0, max_tokens=120, stop_token_ids=())
PROMPT = prompt(0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sampler]:
    async with running_sampler(sampler_config(model, tmp_path_factory.mktemp("v") / "root")) as sampler:
        yield sampler


@pytest_asyncio.fixture(loop_scope="module")
async def sampler(running: Sampler) -> AsyncIterator[Sampler]:
    """The module's sampler, empty before and after."""
    yield running
    for version in running.stats().versions:
        running.drop(version.version.experiment)
    await until(lambda: running.stats().free_slots == 3 and not any(running.config.versions_root.iterdir()))
    assert running.stats().generation == 1


async def test_groups_in_flight_keep_their_version_and_new_ones_get_the_next(sampler: Sampler, model: Path) -> None:
    judge = Judge(model)
    old = await publish(sampler, Version("e", 0), seed=1)
    (old_answer,) = judge.greedy(old, [PROMPT], LONG.max_tokens)
    with sampler.lease("e") as first:
        turns = [asyncio.ensure_future(sampler.sample(first, PROMPT, 4, LONG)) for _ in range(2)]
        await until(lambda: sampler.stats().running == 8)
        new = await publish(sampler, Version("e", 1), seed=2, rank=4)
        assert not any(turn.done() for turn in turns)
        assert first.version == Version("e", 0)
        with sampler.lease("e") as second:
            assert second.version == Version("e", 1)
            (sample,) = await sampler.sample(second, PROMPT, 1, GREEDY)
            assert [sample.ids] == judge.greedy(new, [PROMPT], GREEDY.max_tokens)
            assert sample.ids[:4] != old_answer[:4]
            for samples in await asyncio.gather(*turns):
                assert {s.ids for s in samples} == {old_answer}
            (later,) = await sampler.sample(first, PROMPT, 1, GREEDY)
            assert later.ids == old_answer[: GREEDY.max_tokens]
        assert old.exists()
    await until(lambda: not old.exists())
    assert [v.version for v in sampler.stats().versions] == [Version("e", 1)]
    with pytest.raises(EngineError, match="was released"):
        await sampler.sample(first, PROMPT, 1, GREEDY)


async def test_a_dropped_experiment_goes_when_its_last_lease_is_given_back(sampler: Sampler, model: Path) -> None:
    directory = await publish(sampler, Version("e", 0), seed=1)
    (right,) = Judge(model).greedy(directory, [PROMPT], GREEDY.max_tokens)
    lease = sampler.lease("e")
    sampler.drop("e")
    with pytest.raises(EngineError, match="no version") as caught:
        sampler.lease("e")
    assert caught.value.reason == "NoVersion"
    (sample,) = await sampler.sample(lease, PROMPT, 1, GREEDY)
    assert sample.ids == right
    lease.release()
    lease.release()
    await until(lambda: not directory.exists())


async def test_a_lease_given_back_under_a_request_waits_for_the_request(sampler: Sampler, model: Path) -> None:
    directory = await publish(sampler, Version("e", 0), seed=1)
    (right,) = Judge(model).greedy(directory, [PROMPT], LONG.max_tokens)
    lease = sampler.lease("e")
    request = asyncio.ensure_future(sampler.sample(lease, PROMPT, 1, LONG))
    await until(lambda: sampler.stats().running == 1)
    sampler.drop("e")
    lease.release()
    ((sample,), stayed) = (await request, directory.exists())
    assert sample.ids == right
    assert stayed
    await until(lambda: not directory.exists())


async def test_publishing_waits_for_a_leased_slot_and_evicts_nobody(sampler: Sampler, model: Path) -> None:
    judge = Judge(model)
    other = await publish(sampler, Version("f", 0), seed=9)
    first = await publish(sampler, Version("e", 0), seed=1)
    lease = sampler.lease("e")
    await publish(sampler, Version("e", 1), seed=2)
    waiting = asyncio.ensure_future(publish(sampler, Version("e", 2), seed=3))
    with sampler.lease("f") as beside:
        for held, directory in ((lease, first), (beside, other)):
            (sample,) = await sampler.sample(held, PROMPT, 1, GREEDY)
            assert [sample.ids] == judge.greedy(directory, [PROMPT], GREEDY.max_tokens)
    assert sampler.stats().free_slots == 0
    assert not waiting.done()
    lease.release()
    third = await waiting
    with sampler.lease("e") as newest:
        (sample,) = await sampler.sample(newest, PROMPT, 1, GREEDY)
    assert [sample.ids] == judge.greedy(third, [PROMPT], GREEDY.max_tokens)


async def test_a_waiting_publish_can_be_cancelled(sampler: Sampler) -> None:
    await publish(sampler, Version("f", 0), seed=9)
    await publish(sampler, Version("e", 0), seed=1)
    with sampler.lease("e"):
        await publish(sampler, Version("e", 1), seed=2)
        directory = write_adapter(sampler.new_directory(), sampler.config.model, seed=3)
        waiting = asyncio.ensure_future(sampler.publish(Version("e", 2), directory))
        await sampler.sample(None, PROMPT, 1, GREEDY)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not directory.exists()
        with sampler.lease("e") as lease:
            assert lease.version == Version("e", 1)


async def test_full_of_latest_versions_is_an_error_at_once(sampler: Sampler) -> None:
    for experiment in "efg":
        await publish(sampler, Version(experiment, 0), seed=1)
    directory = write_adapter(sampler.new_directory(), sampler.config.model, seed=2)
    with pytest.raises(CapacityError, match="all 3 sampler slots"):
        await sampler.publish(Version("h", 0), directory)
    assert not directory.exists()


def edit(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / CONFIG_FILE).read_text())
    (directory / CONFIG_FILE).write_text(json.dumps(config | changes))


def poison(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS_FILE)
    tensors[next(iter(tensors))][0, 0] = float("nan")
    save_file(tensors, directory / WEIGHTS_FILE)


def rename(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS_FILE)
    save_file({k.replace("q_proj", "x_proj"): v for k, v in tensors.items()}, directory / WEIGHTS_FILE)


def pickle(directory: Path) -> None:
    torch.save(load_file(directory / WEIGHTS_FILE), directory / "adapter_model.bin")
    (directory / WEIGHTS_FILE).unlink()


def foreign(directory: Path) -> None:
    """Made for a base model with the same layers, but wider ones."""
    tensors = load_file(directory / WEIGHTS_FILE)
    save_file({name: torch.cat([tensor, tensor], -1) for name, tensor in tensors.items()}, directory / WEIGHTS_FILE)


def truncate(directory: Path) -> None:
    (directory / WEIGHTS_FILE).write_bytes((directory / WEIGHTS_FILE).read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (shutil.rmtree, "not a directory"),
        (truncate, "truncated"),
        (poison, "not finite"),
        (rename, "no linear layer"),
        (pickle, "never pickles"),
        (lambda d: edit(d, r=16), "rank 16 is above"),
        (lambda d: edit(d, r=4), "has shape"),
        (lambda d: edit(d, use_dora=True), "use_dora"),
        (lambda d: edit(d, modules_to_save=["lm_head"]), "modules_to_save"),
        (foreign, "has shape"),
    ],
)
async def test_a_bad_adapter_is_refused_and_nothing_else_changes(
    sampler: Sampler, model: Path, spoil: Callable[[Path], Any], match: str
) -> None:
    good = await publish(sampler, Version("e", 0), seed=1)
    bad = write_adapter(sampler.new_directory(), model, seed=2)
    spoil(bad)
    with sampler.lease("e") as lease:
        beside = [asyncio.ensure_future(sampler.sample(held, PROMPT, 1, LONG)) for held in (lease, None)]
        await until(lambda: sampler.stats().running == 2)
        with pytest.raises(UserError, match=match) as caught:
            await sampler.publish(Version("e", 1), bad)
        answers = await asyncio.gather(*beside)
    assert caught.value.reason == "InvalidAdapter"
    assert not bad.exists()
    judge = Judge(model)
    for directory, (sample,) in zip((good, None), answers, strict=True):
        assert [sample.ids] == judge.greedy(directory, [PROMPT], LONG.max_tokens)
    with sampler.lease("e") as lease:
        assert lease.version == Version("e", 0)


async def test_what_vllm_itself_refuses_leaves_the_core_alive(sampler: Sampler, model: Path) -> None:
    """Past clora's own check, as if the files vanished in between."""
    core = await sampler._supervisor.running()
    with pytest.raises(EngineError, match="could not load gone#77") as caught:
        await core.load(Adapter("gone#77", 77, sampler.config.versions_root / "gone"))
    assert caught.value.reason == "InvalidAdapter"
    (sample,) = await sampler.sample(None, PROMPT, 1, GREEDY)
    assert [sample.ids] == Judge(model).greedy(None, [PROMPT], GREEDY.max_tokens)


async def test_an_adapter_that_overflows_fails_alone(sampler: Sampler, model: Path) -> None:
    """Past clora's own check, which refuses such weights: the rows beside it in the batch must not notice."""
    good = await publish(sampler, Version("e", 0), seed=1)
    bad = write_adapter(sampler.new_directory(), model, seed=2)
    tensors = load_file(bad / WEIGHTS_FILE)
    save_file({name: tensor.fill_(1e37) for name, tensor in tensors.items()}, bad / WEIGHTS_FILE)
    core = await sampler._supervisor.running()
    mad = Adapter("mad#78", 78, bad)
    await core.load(mad)
    try:
        with sampler.lease("e") as lease:
            lost, kept, base = await asyncio.gather(
                core.generate(PROMPT, LONG, mad, rank=0, seed=None),
                sampler.sample(lease, PROMPT, 4, LONG),
                sampler.sample(None, PROMPT, 4, LONG),
                return_exceptions=True,
            )
    finally:
        await core.unload(78)
        shutil.rmtree(bad)
    judge = Judge(model)
    assert isinstance(lost, EngineError)
    assert lost.reason == "AdapterDiverged"
    for path, samples in ((good, kept), (None, base)):
        assert not isinstance(samples, BaseException)
        assert [sample.ids for sample in samples] == judge.greedy(path, [PROMPT], LONG.max_tokens) * 4


async def test_a_directory_outside_the_root_is_not_touched(sampler: Sampler, model: Path, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "a", model, seed=1)
    with pytest.raises(EngineError, match="versions root"):
        await sampler.publish(Version("e", 0), outside)
    assert outside.exists()
