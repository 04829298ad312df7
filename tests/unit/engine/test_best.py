"""Which commit is the best, by what was measured of it."""

from __future__ import annotations

import pytest

from clora_engine.best import Best, Rewards, better, evaluated
from clora_engine.types import Group, Trajectory


def best(step: int, value: float, metric: str = "evalAccuracy") -> Best:
    return Best(step=step, metric=metric, value=value)


def a_group(version: int, *rewards: float, error: str = "") -> Group:
    drawn = [Trajectory(ids=[1], mask=[1], logprobs=[-1.0], reward=r, turns=1, error=error) for r in rewards]
    return Group(index=0, example=0, version_step=version, prompt=[1], trajectories=drawn)


def test_accuracy_measures_the_step_itself() -> None:
    assert evaluated({"step": 7, "eval_accuracy": 0.5, "reward_mean": 0.25}) == [best(7, 0.5)]
    assert evaluated({"step": 7, "reward_mean": 0.25}) == []


def test_rewards_measure_the_versions_they_were_drawn_with_over_all_steps() -> None:
    rewards = Rewards()
    rewards.add([a_group(5, 1.0, 0.0), a_group(6, 1.0)])
    rewards.add([a_group(6, 0.5, 0.0), a_group(7, 1.0), a_group(6, 9.0, error="Timeout")])
    assert rewards.take(4) == []
    assert rewards.take(6) == [best(5, 0.5, "rewardMean"), best(6, 0.5, "rewardMean")]
    assert rewards.take(6) == []
    rewards.clear()
    assert rewards.take(7) == []


@pytest.mark.parametrize(
    ("before", "found", "commits", "after"),
    [
        (None, best(3, 0.5), {3}, best(3, 0.5)),
        (best(3, 0.5), None, {3, 4}, best(3, 0.5)),
        (best(3, 0.5), best(4, 0.6), {3, 4}, best(4, 0.6)),
        (best(3, 0.5), best(4, 0.5), {3, 4}, best(3, 0.5)),
        (best(3, 0.5), best(4, 0.6), {3, 5}, best(3, 0.5)),  # never committed
        (best(3, 0.5), best(4, 0.1), {4}, best(4, 0.1)),  # the old one was taken back
        (best(3, 0.9, "rewardMean"), best(4, 0.1), {3, 4}, best(4, 0.1)),  # evaluation was turned on
    ],
)
def test_the_best_is_the_highest_that_is_committed_and_of_equals_the_earlier(
    before: Best | None, found: Best | None, commits: set[int], after: Best
) -> None:
    assert better(before, [found] if found else [], commits) == after
