"""The simulated node: its clock, and its parts against computed times."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest

from benchmarks import virtual_time
from benchmarks.node import Costs, Outcome, Policy, simulate
from benchmarks.node_reference import JOBS, PUBLISHED, in_waves
from benchmarks.node_sampler import Decoding, _Decoder
from benchmarks.node_trainer import ClientTrainer, StepTrainer

COSTS = Costs(decode_base=0.3, decode_load=1e-5, train=30.0)


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
        await trainer.step(name)
        return loop.time()

    ends = await asyncio.gather(*(one(name) for name in "abc"))
    await trainer.close()
    return [*ends, trainer.busy_seconds]


def test_in_the_engines_client_an_optimizer_step_waits_behind_the_passes_of_all_others() -> None:
    async def main() -> list[float]:
        return await _three_steps(ClientTrainer(10.0, 1, 0.0))

    assert virtual_time.run(main()) == pytest.approx([30.0, 30.0, 30.0, 30.0])


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
        return await _three_steps(ClientTrainer(10.0, 8, 0.5))

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


# ---------------------------------------------------------------- the reference


def test_the_columns_mean_what_they_are_taken_to_mean() -> None:
    """Serial from its first column, and the mean of N = 2 from its first and last: four equal waves of two."""
    serial = in_waves(Outcome((PUBLISHED[1].last / JOBS,), 0.0, 0.0, 0.0, 0.0))
    assert asdict(serial) == pytest.approx(asdict(PUBLISHED[1]), rel=3e-3)
    pair = in_waves(Outcome((PUBLISHED[2].first, PUBLISHED[2].last / 4), 0.0, 0.0, 0.0, 0.0))
    assert asdict(pair) == pytest.approx(asdict(PUBLISHED[2]), rel=3e-3)
