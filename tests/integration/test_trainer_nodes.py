"""A trainer of two nodes, of which the second is `clora-engine follow`: its own folders, and over a network of its own
where this is root (trainer_nodes_fixtures.py)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from clora_engine.engine import _listen
from clora_engine.errors import CheckpointError, EngineError, TrainerDied, UserError
from clora_engine.trainer_client import TrainerClient
from clora_engine.trainer_nodes import TrainerNodes
from clora_engine.types import LoraConfig, Loss
from tests.faulty_trainer import DEVICE, put_into_trainers
from tests.integration.test_trainer_parallel import ADAM, files, train
from tests.integration.test_trainer_process import LONG, SETTINGS, long_batch, until_running
from tests.numerics.tiny import batch, tiny_model, trained_tokens
from tests.trainer_nodes_fixtures import IS_ROOT, TOKEN, Network, OtherNode, own_network, trainer_port

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Stage:
    """One node that follows, which outlives the trainers that it belongs to. storage: of the leader alone."""

    model: Path
    storage: Path
    node: OtherNode
    gpus: int = 0

    async def start(self, **changes: Any) -> TrainerClient:
        """The leader's side of an epoch."""
        host, port = self.node.network.leader, self.node.port
        nodes = TrainerNodes(
            _listen(host, port, "--trainer-port"),
            _listen(host, port + 1, "--trainer-port"),
            nodes=2,
            gpus=self.gpus,
            threads=1,
            version=self.version,
            token=TOKEN.encode,
        )
        try:
            async with asyncio.timeout(120):
                others = await nodes.all_there()
            return await start(self.model, others=others, **changes)
        finally:
            await nodes.close()

    version = "0.1.0"

    def rank(self) -> psutil.Process:
        """The other node's trainer process."""
        (process,) = [one for one in psutil.Process(self.node.pid).children(recursive=True) if one.is_running()]
        return process


async def start(model: Path, **changes: Any) -> TrainerClient:
    options: dict[str, Any] = {"threads": 1, "processes": 1, "slots": 2, "host_limit_bytes": 1 << 22}
    return await TrainerClient.start(str(model), dtype="float32", device="cpu", **(SETTINGS | options | changes))


def make_stage(folder: Path, network: Network) -> Stage:
    model, storage = folder / "leader" / "model", folder / "leader" / "storage"
    tiny_model().save_pretrained(model)
    storage.mkdir()
    shutil.copytree(model, folder / "models")
    return Stage(model, storage, OtherNode(folder / "node", folder / "models", trainer_port(), network))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The node starts before any leader does."""
    folder = tmp_path_factory.mktemp("nodes")
    if IS_ROOT:
        with own_network([folder / "leader"]) as network:
            made = make_stage(folder, network)
            made.node.start()
            yield made
            made.node.close()
    else:
        made = make_stage(folder, Network())
        made.node.start()
        yield made
        made.node.close()


@pytest_asyncio.fixture(loop_scope="module")
async def client(stage: Stage) -> AsyncIterator[TrainerClient]:
    client = await stage.start()
    yield client
    await client.close()


async def go_on(client: TrainerClient, folder: Path) -> list[float]:
    """A step of adapter "a" from what is in the folder."""
    await client.load("a", folder, optimizer=True)
    rows = batch(70)
    loss = await client.forward_backward("a", rows, Loss(name="PPO", denominator=trained_tokens(rows)))
    result = await client.optim_step("a", ADAM)
    return [loss.loss, result.grad_norm, result.step]


async def test_two_nodes_train_as_two_processes_of_one_do(stage: Stage, client: TrainerClient, tmp_path: Path) -> None:
    """Bit for bit, from the same seeds and from files that only the leader's node has."""
    one = await start(stage.model, threads=2, processes=2)
    try:
        expected = await train(one, tmp_path / "one")
        expected_next = await go_on(one, tmp_path / "one")
    finally:
        await one.close()
    found = await train(client, stage.storage / "a")
    for name in ("rates", "logprobs"):
        assert found[name] == expected[name]
    assert files(stage.storage / "a") == files(tmp_path / "one")
    if stage.node.network.namespace:
        shown = subprocess_in_node(stage, "ls", "-A", str(stage.storage.parent))
        assert shown == "", "the other node sees the leader's folders"
    assert await go_on(client, stage.storage / "a") == expected_next


def subprocess_in_node(stage: Stage, *words: str) -> str:
    """What a command says in the namespaces of the other node."""
    within = ["nsenter", "--target", str(stage.node.pid), "--net", "--mount", *words]
    return subprocess.run(within, check=True, capture_output=True, text=True).stdout


async def test_nodes_of_several_ranks_each(stage: Stage, tmp_path: Path) -> None:
    """Two of each node, as with two GPUs, but computed on CPUs: as four of one machine, bit for bit."""
    other = OtherNode(tmp_path / "node", stage.model, trainer_port(), flags=["--trainer-gpus=2"])
    own = Stage(stage.model, stage.storage, other, gpus=2)
    other.start()
    four = await start(stage.model, threads=4, processes=4)
    try:
        expected = await train(four, tmp_path / "four")
    finally:
        await four.close()
    client = await own.start(threads=2, processes=2)
    try:
        found = await train(client, stage.storage / "four")
        assert (found["rates"], found["logprobs"]) == (expected["rates"], expected["logprobs"])
        assert files(stage.storage / "four") == files(tmp_path / "four")
        leaders, others = (psutil.Process(pid).children() for pid in (client.pid, other.pid))
        assert (len(leaders), len(others)) == (1, 2)
        others[-1].send_signal(signal.SIGKILL)
        async with asyncio.timeout(30):
            await client.died.wait()
        for process in (*leaders, *others):
            await asyncio.to_thread(process.wait, 30)
    finally:
        await client.close()
        other.close()


async def test_what_cannot_be_loaded_is_loaded_by_no_node(stage: Stage, client: TrainerClient) -> None:
    await client.create("a", LoraConfig(rank=8, alpha=16))
    await client.save("a", stage.storage / "good", optimizer=True)
    with pytest.raises(CheckpointError, match=r"nowhere/adapter_config\.json is missing"):
        await client.load("a", stage.storage / "nowhere", optimizer=True)
    with pytest.raises(UserError, match=r"rank 8, the experiment lora\.rank 4"):
        await client.load("a", stage.storage / "good", optimizer=True, config=LoraConfig(rank=4, alpha=16))
    assert (await client.load("frozen", stage.storage / "good", optimizer=False, frozen=True)).step == 0
    rows = batch(3)
    await client.forward_backward("a", rows, Loss(name="PPO", denominator=trained_tokens(rows)))
    with pytest.raises(EngineError, match="is frozen"):
        await client.optim_step("frozen", ADAM)
    assert (await client.optim_step("a", ADAM)).step == 1


async def test_adapters_that_the_host_does_not_hold_are_in_files_of_each_node(stage: Stage) -> None:
    client = await stage.start(host_limit_bytes=1_300_000, slots=1, spill_directory=str(stage.storage))
    try:
        losses = {}
        for round_ in range(2):
            for name in "abcdefgh":
                if round_ == 0:
                    await client.create(name, LoraConfig(rank=32, alpha=16, seed=ord(name)))
                rows = batch(ord(name))
                loss = Loss(name="CrossEntropy", denominator=trained_tokens(rows))
                losses[name, round_] = (await client.forward_backward(name, rows, loss)).loss
                if round_ == 0:
                    assert (await client.optim_step(name, ADAM)).step == 1
        assert all(losses[name, 1] < losses[name, 0] for name in "abcdefgh")
    finally:
        await client.close()


async def test_a_sharded_model_is_spread_over_nodes(stage: Stage, tmp_path: Path) -> None:
    client = await stage.start(shard_base=True)
    try:
        assert (await train(client, stage.storage / "sharded"))["rates"]
    finally:
        await client.close()


async def test_a_rank_that_dies_ends_the_epoch_and_its_node_is_met_again(stage: Stage, tmp_path: Path) -> None:
    """In mid-pass; the next epoch goes on from the files as the first would have."""
    pid = stage.node.pid
    client = await stage.start()
    await train(client, stage.storage / "commit")
    expected = await go_on(client, stage.storage / "commit")
    running = asyncio.create_task(client.forward_backward("a", long_batch(), LONG))
    await until_running(client)
    stage.rank().send_signal(signal.SIGKILL)
    with pytest.raises(TrainerDied, match="status 4"):
        await running
    async with asyncio.timeout(30):
        await client.died.wait()
    client = await stage.start()
    try:
        assert await go_on(client, stage.storage / "commit") == expected
        assert stage.node.pid == pid
        assert psutil.pid_exists(pid)
    finally:
        await client.close()


async def test_a_device_that_fails_on_another_node_is_told_as_such(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_into_trainers(tmp_path, monkeypatch)
    other = OtherNode(tmp_path / "node", stage.model, trainer_port())
    other.start()
    client = await Stage(stage.model, stage.storage, other).start()
    try:
        await client.create(f"{DEVICE}@1", LoraConfig(rank=8, alpha=16))
        rows = batch(1)
        with pytest.raises(TrainerDied, match=r"status 5 \(its device has failed\)"):
            await client.forward_backward(f"{DEVICE}@1", rows, Loss(name="PPO", denominator=trained_tokens(rows)))
        other.says("ended with status [5]")
    finally:
        await client.close()
        other.close()


async def test_a_leader_that_is_killed_leaves_no_rank_on_the_other_node(stage: Stage) -> None:
    client = await stage.start()
    await client.create("a", LoraConfig(rank=8, alpha=16))
    rank = stage.rank()
    running = asyncio.create_task(client.forward_backward("a", long_batch(), LONG))
    await until_running(client)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(TrainerDied, match="signal 9"):
        await running
    await asyncio.to_thread(rank.wait, 30)


@pytest.mark.skipif(not IS_ROOT, reason="needs root, to cut a network")
async def test_a_node_that_is_cut_off_ends_the_epoch_on_both_sides(stage: Stage) -> None:
    """Nobody closes a connection then; the next epoch meets the node when it can be reached again."""
    client = await stage.start()
    rank = stage.rank()
    stage.node.network.switch(on=False)
    try:
        async with asyncio.timeout(150):
            await client.died.wait()
        assert "status 4" in str(client.death)
        await asyncio.to_thread(rank.wait, 150)
    finally:
        stage.node.network.switch(on=True)
    await (await stage.start()).close()


async def test_a_node_with_another_model_is_found_out(stage: Stage, tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    model.save_pretrained(tmp_path / "other")
    own = Stage(tmp_path / "other", stage.storage, stage.node)
    with pytest.raises(UserError, match="rank 1 of the trainer has loaded another base model than rank 0"):
        await own.start()


async def test_a_node_ends_at_once_and_its_ranks_with_it(stage: Stage, tmp_path: Path) -> None:
    """By SIGINT, by a second SIGTERM, and when its time after the first one is over, with 0; and by SIGKILL. The epoch
    ends each time."""
    other = OtherNode(tmp_path / "node", stage.model, trainer_port())
    own = Stage(stage.model, stage.storage, other)

    def told_twice(number: signal.Signals) -> int:
        assert other.process is not None
        other.process.terminate()
        other.says("told to end: this node does so with the leader's trainer")
        (tmp_path / "node" / "node.log").unlink()  # what it says is looked for in the next round, too
        other.process.send_signal(number)
        return other.process.wait(10)

    for end in (other.interrupt, partial(told_twice, signal.SIGTERM), partial(told_twice, signal.SIGALRM), other.kill):
        other.start()
        client = await own.start()
        rank = own.rank()
        code = await asyncio.to_thread(end)
        assert code in (0, None)
        await asyncio.to_thread(rank.wait, 30)
        async with asyncio.timeout(30):
            await client.died.wait()


async def test_a_node_without_token_or_model_says_so_and_ends(stage: Stage, tmp_path: Path) -> None:
    for token, model, why in (("", stage.model, "--token-file"), (TOKEN, tmp_path / "no", "--model")):
        other = OtherNode(tmp_path / "node", model, trainer_port(), token=token)
        other.start()
        assert other.process is not None
        assert await asyncio.to_thread(other.process.wait, 60) == 1
        assert f"clora-engine: {why}" in other.log
        (tmp_path / "node" / "node.log").unlink()
