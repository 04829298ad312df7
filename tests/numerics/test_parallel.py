"""A trainer of two processes (gloo) against one of one process: the same numbers, and one fate on both ranks.

What the ranks do is in parallel_run.py; each of the two ways to hold the base model (a copy on each, or sharded by
FSDP2) is run once for all tests.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from clora_engine.trainer_ranks import TIMEOUT, Ranks
from clora_engine.trainer_shard import decoder_layers
from tests.numerics.parallel_run import ADAM, Facts, training
from tests.numerics.tiny import tiny_model
from tests.torch_threads import torch_threads

pytestmark = pytest.mark.integration

ERRORS = ["error in a layer", "error in the end", "error backward", "no memory at all"]


@pytest.fixture(scope="module", params=["copied", "shard"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    """What both ranks say."""
    folder = tmp_path_factory.mktemp("ranks")
    outs = [folder / f"rank-{rank}.json" for rank in range(2)]
    module = "tests.numerics.parallel_run"
    processes = [
        subprocess.Popen([sys.executable, "-m", module, str(rank), "2", str(folder / "meet"), request.param, str(out)])
        for rank, out in enumerate(outs)
    ]
    try:
        assert [process.wait(400) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(out.read_text()) for out in outs]


@pytest.fixture(scope="module")
def alone() -> Facts:
    with torch_threads(1):
        return training(Ranks())


def close(ours: list[float], theirs: list[float]) -> bool:
    a, b = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    return bool((a - b).norm() <= 1e-5 * b.norm())


@pytest.mark.parametrize("scenario", ["training", "checkpointed"])
def test_two_ranks_compute_what_one_does(ranks: list[Facts], alone: Facts, scenario: str) -> None:
    """FP32, ragged rows, two adapters joined: gradients to 1e-5 of their norm, weights after two steps to 1/200 of the
    way that AdamW can have moved them."""
    for facts in (rank[scenario] for rank in ranks):
        for ours, theirs in zip(facts["results"], alone["results"], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-5)
            assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-3, abs=1e-4)
            assert ours["adapters"] == theirs["adapters"]
        assert facts["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        for row, other in zip(facts["logprobs"], alone["logprobs"], strict=True):
            for one, its in zip(row, other, strict=True):
                assert one == pytest.approx(its, abs=1e-3)
        for name in "AB":
            a, b = torch.tensor(facts["masters"][name]), torch.tensor(alone["masters"][name])
            torch.testing.assert_close(a, b, rtol=0, atol=2 * ADAM.learning_rate / 200)
    for name, whole in alone["gradients"].items():
        parts = [rank[scenario]["gradients"][name] for rank in ranks]
        assert all(any(part) for part in parts), "both ranks had a share"
        assert close([a + b for a, b in zip(*parts, strict=True)], whole)


def test_each_of_two_ranks_holds_half_of_the_layers_where_they_are_sharded(
    request: pytest.FixtureRequest, ranks: list[Facts]
) -> None:
    layers = sum(p.numel() * p.element_size() for layer in decoder_layers(tiny_model()) for p in layer.parameters())
    sharded = "shard" in request.node.callspec.id
    for facts in (rank["held"] for rank in ranks):
        assert facts["whole"] == layers
        assert facts["here"] == (pytest.approx(layers / 2, rel=0.02) if sharded else layers)


def test_ranks_that_have_met_wait_for_the_slowest_share(ranks: list[Facts]) -> None:
    """Longer than they did to meet."""
    assert [rank["patience"] for rank in ranks] == 2 * [TIMEOUT.total_seconds()]


def test_masters_and_moments_are_the_same_on_all_ranks_bit_for_bit(ranks: list[Facts]) -> None:
    for scenario in ("training", "checkpointed"):
        first, second = (rank[scenario]["digests"] for rank in ranks)
        assert first == second


@pytest.mark.parametrize("scenario", ERRORS)
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(ranks: list[Facts], scenario: str) -> None:
    for facts in (rank[scenario] for rank in ranks):
        for outcome in facts["outcomes"]:
            expected = "does not hold a row" if scenario == "no memory at all" else "a kernel that fails"
            assert expected in outcome["error"]
        assert facts["kept"], "the gradient of an earlier call"
        assert facts["clean"]
        assert [outcome["adapters"] for outcome in facts["after"]] == [2, 2]
    assert ranks[0][scenario]["after"] == ranks[1][scenario]["after"] == ranks[0]["error in a layer"]["after"]


def test_memory_that_runs_out_on_one_rank_splits_on_all(ranks: list[Facts], alone: Facts) -> None:
    parts = [rank["out_of_memory"] for rank in ranks]
    assert [part["outcomes"][0]["loss"] for part in parts] == pytest.approx([alone["results"][0]["loss"]] * 2, rel=1e-4)
    assert close([a + b for a, b in zip(*(part["gradient"] for part in parts), strict=True)], alone["gradients"]["A"])


@pytest.mark.parametrize("ranks", ["copied"], indirect=True)
def test_a_gradient_that_is_no_number_on_one_rank_skips_that_adapter_on_all(ranks: list[Facts]) -> None:
    for facts in ranks:
        assert facts["not_finite"] == {"skipped": [True, False], "same": True}


@pytest.mark.parametrize("ranks", ["copied"], indirect=True)
def test_an_adapter_that_one_rank_cannot_take_is_taken_by_none(ranks: list[Facts]) -> None:
    for facts in ranks:
        assert facts["no_room"] == {"error": "the disk is full", "there": False}
