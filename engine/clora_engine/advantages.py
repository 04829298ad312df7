"""From groups, or demonstrations, to what the trainer takes: rows of tokens with an advantage or a weight each.

An advantage belongs to a trajectory and is the same for all of its tokens that the model wrote. Trajectories that an
error ended are left out before anything is computed. Identical trajectories stay separate completions: the trainer
merges them.

The denominator is the number of tokens that the model wrote in all trajectories without error, those of dropped groups
included: a step in which few groups carry a signal makes a small update, not a large one out of few samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from clora_engine.chat import Demonstration
from clora_engine.types import Completion, Group, Row, Trajectory

EPSILON = 1e-6  # keeps the division by a tiny standard deviation finite


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for forward_backward and the denominator of their loss. No rows: nothing to be learnt, skip the update."""

    rows: list[Row]
    denominator: float


def grpo(groups: Sequence[Group], *, normalize_by_std: bool = True) -> Batch:
    """Group-relative advantages (Shao et al., 2024, arXiv:2402.03300).

    A = (r - mean) / (std + EPSILON) with mean and population standard deviation of the group; with normalize_by_std
    off, A = r - mean (Liu et al., 2025, arXiv:2503.20783). Groups in which all rewards are equal carry no signal and
    are dropped.
    """

    def advantages(rewards: list[float]) -> list[float]:
        if not rewards or min(rewards) == max(rewards):
            return [0.0] * len(rewards)
        mean = statistics.fmean(rewards)
        scale = statistics.pstdev(rewards) + EPSILON if normalize_by_std else 1.0
        return [(reward - mean) / scale for reward in rewards]

    good = [_without_errors(group) for group in groups]
    return _batch(groups, good, [advantages([t.reward for t in trajectories]) for trajectories in good])


def reinforce(groups: Sequence[Group]) -> Batch:
    """REINFORCE (Williams, 1992) with the mean reward of the step as baseline: A = r - mean over all trajectories.

    Groups whose rewards all equal that mean carry no signal and are dropped.
    """
    good = [_without_errors(group) for group in groups]
    rewards = [trajectory.reward for trajectories in good for trajectory in trajectories]
    baseline = statistics.fmean(rewards) if rewards else 0.0
    if rewards and min(rewards) == max(rewards):
        baseline = rewards[0]  # not a rounding error away from it
    return _batch(groups, good, [[t.reward - baseline for t in trajectories] for trajectories in good])


def sft(demonstrations: Sequence[Demonstration]) -> Batch:
    """Demonstrations for CrossEntropy: the assistant's tokens weigh 1, others 0; the denominator is their number."""
    rows = [
        Row(
            prompt=demonstration.prompt,
            completions=[
                Completion(
                    ids=demonstration.ids,
                    weights=[float(m) for m in demonstration.mask],
                    logprobs=[0.0] * len(demonstration.ids),
                    advantages=[0.0] * len(demonstration.ids),
                )
            ],
        )
        for demonstration in demonstrations
    ]
    return Batch(rows, float(sum(sum(demonstration.mask) for demonstration in demonstrations)))


def _without_errors(group: Group) -> list[Trajectory]:
    return [trajectory for trajectory in group.trajectories if not trajectory.error]


def _batch(groups: Sequence[Group], good: Sequence[list[Trajectory]], advantages: Sequence[list[float]]) -> Batch:
    rows = [
        Row(prompt=group.prompt, completions=[_completion(t, a) for t, a in zip(trajectories, values, strict=True)])
        for group, trajectories, values in zip(groups, good, advantages, strict=True)
        if any(values)
    ]
    tokens = sum(sum(trajectory.mask) for trajectories in good for trajectory in trajectories)
    return Batch(rows, float(tokens))


def _completion(trajectory: Trajectory, advantage: float) -> Completion:
    return Completion(
        ids=trajectory.ids,
        weights=[float(m) for m in trajectory.mask],
        logprobs=trajectory.logprobs,
        advantages=[advantage * m for m in trajectory.mask],
    )
