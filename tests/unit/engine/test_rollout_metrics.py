"""A step's numbers."""

from __future__ import annotations

from clora_api.v1alpha1.experiment import TruncatedCompletions
from clora_engine.advantages import Scoring
from clora_engine.rollout_metrics import step_metrics
from clora_engine.types import Group, Trajectory


def trajectory(
    reward: float,
    tokens: int = 2,
    *,
    turns: int = 2,
    tool_calls: int = 2,
    tool_errors: int = 0,
    truncated: bool = False,
    error: str = "",
) -> Trajectory:
    return Trajectory(
        ids=[1] * (tokens + 1),
        mask=[0] + [1] * tokens,
        logprobs=[0.0] * (tokens + 1),
        reward=reward,
        turns=turns,
        tool_calls=tool_calls,
        tool_errors=tool_errors,
        truncated=truncated,
        error=error,
    )


def group(*trajectories: Trajectory) -> Group:
    return Group(index=0, example=0, version_step=0, prompt=[1], trajectories=list(trajectories))


def test_a_step() -> None:
    metrics = step_metrics(
        [
            group(trajectory(1.0), trajectory(0.0, 4, truncated=True, turns=1, tool_calls=0)),
            group(trajectory(1.0, tool_errors=1), trajectory(1.0), trajectory(0.0, 9, error="Timeout: late")),
            group(trajectory(0.0, 0, error="PromptTooLong: 9 tokens"), trajectory(0.0, 1, error="Timeout: late")),
        ]
    )
    assert metrics == {
        "reward_mean": 0.75,
        "reward_std": 0.4330127018922193,
        "groups_without_spread": 2 / 3,
        "completion_tokens_mean": 2.5,
        "completion_tokens_max": 4.0,
        "truncated": 0.25,
        "turns_mean": 1.75,
        "tool_calls": 6.0,
        "tool_errors": 1.0,
        "sampled_tokens": 20.0,
        "environment_errors": 3.0,
        "environment_errors/PromptTooLong": 1.0,
        "environment_errors/Timeout": 2.0,
    }


def test_a_step_without_any_good_trajectory() -> None:
    assert step_metrics([group(trajectory(0.0, 3, error="Timeout: late"))]) == {
        "sampled_tokens": 3.0,
        "environment_errors": 1.0,
        "environment_errors/Timeout": 1.0,
    }
    assert step_metrics([]) == {"sampled_tokens": 0.0, "environment_errors": 0.0}


def test_spread_is_what_the_scoring_leaves_of_it() -> None:
    one = group(trajectory(1.0), trajectory(1.0), trajectory(0.0, truncated=True))
    assert step_metrics([one])["groups_without_spread"] == 0
    masked = Scoring(truncated=TruncatedCompletions.MASK)
    assert step_metrics([one], masked)["groups_without_spread"] == 1
