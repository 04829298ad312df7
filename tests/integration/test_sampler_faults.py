"""One tenant does things wrong, or in odd orders, on purpose or not: nobody else may notice, and nothing is left."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from clora_engine.errors import EngineError
from clora_engine.sampler import Sampler
from clora_engine.sampler_core import Adapter, SamplerCore
from clora_engine.types import SamplingParams, Version
from clora_engine.versions import State
from tests.isolation_run import Traffic, drive, isolation_config, judge
from tests.sampler_fixtures import (
    GREEDY,
    Judge,
    kill_core,
    prompt,
    publish,
    running_sampler,
    sampler_config,
    until,
    write_adapter,
)

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

LONG = SamplingParams(temperature=0.0, max_tokens=200, stop_token_ids=())
PROMPT = prompt(0)
SLOTS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sampler]:
    config = sampler_config(model, tmp_path_factory.mktemp("v") / "root", slots=SLOTS)
    async with running_sampler(config) as sampler:
        yield sampler


@pytest_asyncio.fixture(loop_scope="module")
async def sampler(running: Sampler) -> AsyncIterator[Sampler]:
    """The module's sampler; afterwards it must hold nothing."""
    yield running
    for version in running.stats().versions:
        running.drop(version.version.experiment)
    await until(lambda: running.stats().free_slots == SLOTS and not any(running.config.versions_root.iterdir()))


@asynccontextmanager
async def bystanders(sampler: Sampler) -> AsyncIterator[None]:
    """Another tenant's and the base model's requests in flight meanwhile: they must get what is theirs."""
    judge = Judge(sampler.config.model)
    directory = await publish(sampler, Version("bystander", 0), seed=99)
    right = [judge.greedy(path, [PROMPT], LONG.max_tokens) * 2 for path in (directory, None)]
    generation = sampler.stats().generation
    with sampler.lease("bystander") as lease:
        requests = [asyncio.ensure_future(sampler.sample(held, PROMPT, 2, LONG)) for held in (lease, None)]
        await until(lambda: sampler.stats().running == 4)
        yield
        answers = await asyncio.gather(*requests)
    assert [[sample.ids for sample in samples] for samples in answers] == right
    assert sampler.stats().generation == generation


def versions(sampler: Sampler, experiment: str) -> list[Version]:
    return [stats.version for stats in sampler.stats().versions if stats.version.experiment == experiment]


async def test_a_version_that_is_gone_is_an_error_of_whoever_asks(sampler: Sampler) -> None:
    async with bystanders(sampler):
        await publish(sampler, Version("e", 0), seed=1)
        lease = sampler.lease("e")
        lease.release()
        with pytest.raises(EngineError, match="was released"):
            await sampler.sample(lease, PROMPT, 1, GREEDY)
        sampler.drop("e")
        with pytest.raises(EngineError, match="no version"):
            sampler.lease("e")


async def test_an_experiment_dropped_while_it_publishes_is_gone(sampler: Sampler, model: Path) -> None:
    """A detach that comes while the last publish is under way must not leave a version that nobody ever drops."""
    async with bystanders(sampler):
        for turns in range(6):  # at whatever point of the publish
            directory = write_adapter(sampler.new_directory(), model, seed=1)
            publishing = asyncio.ensure_future(sampler.publish(Version("e", turns), directory))
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            sampler.drop("e")
            with pytest.raises(EngineError, match="was dropped") as caught:
                await publishing
            assert caught.value.reason == "Dropped"
            with pytest.raises(EngineError, match="no version"):
                sampler.lease("e")
            await until(lambda: not versions(sampler, "e"))
            assert not directory.exists()


async def test_an_experiment_dropped_while_its_publish_waits_for_a_slot_waits_no_longer(
    sampler: Sampler, model: Path
) -> None:
    held = []
    for step in range(SLOTS):
        await publish(sampler, Version("f", step), seed=step)
        held.append(sampler.lease("f"))
    directory = write_adapter(sampler.new_directory(), model, seed=1)
    publishing = asyncio.ensure_future(sampler.publish(Version("e", 0), directory))
    await sampler.sample(None, PROMPT, 1, GREEDY)
    assert not publishing.done()
    sampler.drop("e")
    with pytest.raises(EngineError, match="was dropped"):
        await publishing
    assert not directory.exists()
    for lease in held:
        lease.release()


async def test_of_two_publishes_at_once_the_later_is_the_latest(sampler: Sampler, model: Path) -> None:
    """However much longer the earlier takes to load."""
    large = write_adapter(sampler.new_directory(), model, seed=1, rank=8)
    small = write_adapter(sampler.new_directory(), model, seed=2, rank=1, modules=["q_proj"], strength=4.0)
    async with bystanders(sampler):
        await asyncio.gather(sampler.publish(Version("e", 1), large), sampler.publish(Version("e", 2), small))
        with sampler.lease("e") as lease:
            assert lease.version == Version("e", 2)
            (sample,) = await sampler.sample(lease, PROMPT, 1, GREEDY)
        assert [sample.ids] == Judge(model).greedy(small, [PROMPT], GREEDY.max_tokens)
        await until(lambda: versions(sampler, "e") == [Version("e", 2)])


async def test_a_directory_that_is_in_use_is_refused_and_stays(sampler: Sampler, model: Path) -> None:
    directory = await publish(sampler, Version("e", 0), seed=1)
    with pytest.raises(EngineError, match="another version"):
        await sampler.publish(Version("f", 0), directory)
    assert directory.exists()
    assert versions(sampler, "f") == []


async def test_nothing_above_the_root_is_touched(sampler: Sampler) -> None:
    root = sampler.config.versions_root
    (root.parent / "treasure").touch()
    with pytest.raises(EngineError, match="not directly below"):
        await sampler.publish(Version("e", 0), root / "..")
    assert (root.parent / "treasure").exists()


async def test_thousands_of_leases_are_no_burden_to_others(sampler: Sampler) -> None:
    directory = await publish(sampler, Version("e", 0), seed=1)
    async with bystanders(sampler):
        leases = [sampler.lease("e") for _ in range(5000)]
        await publish(sampler, Version("e", 1), seed=2)
        for lease in leases[1:]:
            lease.release()
        await sampler.sample(leases[0], PROMPT, 1, GREEDY)
        assert directory.exists()
        leases[0].release()
        await until(lambda: not directory.exists())


async def test_cancelling_at_any_moment_and_twice_leaves_no_request_behind(sampler: Sampler) -> None:
    """A request that vLLM still works on after its version was unloaded would bring that version back."""
    async with bystanders(sampler):
        for turns in range(12):
            await publish(sampler, Version("e", turns), seed=turns)
            with sampler.lease("e") as lease:
                task = asyncio.ensure_future(sampler.sample(lease, PROMPT, 3, LONG))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            sampler.drop("e")
            await until(lambda: not versions(sampler, "e"))
    await until(lambda: sampler.stats().running == 0)


async def test_an_adapter_that_kills_the_core_is_refused_before_the_sampler_gives_up(
    sampler: Sampler, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = SamplerCore.load

    async def deadly(core: SamplerCore, adapter: Adapter) -> None:
        if adapter.name.startswith("guilty@"):
            kill_core()
        await load(core, adapter)

    monkeypatch.setattr(SamplerCore, "load", deadly)
    generation = sampler.stats().generation
    await publish(sampler, Version("innocent", 0), seed=1)
    guilty, innocent = (write_adapter(sampler.new_directory(), model, seed=seed) for seed in (2, 3))
    outcome = await asyncio.gather(
        sampler.publish(Version("guilty", 0), guilty),
        sampler.publish(Version("innocent", 1), innocent),
        return_exceptions=True,
    )
    assert isinstance(outcome[0], EngineError)
    assert "died twice" in str(outcome[0])
    assert outcome[1] is None
    with sampler.lease("innocent") as lease:
        assert lease.version == Version("innocent", 1)
        (sample,) = await sampler.sample(lease, PROMPT, 1, GREEDY)
    assert [sample.ids] == Judge(model).greedy(innocent, [PROMPT], GREEDY.max_tokens)
    assert sampler.stats().generation == generation + 2
    await until(lambda: not guilty.exists())


async def test_what_is_asked_for_while_there_is_no_core_is_done_when_there_is(sampler: Sampler, model: Path) -> None:
    judge = Judge(model)
    kept = await publish(sampler, Version("kept", 0), seed=1)
    dropped = await publish(sampler, Version("dropped", 0), seed=2)
    kill_core()
    await until(lambda: not sampler.stats().up)
    lease = sampler.lease("kept")
    held = sampler.lease("dropped")
    sampler.drop("dropped")
    next_version = asyncio.ensure_future(publish(sampler, Version("kept", 1), seed=3))
    gone = asyncio.ensure_future(publish(sampler, Version("gone", 0), seed=4))
    cancelled = asyncio.ensure_future(sampler.sample(held, PROMPT, 2, GREEDY))
    await asyncio.sleep(0)
    sampler.drop("gone")
    cancelled.cancel()
    held.release()
    (sample,) = await sampler.sample(lease, PROMPT, 1, GREEDY)
    assert [sample.ids] == judge.greedy(kept, [PROMPT], GREEDY.max_tokens)
    newest = await next_version
    lease.release()
    with sampler.lease("kept") as later:
        (sample,) = await sampler.sample(later, PROMPT, 1, GREEDY)
    assert [sample.ids] == judge.greedy(newest, [PROMPT], GREEDY.max_tokens)
    with pytest.raises(EngineError, match="was dropped"):
        await gone
    await until(lambda: [(v.version, v.state) for v in sampler.stats().versions] == [(Version("kept", 1), State.LIVE)])
    assert not dropped.exists()


async def test_a_version_that_is_lost_under_a_waiting_request_never_reaches_the_core(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would look for its files in the middle of a batch, and end."""
    directory = await publish(sampler, Version("lost", 0), seed=1)
    generation = sampler.stats().generation
    running = sampler._supervisor.running

    async def dies_meanwhile() -> SamplerCore:
        monkeypatch.setattr(sampler._supervisor, "running", running)
        shutil.rmtree(directory)
        kill_core()
        await until(lambda: sampler.stats().generation > generation)
        return await running()

    with sampler.lease("lost") as lease:
        monkeypatch.setattr(sampler._supervisor, "running", dies_meanwhile)
        with pytest.raises(EngineError, match="could not be loaded again") as caught:
            await sampler.sample(lease, PROMPT, 1, GREEDY)
    assert caught.value.reason == "VersionLost"
    await sampler.sample(None, PROMPT, 1, GREEDY)
    assert sampler.stats().generation == generation + 1


async def test_a_crowd_goes_on_under_a_core_that_is_killed(model: Path, tmp_path: Path) -> None:
    """All versions come back in other slots than before; every answer is still that of its version alone."""
    async with running_sampler(isolation_config(model, tmp_path)) as crowded:
        recording = await drive(crowded, tmp_path / "copies", Traffic(requests=400, seed=2, kill_at=200))
        assert crowded.stats().generation == 2
        # and whatever is under way when the sampler is closed ends then
        held = [crowded.lease("experiment-0")]
        pending: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(crowded.sample(lease, PROMPT, 2, LONG)) for lease in (*held, None)
        ]
        pending += [asyncio.ensure_future(publish(crowded, Version("late", step), seed=1)) for step in range(10)]
        await until(lambda: crowded.stats().running > 0)
        await crowded.close()
        outcomes = await asyncio.gather(*pending, return_exceptions=True)
        assert all(isinstance(outcome, EngineError | Path) for outcome in outcomes), outcomes
        assert isinstance(outcomes[0], EngineError)
        assert isinstance(outcomes[1], EngineError)
        held.pop().release()
        await until(lambda: not any(crowded.config.versions_root.iterdir()))
    report = judge(model, recording)
    print(report)
    assert report.restarted > 0
    assert report.requests == 400
    assert (report.mismatches, report.alike) == (0, 0)
