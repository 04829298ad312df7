"""From groups, or demonstrations, to what the trainer takes: rows of tokens with an advantage or a weight each.

An advantage belongs to a trajectory and is the same for all of its tokens that the model wrote. Trajectories that an
error ended are left out before anything is computed. Identical trajectories stay separate completions: the trainer
merges them.

The denominator is the number of tokens that the model wrote (by sequences: the number of trajectories) in all that
counts, dropped groups included: a step in which few groups carry a signal makes a small update, not a large one out of
few samples. Terms that differ from token to token, and the cut into minibatches: batches.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from clora_api.v1alpha1.experiment import TruncatedCompletions
from clora_engine.chat import Demonstration
from clora_engine.types import Completion, Group, Row, Trajectory

EPSILON = 1e-6  # keeps the division by a tiny standard deviation finite


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for forward_backward and the denominator of their loss. No rows: nothing to be learnt, skip the update."""

    rows: list[Row]
    denominator: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What a group's trajectories count, before they are compared.

    truncated: of those that a token limit cut off. Mask: left out, of baselines too (Yu et al., 2025, DAPO,
    arXiv:2503.14476, "overlong filtering"). Punish: `penalty` is taken from their rewards.
    """

    truncated: TruncatedCompletions = TruncatedCompletions.KEEP
    penalty: float = 1.0

    def counted(self, group: Group) -> list[tuple[Trajectory, float]]:
        """The trajectories that count, with their rewards."""
        good = [t for t in group.trajectories if not t.error]
        if self.truncated is TruncatedCompletions.MASK:
            return [(t, t.reward) for t in good if not t.truncated]
        punished = self.truncated is TruncatedCompletions.PUNISH
        return [(t, t.reward - self.penalty if punished and t.truncated else t.reward) for t in good]

    def has_spread(self, group: Group) -> bool:
        """Whether GRPO can learn from the group: its rewards are not all the same."""
        return len({reward for _, reward in self.counted(group)}) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How advantages become a batch.

    by_sequences: each trajectory weighs 1, shared out over its tokens (as in Shao et al., 2024), instead of each token
    (as in DAPO). keep_flat: rows whose advantages are all 0 stay, because other terms are to be added to them.
    """

    by_sequences: bool = False
    keep_flat: bool = False


PLAIN, TOKENS = Scoring(), Shape()


def grpo(
    groups: Sequence[Group], *, normalize_by_std: bool = True, scoring: Scoring = PLAIN, shape: Shape = TOKENS
) -> Batch:
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

    counted = [scoring.counted(group) for group in groups]
    return _batch(groups, counted, [advantages([reward for _, reward in pairs]) for pairs in counted], shape)


def reinforce(groups: Sequence[Group], *, scoring: Scoring = PLAIN, shape: Shape = TOKENS) -> Batch:
    """REINFORCE (Williams, 1992) with the mean reward of the step as baseline: A = r - mean over all trajectories.

    Groups whose rewards all equal that mean carry no signal and are dropped.
    """
    counted = [scoring.counted(group) for group in groups]
    rewards = [reward for pairs in counted for _, reward in pairs]
    baseline = statistics.fmean(rewards) if rewards else 0.0
    if rewards and min(rewards) == max(rewards):
        baseline = rewards[0]  # not a rounding error away from it
    return _batch(groups, counted, [[reward - baseline for _, reward in pairs] for pairs in counted], shape)


def sft(demonstrations: Sequence[Demonstration], *, shape: Shape = TOKENS) -> Batch:
    """Demonstrations for CrossEntropy: the assistant's tokens have the weight, others 0."""
    rows = [
        Row(
            prompt=demonstration.prompt,
            completions=[
                Completion(
                    ids=demonstration.ids,
                    weights=_weights(demonstration.mask, shape),
                    logprobs=[0.0] * len(demonstration.ids),
                    advantages=[0.0] * len(demonstration.ids),
                )
            ],
        )
        for demonstration in demonstrations
    ]
    return Batch(rows, _denominator([demonstration.mask for demonstration in demonstrations], shape))


def _batch(
    groups: Sequence[Group],
    counted: Sequence[list[tuple[Trajectory, float]]],
    advantages: Sequence[list[float]],
    shape: Shape,
) -> Batch:
    rows = [
        Row(
            prompt=group.prompt,
            completions=[_completion(t, a, shape) for (t, _), a in zip(pairs, values, strict=True)],
        )
        for group, pairs, values in zip(groups, counted, advantages, strict=True)
        if any(values) or (shape.keep_flat and values)
    ]
    return Batch(rows, _denominator([t.mask for pairs in counted for t, _ in pairs], shape))


def _completion(trajectory: Trajectory, advantage: float, shape: Shape) -> Completion:
    return Completion(
        ids=trajectory.ids,
        weights=_weights(trajectory.mask, shape),
        logprobs=trajectory.logprobs,
        advantages=[advantage * m for m in trajectory.mask],
    )


def _weights(mask: Sequence[int], shape: Shape) -> list[float]:
    each = 1.0 / max(1, sum(mask)) if shape.by_sequences else 1.0
    return [each * m for m in mask]


def _denominator(masks: Sequence[Sequence[int]], shape: Shape) -> float:
    tokens = [sum(mask) for mask in masks]
    return float(sum(count > 0 for count in tokens) if shape.by_sequences else sum(tokens))
