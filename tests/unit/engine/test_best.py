"""Which commit is the best, by what was measured of it."""

from __future__ import annotations

import pytest

from clora_engine.best import Best, better, measured


def best(step: int, value: float, metric: str = "evalAccuracy") -> Best:
    return Best(step=step, metric=metric, value=value)


def test_accuracy_measures_the_step_itself_and_reward_what_it_was_drawn_with() -> None:
    values = {"step": 7, "eval_accuracy": 0.5, "reward_mean": 0.25, "drawn_with": 6.0}
    assert measured(values, evaluates=True) == best(7, 0.5)
    assert measured(values, evaluates=False) == best(6, 0.25, "rewardMean")
    assert measured({"step": 7, "reward_mean": 0.25, "drawn_with": 6.0}, evaluates=True) is None
    assert measured({"step": 7, "reward_mean": 0.25}, evaluates=False) is None  # of several versions
    assert measured({"step": 0}, evaluates=False) is None


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
    assert better(before, found, commits) == after
