"""A whole engine of two nodes: `clora-engine serve` and `clora-engine follow`, over a network of its own where this is
root (trainer_nodes_fixtures.py)."""

from __future__ import annotations

import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from clora_api.control import Phase
from tests.engine_fixtures import START_SECONDS, EngineProcess, rl_spec, sft_spec
from tests.trainer_nodes_fixtures import IS_ROOT, TOKEN, Network, OtherNode, own_network, trainer_port

pytestmark = pytest.mark.integration


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """The other node does not see the engine's folder."""
    if IS_ROOT:
        with own_network([tmp_path / "engine"]) as made:
            yield made
    else:
        yield Network()


@pytest.fixture
def pods(tmp_path: Path, tiny_model: Path, network: Network) -> Iterator[tuple[EngineProcess, OtherNode]]:
    """Neither is started."""
    model = tmp_path / "models"
    shutil.copytree(tiny_model, model)
    port = trainer_port()
    flags = {"host": "0.0.0.0", "trainer_nodes": 2, "trainer_port": port, "trainer_slots": 2}
    engine = EngineProcess(tmp_path / "engine", tiny_model, environment_host=network.other, **flags)
    node = OtherNode(tmp_path / "node", model, port, network)
    yield engine, node
    engine.close()
    node.close()


def told(engine: EngineProcess) -> str:
    """What the engine says while it starts."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            answer = engine.http.get("/v1/engine")
        except httpx.TransportError:
            time.sleep(0.1)  # it listens only later: there is nothing yet to wait on
            continue
        assert answer.status_code == 503
        return str(answer.json()["detail"])
    raise AssertionError(engine.tail())


def test_experiments_on_an_engine_of_two_nodes_outlive_a_rank(
    pods: tuple[EngineProcess, OtherNode], network: Network
) -> None:
    engine, node = pods
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(engine.start)
        assert told(engine) == "the engine waits for 1 of 2 trainer nodes: node 1"
        node.start()
        assert starting.result().epoch == 1
    elsewhere = {"name": "HTTP", "arguments": {"url": f"http://{network.other}:{engine.port}"}}
    refused = engine.put(str(uuid.uuid4()), rl_spec(environment=elsewhere))
    assert refused.status_code == 422
    why = "one of the engine's nodes" if IS_ROOT else "a loopback address"
    assert why in refused.json()["detail"], "no tenant reaches another node through the engine"
    sft, rl = str(uuid.uuid4()), str(uuid.uuid4())
    engine.put(sft, sft_spec(maxSteps=10))
    engine.put(rl, rl_spec(maxSteps=3))
    assert engine.finish(rl).progress.step == 3
    engine.wait(sft, lambda r: r.progress.step >= 3)

    (rank,) = psutil.Process(node.pid).children(recursive=True)
    rank.send_signal(signal.SIGKILL)
    assert engine.process is not None
    assert engine.process.wait(60) == 3
    assert "rank 1 on node 1 ended: the trainer ends" in engine.tail()
    assert engine.start().epoch == 2, "the same node is met again"
    engine.put(sft, sft_spec(maxSteps=10))
    engine.put(rl, rl_spec(maxSteps=3))
    for uid, steps in ((sft, 10), (rl, 3)):
        report = engine.finish(uid)
        assert (report.phase, report.progress.step) == (Phase.SUCCEEDED, steps)
        assert [line["step"] for line in engine.metrics(uid)] == list(range(steps + 1))
    losses = [line["loss"] for line in engine.metrics(sft)[1:]]
    assert losses[-1] < losses[0]

    undisturbed = str(uuid.uuid4())
    engine.put(undisturbed, sft_spec(maxSteps=10))
    engine.finish(undisturbed)
    name = Path("steps", "00010", "adapter_model.safetensors")
    first, second = (engine.storage / "experiments" / uid / name for uid in (sft, undisturbed))
    assert first.read_bytes() == second.read_bytes(), "it went on where it had been, to the bit"
    assert engine.terminate() == 0
    assert node.terminate() == 0


def test_pods_that_end_together_commit_first(pods: tuple[EngineProcess, OtherNode]) -> None:
    """Whichever is told first: the node stays for as long as the leader has steps to bring to their commits."""
    engine, node = pods
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(engine.start)
        node.start()
        starting.result()
    uid = str(uuid.uuid4())
    engine.put(uid, sft_spec(maxSteps=100_000))
    engine.wait(uid, lambda r: r.progress.step >= 3)
    assert node.process is not None
    node.process.terminate()
    node.says("told to end: this node does so with the leader's trainer")
    told_at = engine.report(uid).progress.step
    engine.wait(uid, lambda r: r.progress.step > told_at + 1)
    assert engine.terminate() == 0
    assert node.process.wait(30) == 0
    assert "; this node ends" in node.log


def test_a_node_whose_token_is_put_right_is_taken(pods: tuple[EngineProcess, OtherNode]) -> None:
    """Both say what is wrong until then; nothing is restarted."""
    engine, node = pods
    node.token = "of-another-engine"
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(engine.start)
        told(engine)
        node.start()
        node.says("the leader says, without proof: it has another token than the engine; tried again")
        assert told(engine) == (
            "the engine waits for 1 of 2 trainer nodes: node 1; last refused: a connection: it has another token than"
            " the engine"
        )
        (node.folder / "token").write_text(TOKEN)
        assert starting.result().epoch == 1
    assert engine.terminate() == 0
    assert node.terminate() == 0
