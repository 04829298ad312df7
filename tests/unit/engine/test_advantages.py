"""Groups and demonstrations to training rows, with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clora_api.v1alpha1.experiment import TruncatedCompletions
from clora_engine.advantages import Batch, Scoring, Shape, grpo, reinforce, sft
from clora_engine.chat import Demonstration
from clora_engine.types import Completion, Group, Row, Trajectory


def trajectory(
    reward: float, *, mask: tuple[int, ...] = (1, 0, 1), error: str = "", first: int = 7, truncated: bool = False
) -> Trajectory:
    return Trajectory(
        ids=[first, *range(len(mask) - 1)],
        mask=list(mask),
        logprobs=[-0.5 * m for m in mask],
        reward=reward,
        turns=1,
        error=error,
        truncated=truncated,
    )


def group(*trajectories: Trajectory, index: int = 0) -> Group:
    return Group(index=index, example=index, version_step=0, prompt=[index, 1], trajectories=list(trajectories))


def of(batch: Batch) -> list[list[float]]:
    """The advantage of each completion, which is that of its first token."""
    return [[completion.advantages[0] for completion in row.completions] for row in batch.rows]


def test_grpo_normalises_within_the_group() -> None:
    batch = grpo([group(*map(trajectory, [1.0, 0.0, 0.0, 0.0])), group(*map(trajectory, [1.0, 0.5]), index=1)])
    deviation = math.sqrt(3) / 4
    assert of(batch)[0] == pytest.approx([0.75 / deviation, *[-0.25 / deviation] * 3], rel=1e-5)
    assert of(batch)[1] == pytest.approx([1.0, -1.0], rel=1e-5)
    assert [row.prompt for row in batch.rows] == [[0, 1], [1, 1]]
    assert batch.denominator == 6 * 2


def test_grpo_without_standard_deviation() -> None:
    batch = grpo([group(*map(trajectory, [1.0, 0.0, 0.0, 0.0]))], normalize_by_std=False)
    assert of(batch) == [[0.75, -0.25, -0.25, -0.25]]


def test_tokens_of_tools_have_neither_weight_nor_advantage() -> None:
    batch = grpo([group(trajectory(1.0), trajectory(0.0))], normalize_by_std=False)
    assert batch.rows[0].completions[0] == Completion(
        ids=[7, 0, 1], weights=[1.0, 0.0, 1.0], logprobs=[-0.5, 0.0, -0.5], advantages=[0.5, 0.0, 0.5]
    )


@pytest.mark.parametrize("rewards", [[0.0] * 3, [1.0] * 3, [0.1] * 3, [1.0], []])
def test_groups_without_spread_are_dropped_but_counted(rewards: list[float]) -> None:
    batch = grpo([group(*map(trajectory, rewards)), group(trajectory(1.0), trajectory(0.0), index=1)])
    assert [row.prompt for row in batch.rows] == [[1, 1]]
    assert batch.denominator == 2 * len(rewards) + 4


def test_identical_trajectories_stay_separate() -> None:
    batch = grpo([group(trajectory(1.0), trajectory(1.0), trajectory(0.0, first=8))])
    assert [completion.ids[0] for completion in batch.rows[0].completions] == [7, 7, 8]


@pytest.mark.parametrize("estimator", [grpo, reinforce])
def test_failed_trajectories_are_left_out_before_anything_is_computed(estimator: object) -> None:
    good = [trajectory(1.0), trajectory(0.0)]
    failed = trajectory(0.0, error="Timeout: no answer", mask=(1,) * 9)
    assert callable(estimator)
    assert estimator([group(good[0], failed, good[1])]) == estimator([group(*good)])
    assert estimator([group(good[0], failed)]) == Batch([], 2.0)
    assert estimator([group(failed, failed)]) == Batch([], 0.0)


def test_reinforce_takes_the_mean_of_the_step() -> None:
    batch = reinforce([group(trajectory(1.0), trajectory(1.0)), group(trajectory(0.0), trajectory(0.0), index=1)])
    assert of(batch) == [[0.5, 0.5], [-0.5, -0.5]]
    assert batch.denominator == 8


def test_reinforce_drops_groups_that_equal_the_baseline() -> None:
    batch = reinforce([group(trajectory(0.5)), group(trajectory(0.0), index=1), group(trajectory(1.0), index=2)])
    assert of(batch) == [[-0.5], [0.5]]
    assert batch.denominator == 6
    assert reinforce([group(*map(trajectory, [0.1] * 3))]).rows == []
    assert reinforce([]) == Batch([], 0.0)


_REWARDS = st.lists(st.floats(-100, 100).map(lambda r: round(r, 3)), min_size=2, max_size=8)


@given(_REWARDS, st.booleans())
def test_grpo_advantages_sum_to_nothing_and_keep_the_order(rewards: list[float], normalize: bool) -> None:
    batch = grpo([group(*map(trajectory, rewards))], normalize_by_std=normalize)
    if len(set(rewards)) == 1:
        assert batch.rows == []
        return
    (advantages,) = of(batch)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    pairs = [*zip(rewards, advantages, strict=True)]
    assert all((r1 < r2) <= (a1 < a2) for r1, a1 in pairs for r2, a2 in pairs)
    if normalize:
        assert sum(a * a for a in advantages) / len(advantages) == pytest.approx(1.0, rel=1e-2)


def test_demonstrations_weigh_the_assistants_tokens() -> None:
    batch = sft([Demonstration([1, 2], [3, 4, 5], [1, 0, 1]), Demonstration([1], [6], [1])])
    assert batch.denominator == 3
    assert batch.rows[0] == Row(
        prompt=[1, 2],
        completions=[Completion(ids=[3, 4, 5], weights=[1.0, 0.0, 1.0], logprobs=[0.0] * 3, advantages=[0.0] * 3)],
    )
    assert sft([]) == Batch([], 0.0)


def test_by_sequences_a_long_trajectory_weighs_as_much_as_a_short_one() -> None:
    long, short, empty = trajectory(1.0, mask=(1, 1, 0, 1, 1)), trajectory(0.0, mask=(1,)), trajectory(0.0, mask=())
    for batch in (
        grpo([group(long, short, empty)], shape=Shape(by_sequences=True)),
        reinforce([group(long, short, empty)], shape=Shape(by_sequences=True)),
    ):
        assert [c.weights for c in batch.rows[0].completions] == [[0.25, 0.25, 0.0, 0.25, 0.25], [1.0], []]
        assert batch.denominator == 2  # a trajectory without a token has no loss
    shown = sft([Demonstration([1], [3, 4], [1, 1]), Demonstration([1], [6], [1])], shape=Shape(by_sequences=True))
    assert [row.completions[0].weights for row in shown.rows] == [[0.5, 0.5], [1.0]]
    assert shown.denominator == 2


def test_groups_without_spread_stay_for_terms_that_are_to_come() -> None:
    batch = grpo([group(trajectory(1.0), trajectory(1.0)), group(index=1)], shape=Shape(keep_flat=True))
    assert of(batch) == [[0.0, 0.0]]


def test_truncated_trajectories_count_as_they_are_or_not_or_less() -> None:
    one = group(trajectory(1.0), trajectory(0.5, truncated=True), trajectory(0.0))
    kept = grpo([one], normalize_by_std=False)
    assert of(kept) == [[0.5, 0.0, -0.5]]
    masked = Scoring(truncated=TruncatedCompletions.MASK)
    assert grpo([one], scoring=masked) == grpo([group(trajectory(1.0), trajectory(0.0))])
    punished = Scoring(truncated=TruncatedCompletions.PUNISH, penalty=2.0)
    assert of(grpo([one], normalize_by_std=False, scoring=punished)) == [pytest.approx([7 / 6, -8 / 6, 1 / 6])]
    assert of(reinforce([one], scoring=punished)) == [pytest.approx([7 / 6, -8 / 6, 1 / 6])]


def test_spread_is_that_of_what_counts() -> None:
    cut_off = group(trajectory(0.0), trajectory(0.0, truncated=True))
    assert not Scoring().has_spread(cut_off)
    assert Scoring(truncated=TruncatedCompletions.PUNISH).has_spread(cut_off)
    differ = group(trajectory(0.0), trajectory(1.0, truncated=True), trajectory(1.0, error="Timeout: late"))
    assert Scoring().has_spread(differ)
    assert not Scoring(truncated=TruncatedCompletions.MASK).has_spread(differ)
