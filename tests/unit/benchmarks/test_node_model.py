"""The simulated node: its clock, its parts against computed times, and the documents of the simulation."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks import node_model, node_table, virtual_time
from benchmarks.node import Costs, Outcome, Policy, simulate
from benchmarks.node_reference import JOBS, PUBLISHED, in_waves
from benchmarks.node_sampler import Decoding, _Decoder
from benchmarks.node_trainer import ClientTrainer, StepTrainer
from clora_api.v1alpha1.engine import Scheduling

DOCS = Path(__file__).parents[3] / "docs" / "benchmarks"
COSTS = Costs(decode_base=0.3, decode_load=1e-5, train=30.0)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "node_model.json").read_text())
    return found


# ---------------------------------------------------------------- the clock


def test_time_passes_only_where_somebody_waits() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        return [begin, loop.time()]

    assert virtual_time.run(main()) == [0.0, 7200.0]


def test_waiting_for_what_cannot_happen_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="no timer is left"):
        virtual_time.run(main())


# ---------------------------------------------------------------- the parts


def test_sequences_on_one_gpu_slow_each_other_down() -> None:
    async def main() -> list[float]:
        loop, decoder = asyncio.get_running_loop(), _Decoder(Decoding(base=1.0, load=0.5))
        ends = []

        async def one(tokens: int) -> None:
            await decoder.generate(tokens)
            ends.append(loop.time())

        await asyncio.gather(one(10), one(30))
        return [*ends, decoder.busy_seconds]

    # 10 tokens at 2 s for both, then 20 at 1.5 s for the one that is left
    assert virtual_time.run(main()) == pytest.approx([20.0, 50.0, 50.0])


async def _three_steps(trainer: ClientTrainer | StepTrainer) -> list[float]:
    loop = asyncio.get_running_loop()

    async def one(name: str) -> float:
        await trainer.step(name, 1000)
        return loop.time()

    ends = await asyncio.gather(*(one(name) for name in "abc"))
    await trainer.close()
    return [*ends, trainer.busy_seconds]


def test_in_the_engines_client_no_optimizer_step_waits_behind_the_passes_of_others() -> None:
    async def main() -> list[float]:
        return await _three_steps(ClientTrainer(10.0, 1, 0.0, Scheduling.FAIR_SHARE))

    assert virtual_time.run(main()) == pytest.approx([10.0, 20.0, 30.0, 30.0])


@pytest.mark.parametrize(
    ("slots", "fixed", "ends"),
    [(1, 0.0, [10.0, 20.0, 30.0, 30.0]), (8, 0.0, [30.0, 30.0, 30.0, 30.0]), (2, 0.5, [15.0, 15.0, 25.0, 25.0])],
)
def test_a_pass_of_several_steps_pays_its_fixed_part_once(slots: int, fixed: float, ends: list[float]) -> None:
    async def main() -> list[float]:
        return await _three_steps(StepTrainer(10.0, slots, fixed))

    assert virtual_time.run(main()) == pytest.approx(ends)


def test_the_engines_client_joins_what_waits() -> None:
    async def main() -> list[float]:
        return await _three_steps(ClientTrainer(10.0, 8, 0.5, Scheduling.FAIR_SHARE))

    assert virtual_time.run(main()) == pytest.approx([20.0, 20.0, 20.0, 20.0])


def test_alone_nothing_is_waited_for() -> None:
    alone = simulate(COSTS, Policy(name="alone"), 1)
    assert alone.train == pytest.approx(30.0)
    assert alone.last == pytest.approx(10 * (alone.rollout + 30.0))


def test_sampling_beside_training_takes_less_time_than_one_after_the_other() -> None:
    apart, beside, ahead = (
        simulate(COSTS, Policy(name="", overlap=overlap, ahead=ahead), 2).last
        for overlap, ahead in ((False, 0), (True, 0), (True, 1))
    )
    assert ahead < beside < apart


def test_where_training_is_the_bottleneck_the_scheduling_decides_who_ends_first() -> None:
    """Alone, a step's rollouts take 13 s and its training 7.8 s; seats never run out, so that the gate decides nothing.
    Eight at once keep the trainer busy."""
    bound = Costs(decode_base=8.9 / 330, decode_load=0.0, train=7.8)
    fair, shortest = (
        simulate(bound, Policy(name="", seats=1 << 14, scheduling=scheduling), 8) for scheduling in Scheduling
    )
    assert fair.trainer_busy > 0.97
    assert fair.ends[0] > 0.9 * fair.last, "all end at about the same time"
    assert shortest.ends[0] < 0.4 * fair.ends[0]
    assert fmean(shortest.ends) < 0.75 * fmean(fair.ends)
    # The last ones are fewer than keep the trainer busy: by what one takes alone it may end later, and does by less.
    assert shortest.last < 1.1 * fair.last


# ---------------------------------------------------------------- the reference


def test_the_columns_mean_what_they_are_taken_to_mean() -> None:
    """Serial from its first column, and the mean of N = 2 from its first and last: four equal waves of two."""
    serial = in_waves(Outcome((PUBLISHED[1].last / JOBS,), 0.0, 0.0, 0.0, 0.0))
    assert asdict(serial) == pytest.approx(asdict(PUBLISHED[1]), rel=3e-3)
    pair = in_waves(Outcome((PUBLISHED[2].first, PUBLISHED[2].last / 4), 0.0, 0.0, 0.0, 0.0))
    assert asdict(pair) == pytest.approx(asdict(PUBLISHED[2]), rel=3e-3)


@pytest.mark.slow
def test_the_fit_sees_one_and_two_experiments_only_and_comes_out_as_documented(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other figures for N = 4 and 8 move neither the parameters nor what is predicted; only the errors."""
    from benchmarks import node_reference

    documented = [r for r in document["records"] if r["table"] == "reference" and r["variant"] == node_table.FITTED]
    other = PUBLISHED | {n: node_reference.Figures(1.0, 2.0, 3.0, 4.0) for n in (4, 8)}
    monkeypatch.setattr(node_model, "PUBLISHED", other)
    again = node_model.validate(node_model.VARIANTS[0])
    assert again == documented
    monkeypatch.undo()
    headlines = node_model.headlines(again)
    assert headlines == {key: document["headlines"][key] for key in headlines}


@pytest.mark.slow
def test_the_simulation_comes_out_as_documented(document: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit and what it says of the reference, and clora's policies at the reference's N = 8: half a minute of the
    whole's three. The documented figures were made on another machine; its processor must not matter."""
    documented: list[dict[str, Any]] = document["records"]
    fitted = node_model.validate(node_model.VARIANTS[0])
    assert fitted == [r for r in documented if r.get("variant") == fitted[0]["variant"]]
    monkeypatch.setattr(node_model, "SWEEP", {8: node_model.POLICIES})
    cases = node_model.sweep_cases(Costs(**fitted[0]["costs"]))
    policies = node_model.sweep(Costs(**fitted[0]["costs"]), {case: simulate(*case) for case in cases})
    assert policies == [r for r in documented if r["table"] == "policies" and r["jobs"] == 8]


def test_the_headlines_follow_from_the_documented_records(document: dict[str, Any]) -> None:
    assert node_model.headlines(document["records"]) == document["headlines"]


def test_fitted_parameters_do_not_depend_on_the_processor(document: dict[str, Any]) -> None:
    """Their last bits would: numpy solves the fit's equations, and BLAS has a kernel for each processor."""
    for record in document["records"]:
        for value in record.get("costs", {}).values():
            assert value == float(f"{value:.6g}")


def test_the_page_is_rendered_from_its_document_and_says_what_it_is(document: dict[str, Any]) -> None:
    page = node_table.render(document)
    assert page + "\n" == (DOCS / "node_model.md").read_text()
    assert not document["commit"].endswith("-dirty")
    assert page.startswith("# Simulation")
    captions = [line for line in page.splitlines() if line.startswith("|---")]
    assert page.count("**Simulation.**") == len(captions) > 0
    assert all(name.startswith("sim_") for name in document["headlines"])


def test_the_plot_says_that_it_is_a_simulation(document: dict[str, Any], tmp_path: Path) -> None:
    node_table.plot(document, tmp_path / "again.svg")
    for path in (tmp_path / "again.svg", DOCS / "node_model.svg"):
        assert "Simulation of the reference" in path.read_text()
