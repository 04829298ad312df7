"""What a step's groups say about the run, as named numbers. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from clora_engine.advantages import PLAIN, Scoring
from clora_engine.types import Group


def step_metrics(groups: Sequence[Group], scoring: Scoring = PLAIN) -> dict[str, float]:
    """Metrics of a step's groups.

    Returns:
        reward_mean, reward_std: over trajectories (standard deviation of the population)
        groups_without_spread: share of groups in which all that counts by `scoring` is equal, so that nothing can be
            learnt from them
        completion_tokens_mean, completion_tokens_max: tokens that the model wrote in a trajectory
        truncated: share of trajectories cut off by a token limit
        turns_mean: turns of the model in a trajectory
        tool_calls, tool_errors: numbers of calls, and of calls malformed or answered with an error
        sampled_tokens: all tokens that the model wrote, those of failed trajectories too
        environment_errors, environment_errors/<Reason>: numbers of trajectories that failed
        Failed trajectories count in the last two only; without any other, means are left out.
    """
    everything = [trajectory for group in groups for trajectory in group.trajectories]
    good = [trajectory for trajectory in everything if not trajectory.error]
    reasons = Counter(trajectory.error.partition(":")[0] for trajectory in everything if trajectory.error)
    metrics = {
        "sampled_tokens": float(sum(sum(trajectory.mask) for trajectory in everything)),
        "environment_errors": float(len(everything) - len(good)),
        **{f"environment_errors/{reason}": float(count) for reason, count in sorted(reasons.items())},
    }
    if not good:
        return metrics
    rewards = [trajectory.reward for trajectory in good]
    lengths = [sum(trajectory.mask) for trajectory in good]
    flat = [not scoring.has_spread(group) for group in groups]
    return metrics | {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "groups_without_spread": statistics.fmean(flat),
        "completion_tokens_mean": statistics.fmean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated": statistics.fmean(trajectory.truncated for trajectory in good),
        "turns_mean": statistics.fmean(trajectory.turns for trajectory in good),
        "tool_calls": float(sum(trajectory.tool_calls for trajectory in good)),
        "tool_errors": float(sum(trajectory.tool_errors for trajectory in good)),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of an episode that was played to measure. error: as Trajectory's."""

    reward: float
    error: str


def evaluation_metrics(greedy: Sequence[Outcome], drawn: Sequence[Sequence[Outcome]]) -> dict[str, float]:
    """Metrics of an evaluation (see Rollouts.evaluate). greedy: of an episode for each example. drawn: several, or none
    for all."""
    everything = [*greedy, *(episode for several in drawn for episode in several)]
    good = [episode.reward for episode in greedy if not episode.error]
    metrics = {"eval_examples": float(len(good)), "eval_errors": float(sum(bool(e.error) for e in everything))}
    if good:
        metrics["eval_accuracy"] = statistics.fmean(_right(good))
        metrics["eval_reward"] = statistics.fmean(good)
    counted = [_right([e.reward for e in several if not e.error]) for several in drawn]
    if any(counted):
        metrics["eval_pass_at_k"] = statistics.fmean(any(several) for several in counted if several)
        metrics["eval_mean_at_k"] = statistics.fmean(right for several in counted for right in several)
    return metrics


def _right(rewards: Sequence[float]) -> list[bool]:
    return [reward >= 1.0 for reward in rewards]
