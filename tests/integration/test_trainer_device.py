"""A device that fails under one tenant's pass: the trainer's processes end, for no other tenant could go on with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from clora_engine.errors import CapacityError, EngineError, TrainerDied
from clora_engine.trainer_client import TrainerClient
from clora_engine.types import AdamParams, LoraConfig, Loss
from tests.faulty_trainer import BUG, DEVICE, MEMORY, put_into_trainers
from tests.integration.test_trainer_process import SETTINGS
from tests.numerics.tiny import batch, tiny_model, trained_tokens

pytestmark = pytest.mark.integration

CONFIG = LoraConfig(rank=8, alpha=16)
ADAM = AdamParams(learning_rate=5e-3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(path)
    return path


@pytest_asyncio.fixture(params=[1, 2])
async def client(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TrainerClient]:
    """Of one process, and of two."""
    put_into_trainers(tmp_path, monkeypatch)
    options: dict[str, Any] = {"threads": 1, "processes": request.param, "slots": 2, "host_limit_bytes": 1 << 23}
    client = await TrainerClient.start(str(checkpoint), dtype="float32", device="cpu", **(SETTINGS | options))
    yield client
    await client.close()


async def train(client: TrainerClient, adapter: str) -> None:
    rows = batch(1)
    await client.forward_backward(adapter, rows, Loss(name="PPO", denominator=trained_tokens(rows)))
    await client.optim_step(adapter, ADAM)


async def test_a_failed_device_ends_the_trainer_and_a_bug_or_full_memory_only_its_call(client: TrainerClient) -> None:
    processes = [psutil.Process(client.pid), *psutil.Process(client.pid).children()]
    last = f"@{len(processes) - 1}"  # a rank that follows, where there is one
    for name in ("good", BUG + last, MEMORY + last, DEVICE + last):
        await client.create(name, CONFIG)
    with pytest.raises(EngineError, match=r"shape '\[3\]' is invalid") as bug:
        await train(client, BUG + last)
    assert bug.value.reason == "TrainerError"
    with pytest.raises(CapacityError, match="does not hold a row"):
        await train(client, MEMORY + last)
    await train(client, "good")
    assert not client.died.is_set()

    ended = r"status 5 \(its device has failed\)"
    said = f"{ended}: AcceleratorError: CUDA error: device-side assert triggered$" if len(processes) == 1 else ended
    calls = [train(client, name) for name in (DEVICE + last, "good")]
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(answer, TrainerDied), "whoever waited beside it is told the same"
    async with asyncio.timeout(30):
        await client.died.wait()
        for process in processes:
            await asyncio.to_thread(process.wait)
    with pytest.raises(TrainerDied, match=said):
        await client.create("later", CONFIG)
