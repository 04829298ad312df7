"""What is done to a batch between its advantages and the trainer: per-token terms, importance weights, minibatches.

The terms go into the advantages, as in the Tinker cookbook, so that every loss takes them, with its ratio and its clip.
With p the policy, q the sampler and s the policy as it started, the gradient of KL(p ‖ s) at a position is the mean of
log(p/s) ∇log p over tokens drawn from p, and that of the entropy of p the mean of -log(p) ∇log p; so

    A ← A - kl (log q - log s - mean) - entropy (log q - mean)

is on average a step down the KL at each position and up the entropy. The means over the batch are baselines: where each
token weighs the same they change no expectation, and they take most of the noise away. Where each trajectory does
(lossNormalization Sequences), a token's weight depends on how long its trajectory became; the terms are then weighed by
trajectory as all else is, and are the gradients of KL and entropy by approximation only. Pure; log-probs come from the
caller.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from clora_engine.advantages import Batch
from clora_engine.types import Completion, Row

LogProbs = list[list[list[float]]]
"""row -> completion -> token, nats: as the trainer's `forward` gives them."""

LARGEST_EXPONENT = 700.0  # beyond, exp overflows
SMALLEST_WEIGHT = 2.0**-126  # below, FP32 has no full precision any more, or 0


def with_kl_penalty(batch: Batch, start: LogProbs, coefficient: float) -> tuple[Batch, float]:
    """Takes coefficient x (log q - log s, less its mean) from each trained token's advantage.

    Args:
        start: log-probs of every completion token under the policy as it started, at the sampling temperature.

    Returns:
        The batch, and the mean itself: KL(q ‖ s) by its plain estimator, nats.
    """
    above = [
        [
            [q - s for q, s in zip(c.logprobs, logprobs, strict=True)]
            for c, logprobs in zip(row.completions, of, strict=True)
        ]
        for row, of in zip(batch.rows, start, strict=True)
    ]
    return _less(batch, above, coefficient)


def with_entropy_bonus(batch: Batch, coefficient: float) -> Batch:
    """Takes coefficient x (log q, less its mean) from each trained token's advantage."""
    return _less(batch, [[c.logprobs for c in row.completions] for row in batch.rows], coefficient)[0]


def with_importance_weights(batch: Batch, trainer: LogProbs, cap: float) -> tuple[Batch, dict[str, float]]:
    """Truncated importance sampling (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"; Hilton et al., 2022, arXiv:2110.00641, for losses relative to another policy than the one that drew).

    The loss gets the trainer's log-probs to compare with, and each token its weight times min(trainer / sampler, cap);
    a token whose weight is then too small for FP32 gets none.

    Args:
        trainer: log-probs under the trainer's policy before the step's first update, at the sampling temperature.

    Returns:
        The batch, and over its trained tokens: `sampler_kl`, KL(sampler ‖ trainer) by the estimator r - 1 - log r;
        `importance_weight`, the mean weight; `importance_capped`, the share at the cap.
    """
    log_ratios: list[float] = []

    def reweighed(completion: Completion, logprobs: list[float]) -> Completion:
        weights = []
        for weight, new, old in zip(completion.weights, logprobs, completion.logprobs, strict=True):
            log_ratio = min(new - old, LARGEST_EXPONENT) if weight else 0.0
            if weight:
                log_ratios.append(log_ratio)
            product = weight * min(math.exp(log_ratio), cap)
            weights.append(product if product >= SMALLEST_WEIGHT else 0.0)
        return Completion(ids=completion.ids, weights=weights, logprobs=logprobs, advantages=completion.advantages)

    rows = _map(batch.rows, trainer, reweighed)
    if not log_ratios:
        return Batch(rows, batch.denominator), {}
    ratios = [math.exp(log_ratio) for log_ratio in log_ratios]
    return Batch(rows, batch.denominator), {
        "sampler_kl": statistics.fmean(r - 1 - log_r for r, log_r in zip(ratios, log_ratios, strict=True)),
        "importance_weight": statistics.fmean(min(r, cap) for r in ratios),
        "importance_capped": statistics.fmean(r > cap for r in ratios),
    }


def minibatches(batch: Batch, count: int, seed: str, sizes: Sequence[float]) -> Iterator[Batch]:
    """Cuts a batch into up to `count` parts of whole rows, in an order that `seed` decides; parts in which nothing has
    a weight are left out.

    The denominators share out the batch's by `sizes`, so that each part's loss is a mean over what it holds: with equal
    sizes, the part's gradient is on average the whole batch's.

    Args:
        sizes: row_sizes of the rows before importance weights: those say what a token counts, not how many there are.
    """
    pairs = list(zip(batch.rows, sizes, strict=True))
    if count > 1:
        random.Random(seed).shuffle(pairs)  # noqa: S311 - an order, not a secret
    whole = sum(sizes)
    count = min(count, len(pairs))
    for start, end in pairwise(len(pairs) * part // count for part in range(count + 1)):
        part = [row for row, _ in pairs[start:end]]
        if any(any(completion.weights) for row in part for completion in row.completions):
            yield Batch(part, batch.denominator * sum(size for _, size in pairs[start:end]) / whole)


def row_sizes(rows: Sequence[Row]) -> list[float]:
    """Of each row the sum of its tokens' weights."""
    return [sum(sum(completion.weights) for completion in row.completions) for row in rows]


def _less(batch: Batch, terms: LogProbs, coefficient: float) -> tuple[Batch, float]:
    trained = [
        term
        for row, of in zip(batch.rows, terms, strict=True)
        for completion, values in zip(row.completions, of, strict=True)
        for weight, term in zip(completion.weights, values, strict=True)
        if weight
    ]
    mean = statistics.fmean(trained) if trained else 0.0

    def lessened(completion: Completion, values: list[float]) -> Completion:
        advantages = [
            advantage - coefficient * (value - mean) if weight else advantage
            for weight, advantage, value in zip(completion.weights, completion.advantages, values, strict=True)
        ]
        return Completion(
            ids=completion.ids, weights=completion.weights, logprobs=completion.logprobs, advantages=advantages
        )

    return Batch(_map(batch.rows, terms, lessened), batch.denominator), mean


def _map(rows: Sequence[Row], values: LogProbs, change: Callable[[Completion, list[float]], Completion]) -> list[Row]:
    return [
        Row(prompt=row.prompt, completions=[change(c, v) for c, v in zip(row.completions, of, strict=True)])
        for row, of in zip(rows, values, strict=True)
    ]
