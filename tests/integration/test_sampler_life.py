"""The sampler's life: a core that dies, a sampler that gives up, an engine that is killed, a vLLM that is wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from clora_engine import sampler_selftest as selftest
from clora_engine.errors import EngineError, SamplerRestarted, UserError
from clora_engine.sampler import Sampler
from clora_engine.types import SamplingParams, Version
from tests.sampler_fixtures import (
    GREEDY,
    Judge,
    core_processes,
    kill_core,
    prompt,
    publish,
    running_sampler,
    sampler_config,
    until,
    write_adapter,
)

pytestmark = pytest.mark.integration

ENDLESS = SamplingParams(temperature=0.0, max_tokens=480, stop_token_ids=())
PROMPT = prompt(0)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
async def test_a_killed_core_comes_back_with_all_live_versions(model: Path, tmp_path: Path, by: signal.Signals) -> None:
    """Told to end, vLLM returns what it has of each sample as if it were whole, and refuses to load adapters."""
    judge = Judge(model)
    async with running_sampler(sampler_config(model, tmp_path / "root", slots=4)) as sampler:
        old = await publish(sampler, Version("e", 0), seed=1)
        leased = sampler.lease("e")
        new = await publish(sampler, Version("e", 1), seed=2)
        vanishing = await publish(sampler, Version("f", 0), seed=3)
        pending = [asyncio.ensure_future(sampler.sample(leased, PROMPT, 2, ENDLESS)) for _ in range(3)]
        await until(lambda: sampler.stats().running == 6)
        shutil.rmtree(vanishing)
        kill_core(by)
        next_version = asyncio.ensure_future(publish(sampler, Version("e", 2), seed=4))
        for outcome in await asyncio.gather(*pending, return_exceptions=True):
            assert isinstance(outcome, SamplerRestarted)
        await until(lambda: not sampler.stats().up)

        # what comes meanwhile waits
        (base,) = await sampler.sample(None, PROMPT, 1, GREEDY)

        assert sampler.stats().generation == 2
        assert [base.ids] == judge.greedy(None, [PROMPT], GREEDY.max_tokens)
        (sample,) = await sampler.sample(leased, PROMPT, 1, GREEDY)
        assert [sample.ids] == judge.greedy(old, [PROMPT], GREEDY.max_tokens)
        newest = await next_version
        with sampler.lease("e") as lease:
            assert lease.version == Version("e", 2)
            (sample,) = await sampler.sample(lease, PROMPT, 1, GREEDY)
        assert [sample.ids] == judge.greedy(newest, [PROMPT], GREEDY.max_tokens)
        with pytest.raises(EngineError, match="no version"):
            sampler.lease("f")
        leased.release()
        await until(lambda: not old.exists() and not new.exists())
    assert core_processes() == []


@pytest.mark.slow
async def test_every_data_parallel_rank_gets_every_version(model: Path, tmp_path: Path) -> None:
    judge = Judge(model)
    async with running_sampler(sampler_config(model, tmp_path / "root", data_parallel_size=2)) as sampler:
        directory = await publish(sampler, Version("e", 0), seed=1)
        leases = [sampler.lease("e") for _ in range(4)]
        assert {lease.rank for lease in leases} == {0, 1}
        answers = await asyncio.gather(*(sampler.sample(lease, PROMPT, 2, GREEDY) for lease in leases))
        assert {s.ids for answer in answers for s in answer} == set(judge.greedy(directory, [PROMPT], 12))
        base = await sampler.sample(None, PROMPT, 2, GREEDY)
        assert {s.ids for s in base} == set(judge.greedy(None, [PROMPT], 12))


async def test_a_core_that_does_not_come_back_is_given_up(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    async with running_sampler(sampler_config(copy, tmp_path / "root", start_attempts=1)) as sampler:
        await publish(sampler, Version("e", 0), seed=1)
        next_version = write_adapter(sampler.new_directory(), copy, seed=2)
        shutil.rmtree(copy)
        kill_core()
        await until(lambda: not sampler.stats().up)
        with pytest.raises(EngineError, match="failed 1 times in a row; the sampler gives up") as caught:
            await sampler.sample(None, PROMPT, 1, GREEDY)
        assert caught.value.reason == "SamplerUnavailable"
        with pytest.raises(EngineError, match="gives up"):
            await sampler.publish(Version("e", 1), next_version)
    with pytest.raises(EngineError, match="gives up"):
        await sampler.sample(None, PROMPT, 1, GREEDY)
    assert core_processes() == []


async def test_the_self_test_refuses_a_vllm_that_mixes_adapters_up(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's stock CPU kernel reads base-model rows as rows of the last slot when all slots are full."""
    monkeypatch.setenv("VLLM_PLUGINS", "none-of-them")
    with pytest.raises(EngineError, match="base model answers differently beside other adapters") as caught:
        await Sampler(sampler_config(model, tmp_path / "root")).start()
    assert caught.value.reason == "SamplerSelfTest"
    await until(lambda: core_processes() == [])


async def test_arguments_that_the_sampler_sets_itself_are_refused(model: Path, tmp_path: Path) -> None:
    sampler = Sampler(sampler_config(model, tmp_path / "root", extra_args={"max_loras": 1}))
    with pytest.raises(UserError, match="max_loras is set by the sampler itself"):
        await sampler.start()
    sampler = Sampler(sampler_config(model, tmp_path / "root", extra_args={"no_such_argument": 1}))
    with pytest.raises(UserError, match="no_such_argument"):
        await sampler.start()


async def test_a_versions_root_that_others_can_write_to_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o755)
    with pytest.raises(EngineError, match="mode 0700"):
        await Sampler(sampler_config(model, tmp_path / "root")).start()


ENGINE = """
import asyncio, sys
from pathlib import Path
from tests.sampler_fixtures import running_sampler, sampler_config

async def main():
    async with running_sampler(sampler_config(Path(sys.argv[1]), Path(sys.argv[2]))):
        print("up", flush=True)
        await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


async def _until_line(stream: asyncio.StreamReader, last: bytes) -> AsyncIterator[bytes]:
    while line := await stream.readline():
        yield line
        if line == last:
            return


async def test_a_killed_engine_leaves_no_process_and_its_versions_go_with_the_next(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    root = tmp_path / "root"
    command = [sys.executable, str(script), str(model), str(root)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    engine = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        assert engine.stdout is not None
        assert b"up\n" in [line async for line in _until_line(engine.stdout, b"up\n")]
        cores = core_processes(engine.pid)
        assert cores
        left = [write_adapter(root / name, model, seed=1) for name in ("v000000-00000000", f"{selftest.FOLDER}/4.0/0")]
    finally:
        engine.kill()
        await engine.wait()
    await until(lambda: not any(core.is_running() and core.status() != psutil.STATUS_ZOMBIE for core in cores))
    async with running_sampler(sampler_config(model, root)):
        assert not any(directory.exists() for directory in left)
