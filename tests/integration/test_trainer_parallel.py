"""The trainer as two processes, started and ended as the engine does it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from safetensors.torch import load_file
from torch import Tensor

from clora_engine.errors import EngineError, TrainerDied, UserError
from clora_engine.trainer_client import TrainerClient
from clora_engine.types import AdamParams, LoraConfig, Loss
from tests.integration.test_trainer_process import LONG, SETTINGS, long_batch, until_running
from tests.numerics.tiny import batch, tiny_model, trained_tokens

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

ADAM = AdamParams(learning_rate=5e-3, eps=1e-5)
STEPS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(path)
    return path


async def start(checkpoint: Path, **changes: Any) -> TrainerClient:
    options: dict[str, Any] = {"threads": 2, "processes": 2, "slots": 2, "host_limit_bytes": 1 << 22}
    return await TrainerClient.start(str(checkpoint), dtype="float32", device="cpu", **(SETTINGS | options | changes))


@pytest_asyncio.fixture(loop_scope="module")
async def client(checkpoint: Path) -> AsyncIterator[TrainerClient]:
    client = await start(checkpoint)
    yield client
    await client.close()


async def train(client: TrainerClient, folder: Path) -> dict[str, Any]:
    """Some joined steps of two adapters; the files of the first."""
    rates = []
    for name, rank in (("a", 8), ("b", 16)):
        await client.create(name, LoraConfig(rank=rank, alpha=16, seed=rank))
    for step in range(STEPS):
        calls = []
        for seed, name in enumerate("ab"):
            rows = batch(10 * step + seed)
            calls.append(client.forward_backward(name, rows, Loss(name="PPO", denominator=trained_tokens(rows))))
        rates += [result.loss for result in await asyncio.gather(*calls)]
        rates += [(await client.optim_step(name, ADAM)).grad_norm for name in "ab"]
    await client.save("a", folder, optimizer=True)
    return {"rates": rates, "logprobs": await client.forward("b", batch(50)), "weights": adapter(folder)}


def adapter(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = load_file(folder / "adapter_model.safetensors")
    return weights


def files(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("adapter_model.safetensors", "optimizer.safetensors")]


def others(client: TrainerClient) -> list[psutil.Process]:
    return psutil.Process(client.pid).children()


async def gone(processes: list[psutil.Process]) -> None:
    async with asyncio.timeout(10):
        for process in processes:
            await asyncio.to_thread(process.wait)


@pytest.mark.parametrize("shard_base", [False, True])
async def test_two_processes_train_as_one_does(checkpoint: Path, tmp_path: Path, shard_base: bool) -> None:
    one, two = await start(checkpoint, processes=1), await start(checkpoint, shard_base=shard_base)
    try:
        assert one.info.base_parameters == two.info.base_parameters
        alone, shared = await train(one, tmp_path / "one"), await train(two, tmp_path / "two")
        with pytest.raises(UserError, match="no token of the batch has a weight"):
            await two.forward_backward("a", [], LONG)
        (tmp_path / "file").touch()
        with pytest.raises(EngineError, match="Not a directory"):
            await two.save("a", tmp_path / "file" / "below", optimizer=False)
        await two.load("a", tmp_path / "two", optimizer=True)
        assert (await two.optim_step("a", ADAM)).step == STEPS + 1
        await two.delete("a")
        processes = others(two)
        assert len(processes) == 1
    finally:
        await one.close()
        await two.close()
    await gone(processes)
    assert not two.died.is_set()
    assert shared["rates"] == pytest.approx(alone["rates"], rel=1e-3, abs=1e-5)
    for name, weights in alone["weights"].items():
        difference = (weights - shared["weights"][name]).abs().max()
        assert difference < STEPS * ADAM.learning_rate / 200
    for row, other in zip(shared["logprobs"], alone["logprobs"], strict=True):
        for ours, theirs in zip(row, other, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-2)


async def test_a_gradient_that_is_pending_is_saved_whole(client: TrainerClient, tmp_path: Path) -> None:
    """And counted once when it is loaded."""
    await client.create("pending", LoraConfig(rank=8, alpha=16))
    rows = batch(70)
    await client.forward_backward("pending", rows, Loss(name="PPO", denominator=trained_tokens(rows)))
    for round_ in range(2):
        await client.save("pending", tmp_path / str(round_), optimizer=True)
        await client.load("pending", tmp_path / str(round_), optimizer=True)
    assert files(tmp_path / "0") == files(tmp_path / "1")
    again = await client.optim_step("pending", ADAM)
    await client.delete("pending")
    await client.create("pending", LoraConfig(rank=8, alpha=16))
    await client.forward_backward("pending", rows, Loss(name="PPO", denominator=trained_tokens(rows)))
    assert again.grad_norm == (await client.optim_step("pending", ADAM)).grad_norm


async def test_the_death_of_a_rank_is_the_trainers(client: TrainerClient) -> None:
    await client.create("a", LoraConfig(rank=8, alpha=16))
    (second,) = others(client)
    running = asyncio.create_task(client.forward_backward("a", long_batch(), LONG))
    await until_running(client)
    second.send_signal(signal.SIGKILL)
    with pytest.raises(TrainerDied, match="status 4"):
        await running
    async with asyncio.timeout(10):
        await client.died.wait()


async def test_a_rank_that_dies_idle_is_noticed(client: TrainerClient) -> None:
    (second,) = others(client)
    second.send_signal(signal.SIGKILL)
    async with asyncio.timeout(10):
        await client.died.wait()


async def test_when_rank_0_is_killed_no_rank_is_left(client: TrainerClient) -> None:
    await client.create("a", LoraConfig(rank=8, alpha=16))
    processes = others(client)
    command = processes[0].cmdline()
    rendezvous = command[command.index("--rendezvous") + 1]
    assert os.path.exists(rendezvous)  # noqa: ASYNC240
    running = asyncio.create_task(client.forward_backward("a", long_batch(), LONG))
    await until_running(client)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(TrainerDied, match="signal 9"):
        await running
    await gone(processes)
    assert not os.path.exists(os.path.dirname(rendezvous))  # noqa: ASYNC240


async def test_auto_slots_are_chosen_alike(checkpoint: Path) -> None:
    """Ranks that measured for themselves would disagree, and then wait for each other for ever."""
    client = await start(checkpoint, slots=None, max_adapters=4, tokens_per_microbatch=2048)
    try:
        assert 1 <= client.info.slots <= 4
        await client.create("a", LoraConfig(rank=8, alpha=16))
        rows = batch(1)
        result = await client.forward_backward("a", rows, Loss(name="PPO", denominator=trained_tokens(rows)))
        assert result.tokens > 0
    finally:
        await client.close()
