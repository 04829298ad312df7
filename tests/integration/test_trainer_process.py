"""The trainer as a process: the same numbers as in this process, errors as answers, and deaths of either side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from clora_engine import trainer_protocol as protocol
from clora_engine.errors import CapacityError, CheckpointError, EngineError, TrainerDied, UserError
from clora_engine.trainer import Trainer
from clora_engine.trainer_base import load_base
from clora_engine.trainer_client import TrainerClient
from clora_engine.types import AdamParams, Completion, LoraConfig, Loss, Row
from tests.numerics.tiny import VOCABULARY, batch, tiny_model, tiny_trainer, trained_tokens

# One loop for the module: a process takes many seconds to start, so the tests that do not end it share one.
pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

ADAM = AdamParams(learning_rate=5e-3)
SETTINGS: dict[str, Any] = {
    "max_rank": 32,
    "tokens_per_microbatch": 256,
    "host_limit_bytes": 1 << 21,
    "model_name": "clora/tiny",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(path)
    return path


async def start(checkpoint: Path, *, threads: int = 1) -> TrainerClient:
    return await TrainerClient.start(str(checkpoint), dtype="float32", device="cpu", threads=threads, **SETTINGS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(checkpoint: Path) -> AsyncIterator[TrainerClient]:
    client = await start(checkpoint)
    yield client
    await client.close()
    assert not client.died.is_set(), "a test ended the shared process"


@pytest_asyncio.fixture(loop_scope="module")
async def client(shared: TrainerClient) -> AsyncIterator[TrainerClient]:
    """The shared process, for one test: the adapters "a" and "b" are gone afterwards."""
    yield shared
    for name in ("a", "b"):
        with contextlib.suppress(EngineError):
            await shared.delete(name)


@pytest_asyncio.fixture(loop_scope="module")
async def doomed(checkpoint: Path) -> AsyncIterator[TrainerClient]:
    """A process for a test that kills it."""
    client = await start(checkpoint)
    yield client
    await client.close()


def long_batch(prompts: int = 20) -> list[Row]:
    """Seconds of work on one thread: nothing is shared and nothing is merged."""
    rows = []
    for prompt in range(prompts):
        many = [[(prompt * 7 + c * 11 + t) % VOCABULARY for t in range(120)] for c in range(20)]
        rows.append(
            Row(
                prompt=[prompt % VOCABULARY, prompt // VOCABULARY, 2],
                completions=[
                    Completion(ids=ids, weights=[1.0] * 120, logprobs=[-4.8] * 120, advantages=[1.0] * 120)
                    for ids in many
                ],
            )
        )
    return rows


LONG = Loss(name="PPO", denominator=1000.0)


async def test_a_step_is_not_held_up_between_its_pass_and_its_end(client: TrainerClient, tmp_path: Path) -> None:
    """What takes no time goes before the passes of others; an adapter's own calls keep their order."""
    for name in ("a", "b"):
        await client.create(name, LoraConfig(rank=8, alpha=16))
    ended: list[str] = []

    async def step(name: str) -> None:
        await client.forward_backward(name, long_batch(1), LONG)
        ended.append(f"{name} pass")
        await client.optim_step(name, ADAM)
        ended.append(f"{name} step")
        await client.export(name, tmp_path / name)
        ended.append(f"{name} export")

    async def queued_behind() -> None:
        both = (client.forward_backward("b", long_batch(1), LONG), client.optim_step("b", ADAM))
        await asyncio.gather(*both)
        ended.append("b")

    await asyncio.gather(step("a"), queued_behind())
    assert ended == ["a pass", "a step", "a export", "b"]


async def until_running(client: TrainerClient) -> None:
    """Returns once a command is with the process."""
    async with asyncio.timeout(10):
        while not client._current:  # noqa: ASYNC110 (the client has no event for it, and needs none)
            await asyncio.sleep(0)


async def test_a_run_through_the_process_equals_one_in_this_process(
    client: TrainerClient, checkpoint: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    local = Trainer(load_base(str(checkpoint), dtype="float32", device=torch.device("cpu")), **SETTINGS)
    config = LoraConfig(rank=8, alpha=16, seed=4)
    assert await client.create("a", config) == local.create("a", config)
    for step in range(2):
        rows = batch(step)
        loss = Loss(name="PPO", denominator=trained_tokens(rows))
        theirs, ours = await client.forward_backward("a", rows, loss), local.forward_backward("a", rows, loss)
        assert (theirs.loss, theirs.metrics, theirs.tokens) == (ours.loss, ours.metrics, ours.tokens)
        stepped, local_step = await client.optim_step("a", ADAM), local.optim_step("a", ADAM)
        assert (stepped.step, stepped.grad_norm) == (local_step.step, local_step.grad_norm)
    assert await client.forward("a", batch(5), temperature=1.5) == local.forward("a", batch(5), temperature=1.5)
    await client.save("a", tmp_path / "state", optimizer=True)
    info = await client.load("b", tmp_path / "state", optimizer=True, config=config)
    assert (info.step, info.parameters) == (2, local.create("c", config).parameters)
    assert await client.forward("b", batch(5)) == local.forward("a", batch(5))
    assert client.info.linear_layers == 14
    assert client.info.vocabulary == VOCABULARY


async def test_errors_are_answers_with_their_kind_and_the_process_goes_on(
    client: TrainerClient, tmp_path: Path
) -> None:
    pid = client.pid
    info = await client.create("a", LoraConfig(rank=8, alpha=16))
    with pytest.raises(UserError, match=r"lora\.rank is 64") as user:
        await client.create("b", LoraConfig(rank=64, alpha=16))
    assert (user.value.field, user.value.reason) == ("lora.rank", "InvalidSpec")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        await client.load("b", tmp_path / "nothing", optimizer=False)
    with pytest.raises(CheckpointError, match="No such file") as storage:
        await client.save("a", tmp_path / "no" / "parent", optimizer=False)
    assert storage.value.reason == "StorageFailed"
    creating = [client.create(f"more-{number}", LoraConfig(rank=32, alpha=16)) for number in range(10)]
    results = await asyncio.gather(*creating, return_exceptions=True)
    created = sum(not isinstance(result, BaseException) for result in results)
    assert created == (SETTINGS["host_limit_bytes"] - info.host_bytes) // (4 * info.host_bytes)
    assert all(isinstance(result, CapacityError) for result in results[created:])
    for number in range(created):
        await client.delete(f"more-{number}")
    with pytest.raises(EngineError, match="no adapter 'nobody'") as missing:
        await client.optim_step("nobody", ADAM)
    assert missing.value.reason == "AdapterNotFound"
    with pytest.raises(UserError, match="nothing to train on"):
        await client.forward_backward("a", [], Loss(name="PPO", denominator=1.0))
    rows = batch(0)
    result = await client.forward_backward("a", rows, Loss(name="PPO", denominator=trained_tokens(rows)))
    assert result.loss == result.loss
    assert (await client.optim_step("a", ADAM)).step == 1
    assert client.pid == pid
    assert not client.died.is_set()


async def test_a_model_that_cannot_be_trained_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a checkpoint directory"):
        await start(tmp_path)


async def test_calls_are_served_in_order_and_a_cancelled_one_in_the_queue_is_not_run(client: TrainerClient) -> None:
    await client.create("a", LoraConfig(rank=8, alpha=16))
    running = asyncio.create_task(client.forward_backward("a", long_batch(), LONG))
    cancelled = asyncio.create_task(client.optim_step("a", ADAM))
    last = asyncio.create_task(client.optim_step("a", ADAM))
    await until_running(client)
    cancelled.cancel()
    done, _ = await asyncio.wait((running, last), return_when=asyncio.FIRST_COMPLETED)
    assert done == {running}
    assert (await last).step == 1
    assert cancelled.cancelled()


async def test_deleting_fails_the_calls_that_have_no_answer_and_drops_the_late_result(client: TrainerClient) -> None:
    for name in ("a", "b"):
        await client.create(name, LoraConfig(rank=8, alpha=16))
    running = asyncio.create_task(client.forward_backward("a", long_batch(), LONG))
    queued = asyncio.create_task(client.optim_step("a", ADAM))
    other = asyncio.create_task(client.forward_backward("b", batch(1), LONG))
    await until_running(client)
    assert not queued.done()
    deleting = asyncio.create_task(client.delete("a"))
    for call in (running, queued):
        with pytest.raises(EngineError, match="'a' was deleted meanwhile") as caught:
            await call
        assert caught.value.reason == "AdapterDeleted"
    assert not deleting.done()
    await deleting
    assert (await other).tokens > 0
    assert (await client.optim_step("b", ADAM)).step == 1
    with pytest.raises(EngineError, match="no adapter 'a'"):
        await client.optim_step("a", ADAM)
    assert (await client.create("a", LoraConfig(rank=8, alpha=16))).step == 0


# --------------------------------------------------------------------------------------------- joined calls


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wide(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TrainerClient]:
    """A process with two slots, which joins what it can, and a host that holds four adapters of rank 8."""
    spill = tmp_path_factory.mktemp("spill")
    one = tiny_trainer().create("one", LoraConfig(rank=8, alpha=16)).host_bytes
    settings = SETTINGS | {"max_rank": 16, "host_limit_bytes": 4 * one, "tokens_per_microbatch": 8192}
    client = await TrainerClient.start(
        str(checkpoint),
        dtype="float32",
        device="cpu",
        threads=1,
        slots=2,
        max_adapters=3,
        spill_directory=str(spill),
        **settings,
    )
    yield client
    assert list(spill.iterdir()) == []
    await client.close()


def short(name: str, *, seed: int = 0) -> tuple[str, list[Row], Loss]:
    rows = batch(seed + ord(name))
    return name, rows, Loss(name="PPO", denominator=trained_tokens(rows))


@contextlib.asynccontextmanager
async def behind_a_long_call(client: TrainerClient) -> AsyncIterator[None]:
    """What is called within waits until the process is free again."""
    await client.create("long", LoraConfig(rank=8, alpha=16))
    running = asyncio.create_task(client.forward_backward("long", long_batch(), LONG))
    await until_running(client)
    yield
    assert (await running).adapters == 1, "nobody who came later was in its pass"
    await client.delete("long")


async def test_calls_that_wait_are_joined_and_each_adapters_order_is_kept(wide: TrainerClient) -> None:
    torch.set_num_threads(1)
    local = tiny_trainer(budget=8192, slots=2)
    config = LoraConfig(rank=8, alpha=16)
    for name in "abc":
        await wide.create(name, config)
        local.create(name, config)
    async with behind_a_long_call(wide):
        waiting = asyncio.gather(
            wide.forward_backward(*short("a")),
            wide.optim_step("a", ADAM),
            wide.forward_backward(*short("a", seed=1)),
            wide.forward_backward(*short("b")),
            wide.forward_backward(*short("c")),
        )
        await asyncio.sleep(0)
    first, stepped, second, other, third = await waiting
    # Two slots: a's first call takes b's along; a's second has to wait for its optimizer step and takes c's along.
    assert [first.adapters, other.adapters, second.adapters, third.adapters] == [2, 2, 2, 2]
    assert stepped.step == 1
    alone = local.forward_backward(*short("a"))
    assert first.loss == pytest.approx(alone.loss, rel=1e-4, abs=1e-5)
    local.optim_step("a", ADAM)
    assert second.loss == pytest.approx(local.forward_backward(*short("a", seed=1)).loss, rel=1e-3, abs=1e-4)
    for name in "abc":
        await wide.delete(name)


async def test_a_bad_call_and_a_deleted_adapter_in_a_joined_pass(wide: TrainerClient, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for name in "ab":
        await wide.create(name, LoraConfig(rank=8, alpha=16))
    async with behind_a_long_call(wide):
        bad = asyncio.create_task(wide.forward_backward("b", [Row(prompt=[999], completions=[])], LONG))
        good = asyncio.create_task(wide.forward_backward(*short("a")))
        await asyncio.sleep(0)
    with pytest.raises(UserError, match="outside the vocabulary"):
        await bad
    assert (await good).adapters == 1
    # Deleted while it trains together with another; the name and the slot go to an adapter of a higher rank.
    names = ("a", "b")
    tasks = [asyncio.create_task(wide.forward_backward(name, long_batch(1), LONG)) for name in names]
    await until_running(wide)
    await wide.delete("b")
    with pytest.raises(EngineError, match="'b' was deleted meanwhile"):
        await tasks[1]
    assert (await tasks[0]).adapters == 2
    config = LoraConfig(rank=16, alpha=16, seed=5)
    fresh = tiny_trainer(budget=8192, slots=2, max_rank=16)
    assert await wide.create("b", config) == fresh.create("b", config)
    ours, theirs = await wide.forward_backward(*short("b")), fresh.forward_backward(*short("b"))
    assert (ours.loss, ours.metrics) == (theirs.loss, theirs.metrics)
    assert (await wide.optim_step("b", ADAM)).grad_norm == fresh.optim_step("b", ADAM).grad_norm
    await wide.save("b", tmp_path / "ours", optimizer=True)
    fresh.save("b", tmp_path / "theirs", optimizer=True)
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        ours_read, theirs_read = (load_file(tmp_path / side / file) for side in ("ours", "theirs"))
        assert ours_read.keys() == theirs_read.keys()
        assert all(torch.equal(tensor, theirs_read[key]) for key, tensor in ours_read.items())


async def test_an_engine_whose_adapters_do_not_fit_says_so_before_it_loads(checkpoint: Path) -> None:
    settings = SETTINGS | {"host_limit_bytes": 1000}
    with pytest.raises(UserError, match=r"host limit is 0\.00 GiB: raise --host-memory") as caught:
        await TrainerClient.start(str(checkpoint), dtype="float32", device="cpu", threads=1, **settings)
    assert caught.value.field == "capacity.maxRank"


async def test_auto_measures_and_says_how_many(checkpoint: Path) -> None:
    settings = SETTINGS | {"tokens_per_microbatch": 2048, "host_limit_bytes": 1 << 24}
    client = await TrainerClient.start(
        str(checkpoint), dtype="float32", device="cpu", threads=1, slots=None, max_adapters=3, **settings
    )
    try:
        assert client.info.slots in (1, 3)
        assert (client.info.join_below > 0) == (client.info.slots > 1)
    finally:
        await client.close()


# --------------------------------------------------------------------------------------------- deaths


async def test_when_the_process_is_killed_every_call_says_so(doomed: TrainerClient) -> None:
    await doomed.create("a", LoraConfig(rank=8, alpha=16))
    running = asyncio.create_task(doomed.forward_backward("a", long_batch(), LONG))
    queued = asyncio.create_task(doomed.optim_step("a", ADAM))
    await until_running(doomed)
    os.kill(doomed.pid, signal.SIGKILL)
    for call in (running, queued):
        with pytest.raises(TrainerDied, match="ended by signal 9"):
            await call
    async with asyncio.timeout(10):
        await doomed.died.wait()
    assert "signal 9" in str(doomed.death)
    with pytest.raises(TrainerDied):
        await doomed.create("b", LoraConfig(rank=8, alpha=16))


async def test_when_it_is_killed_idle_the_owner_hears_of_it(doomed: TrainerClient) -> None:
    os.kill(doomed.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        await doomed.died.wait()


async def test_closing_ends_the_process_and_is_no_death(checkpoint: Path) -> None:
    client = await start(checkpoint)
    await client.create("a", LoraConfig(rank=8, alpha=16))
    running = asyncio.create_task(client.forward_backward("a", long_batch(), LONG))
    await until_running(client)
    await client.close()
    with pytest.raises(TrainerDied, match="was closed"):
        await running
    assert not client.died.is_set()
    with pytest.raises(ProcessLookupError):
        os.kill(client.pid, 0)


async def test_the_process_ends_with_its_parent_even_while_it_computes(checkpoint: Path) -> None:
    """Speaks the protocol by hand, so that the other end can vanish in the middle of a command."""
    ours, theirs = socket.socketpair()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "clora_engine.trainer_process", "--fd", str(theirs.fileno()), "--threads", "1"),
        pass_fds=(theirs.fileno(),),
    )
    theirs.close()
    reader, writer = await asyncio.open_connection(sock=ours)
    config = LoraConfig(rank=8, alpha=16)
    minutes = protocol.ForwardBackward("a", long_batch(600), LONG)
    commands: list[protocol.Command] = [
        protocol.Start(model_path=str(checkpoint), dtype="float32", device="cpu", **SETTINGS),
        protocol.Create("a", config),
        protocol.Joined([msgspec.Raw(msgspec.msgpack.encode(minutes))]),
    ]
    for command in commands:
        body = msgspec.msgpack.encode(command)
        writer.write(protocol.header(body) + body)
    for _ in range(2):
        (length,) = protocol.LENGTH.unpack(await reader.readexactly(protocol.LENGTH.size))
        assert msgspec.msgpack.decode(await reader.readexactly(length), type=protocol.Reply).failure is None
    writer.close()  # what the kernel does to the socket of a parent that dies
    async with asyncio.timeout(10):
        assert await process.wait() == 0


async def test_a_large_call_lets_others_in_and_gives_the_same(client: TrainerClient) -> None:
    for name in ("a", "b"):
        await client.create(name, LoraConfig(rank=8, alpha=16))
    ended: list[str] = []

    async def train(name: str, rows: list[Row]) -> float:
        loss = (await client.forward_backward(name, rows, LONG)).loss
        ended.append(name)
        return loss

    large = [*long_batch(4), *batch(3)]
    found = await asyncio.gather(train("a", large), client.optim_step("a", ADAM), train("b", batch(1)))
    assert ended == ["b", "a"], "b's came in between"
    local = tiny_trainer()
    local.create("a", LoraConfig(rank=8, alpha=16))
    assert found[0] == pytest.approx(local.forward_backward("a", large, LONG).loss, rel=1e-4)
    assert found[1].grad_norm == pytest.approx(local.optim_step("a", ADAM).grad_norm, rel=1e-3), "of all its pieces"
    logprobs = await client.forward("b", large)
    local.create("b", LoraConfig(rank=8, alpha=16))
    for row, same in zip(logprobs, local.forward("b", large), strict=True):
        for ours, theirs in zip(row, same, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


async def test_half_a_call_is_never_applied(client: TrainerClient, tmp_path: Path) -> None:
    await client.create("a", LoraConfig(rank=8, alpha=16))
    await client.save("a", tmp_path, optimizer=True)
    with pytest.raises(UserError, match="vocabulary"):
        await client.forward_backward(
            "a", [*long_batch(4), Row(prompt=[999], completions=batch(1)[0].completions)], LONG
        )
    for refused in (client.optim_step("a", ADAM), client.forward_backward("a", batch(1), LONG)):
        with pytest.raises(EngineError) as caught:
            await refused
        assert caught.value.reason == "HalfGradient"
    await client.load("a", tmp_path, optimizer=True)
    loss = (await client.forward_backward("a", batch(1), LONG)).loss
    local = tiny_trainer()
    local.load("a", tmp_path, optimizer=True)
    assert loss == pytest.approx(local.forward_backward("a", batch(1), LONG).loss, rel=1e-4)
    assert (await client.optim_step("a", ADAM)).grad_norm == pytest.approx(
        local.optim_step("a", ADAM).grad_norm, rel=1e-3
    )
