"""The losses, per token, with the names, signs and thresholds of the Tinker API, and their metrics.

Every loss is a sum over trained tokens (weight ≠ 0) of weight x term, divided by the caller's denominator. With p the
trained policy, q the sampler, r = p(token)/q(token), and A the advantage, the terms are

====================  ================================================================================
CrossEntropy          -log p
ImportanceSampling    -r A
PPO                   -min(r A, clip(r, clip_low, clip_high) A)       Schulman et al. 2017, 1707.06347
CISPO                 -stop_gradient(clip(r, clip_low, clip_high)) A log p     MiniMax 2025, 2506.13585
DRO                   -(A log p - beta/2 (log p - log q)²)         Richemond et al. 2024, 2405.19107
====================  ================================================================================

Thresholds are absolute ratios (0.8 and 1.2), not an epsilon. Tokens of weight 0 are selected away before anything is
computed and never multiplied by zero, so a non-finite number in them cannot reach the loss.

Left out: means over sequences or groups (the denominator is the caller's), entropy and KL terms in the loss.
"""

# ruff: noqa: N815 (fields carry shape suffixes)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clora_engine.types import Loss


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """What the loss needs of its tokens besides the policy's log-probs; all of one length, in the log-probs' dtype.

    weights_T, logprobs_T (the sampler's, at the sampling temperature), advantages_T.
    """

    weights_T: Tensor
    logprobs_T: Tensor
    advantages_T: Tensor


def token_losses(loss: Loss, logprobs_T: Tensor, tokens: TrainedTokens) -> Tensor:
    """The loss term of each token, unweighted and undivided (T); differentiable in `logprobs_T`."""
    if loss.name == "CrossEntropy":
        return -logprobs_T
    log_ratio_T, advantages_T = logprobs_T - tokens.logprobs_T, tokens.advantages_T
    if loss.name == "DRO":
        return -(logprobs_T * advantages_T - 0.5 * loss.beta * log_ratio_T.square())
    ratio_T = log_ratio_T.exp()
    if loss.name == "ImportanceSampling":
        return -ratio_T * advantages_T
    clipped_T = ratio_T.clamp(loss.clip_low, loss.clip_high)
    if loss.name == "PPO":
        return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    assert loss.name == "CISPO", loss.name
    return -clipped_T.detach() * advantages_T * logprobs_T


def loss_sum(loss: Loss, logprobs_T: Tensor, tokens: TrainedTokens) -> Tensor:
    """Scalar: the weighted sum of the token losses over the denominator."""
    return (tokens.weights_T * token_losses(loss, logprobs_T, tokens)).sum() / loss.denominator


@torch.no_grad()
def metric_sums(loss: Loss, logprobs_T: Tensor, entropies_T: Tensor, tokens: TrainedTokens) -> dict[str, Tensor]:
    """Sums over the tokens, in FP64, that divided by the number of tokens give the metrics.

    entropy          of the policy at each trained token's position, nats
    ratio            r
    ratio_deviation  |r - 1|
    kl               KL(q ‖ p) by its plain estimator log q - log p, nats
    kl_k3            the same by r - 1 - log r, which is never negative (Schulman 2020, "Approximating KL Divergence")
    clip_share       share of tokens the clip takes the gradient from (PPO) or whose ratio it changes (CISPO)

    CrossEntropy knows no sampler and reports the entropy alone.
    """
    sums = {"entropy": entropies_T}
    if loss.name != "CrossEntropy":
        log_ratio_T = logprobs_T.double() - tokens.logprobs_T.double()
        ratio_T = log_ratio_T.exp()
        sums["ratio"] = ratio_T
        sums["ratio_deviation"] = (ratio_T - 1).abs()
        sums["kl"] = -log_ratio_T
        sums["kl_k3"] = ratio_T - 1 - log_ratio_T
        low_T, high_T = ratio_T < loss.clip_low, ratio_T > loss.clip_high
        if loss.name == "PPO":
            sums["clip_share"] = (low_T & (tokens.advantages_T < 0)) | (high_T & (tokens.advantages_T > 0))
        elif loss.name == "CISPO":
            sums["clip_share"] = low_T | high_T
    return {name: values_T.double().sum() for name, values_T in sums.items()}
