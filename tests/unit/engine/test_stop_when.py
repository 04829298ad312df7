"""stopWhen: met by numbers only, in a row, and by nothing that is missing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from clora_api.v1alpha1.experiment import StopWhen
from clora_engine.stop_when import is_met, reason

REWARDS = [0.2, 0.95, 0.9]


def lines(values: list[Any], name: str = "reward_mean") -> list[dict[str, Any]]:
    return [{"step": step, name: value} for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "steps", "met"),
    [
        ([], 1, False),
        ([0.2, 0.9], 1, True),  # the bound itself keeps it
        ([0.95, 0.89], 1, False),  # the last one counts
        (REWARDS, 2, True),
        (REWARDS, 3, False),
        ([0.95], 2, False),  # too few
        ([0.95, math.nan], 1, False),
        ([0.95, math.nan, 0.95], 2, False),
        ([math.inf], 1, False),
        (["0.95"], 1, False),
    ],
)
def test_at_least(values: list[Any], steps: int, met: bool) -> None:
    assert is_met(StopWhen(at_least="0.9", steps=steps), lines(values)) is met


def test_at_most() -> None:
    rule = StopWhen(metric="loss", at_most="1e-2")
    assert is_met(rule, lines([0.5, 0.01], "loss"))
    assert not is_met(rule, lines([0.011], "loss"))
    assert not is_met(rule, lines([-math.inf], "loss"))


def test_a_missing_metric_never_meets_and_steps_between_evaluations_are_passed_over() -> None:
    rule = StopWhen(metric="evalAccuracy", at_least="0.8", steps=2)
    assert not is_met(rule, lines([1.0, 1.0, 1.0]))
    seen: list[dict[str, Any]] = [{"eval_accuracy": 0.85}, {}, {"eval_accuracy": None}, {"eval_accuracy": 0.9}, {}]
    assert is_met(rule, seen)
    assert not is_met(rule, [*seen, {"eval_accuracy": 0.7}])


def test_the_reason_is_a_sentence() -> None:
    assert reason(StopWhen(at_least="0.9", steps=3)) == "stopWhen: rewardMean was at least 0.9 for 3 steps in a row"
    assert reason(StopWhen(metric="kl", at_most="0.1")) == "stopWhen: kl was at most 0.1 for one step"


def test_other_metrics_are_refused() -> None:
    with pytest.raises(ValidationError, match="rewardMean"):
        StopWhen.model_validate({"metric": "reward_mean", "atLeast": "0.9"})
