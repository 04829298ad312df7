"""Each loss in FP64: its value and gradient by hand, its metrics, and the log-probs that feed it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clora_engine import trainer_logprobs
from clora_engine.losses import TrainedTokens, loss_sum, metric_sums, token_losses
from clora_engine.trainer_logprobs import token_logprobs
from clora_engine.types import Loss

NAMES = ["CrossEntropy", "ImportanceSampling", "PPO", "CISPO", "DRO"]
# Ratios below, inside and above the clip range, under both signs of the advantage.
RATIOS = torch.tensor([0.5, 0.95, 1.0, 1.1, 1.6, 0.5, 0.95, 1.1, 1.6], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, -1.0, -0.5, -2.0, -1.0], dtype=torch.float64)
OLD = -torch.linspace(0.5, 3.0, len(RATIOS), dtype=torch.float64)
WEIGHTS = torch.linspace(0.5, 1.5, len(RATIOS), dtype=torch.float64)


def tokens() -> TrainedTokens:
    return TrainedTokens(WEIGHTS, OLD, ADVANTAGES)


def by_hand(loss: Loss, ratio: float, advantage: float, logp: float) -> tuple[float, float]:
    """One token's loss and its derivative in log p, written out from the published formula."""
    clipped = min(max(ratio, loss.clip_low), loss.clip_high)
    if loss.name == "CrossEntropy":
        return -logp, -1.0
    if loss.name == "ImportanceSampling":
        return -ratio * advantage, -ratio * advantage  # d r / d log p = r
    if loss.name == "PPO":
        kept = ratio * advantage <= clipped * advantage
        return -min(ratio * advantage, clipped * advantage), -ratio * advantage if kept else 0.0
    if loss.name == "CISPO":
        return -clipped * advantage * logp, -clipped * advantage
    gap = math.log(ratio)
    return -(logp * advantage - loss.beta / 2 * gap**2), -(advantage - loss.beta * gap)


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_those_of_the_published_formula(name: Any) -> None:
    loss = Loss(name=name, denominator=7.0, clip_low=0.8, clip_high=1.2, beta=0.3)
    logp = (OLD + RATIOS.log()).requires_grad_()
    total = loss_sum(loss, logp, tokens())
    (gradient,) = torch.autograd.grad(total, logp)
    hand = [
        by_hand(loss, float(r), float(a), float(lp)) for r, a, lp in zip(RATIOS, ADVANTAGES, logp.detach(), strict=True)
    ]
    values, slopes = (torch.tensor(column, dtype=torch.float64) for column in zip(*hand, strict=True))
    torch.testing.assert_close(total, (WEIGHTS * values).sum() / 7.0, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, WEIGHTS * slopes / 7.0, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CISPO"])  # CISPO stops a gradient on purpose
def test_gradcheck(name: Any) -> None:
    loss = Loss(name=name, denominator=3.0)
    logp = (OLD + RATIOS.log()).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_losses(loss, x, tokens()), (logp,))


def test_thresholds_are_absolute_ratios() -> None:
    loss = Loss(name="PPO", denominator=1.0, clip_low=0.5, clip_high=1.6)
    torch.testing.assert_close(token_losses(loss, OLD + RATIOS.log(), tokens()), -RATIOS * ADVANTAGES)


def test_metrics() -> None:
    entropies = torch.linspace(1.0, 2.0, len(RATIOS), dtype=torch.float64)
    count = len(RATIOS)
    sums = metric_sums(Loss(name="PPO", denominator=1.0), OLD + RATIOS.log(), entropies, tokens())
    means = {name: float(value) / count for name, value in sums.items()}
    assert means == pytest.approx(
        {
            "entropy": 1.5,
            "ratio": float(RATIOS.mean()),
            "ratio_deviation": float((RATIOS - 1).abs().mean()),
            "kl": float(-RATIOS.log().mean()),
            "kl_k3": float((RATIOS - 1 - RATIOS.log()).mean()),
            "clip_share": 2 / count,  # 1.6 under a positive advantage, 0.5 under a negative one
        }
    )
    cispo = metric_sums(Loss(name="CISPO", denominator=1.0), OLD + RATIOS.log(), entropies, tokens())
    assert float(cispo["clip_share"]) == 4
    assert metric_sums(Loss(name="CrossEntropy", denominator=1.0), OLD, entropies, tokens()).keys() == {"entropy"}


# --------------------------------------------------------------------------------------------- log-probs


def head(bias: bool) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(6, 11, bias=bias, dtype=torch.float64).requires_grad_(False)


def reference(hidden: Tensor, layer: nn.Linear, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (layer(hidden) / temperature).log_softmax(-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 25, 10_000])
def test_token_logprobs(monkeypatch: pytest.MonkeyPatch, chunk: int, bias: bool) -> None:
    monkeypatch.setattr(trainer_logprobs, "CHUNK_ELEMENTS", chunk)
    layer = head(bias)
    hidden = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    target = torch.tensor([0, 10, 3, 3, 7])
    ours, entropies = token_logprobs(hidden, layer, target, 0.7)
    wanted, wanted_entropies = reference(hidden, layer, target, 0.7)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropies, wanted_entropies, rtol=1e-12, atol=1e-12)
    assert not entropies.requires_grad
    assert torch.autograd.gradcheck(lambda h: token_logprobs(h, layer, target, 0.7)[0], (hidden,))


def test_token_logprobs_of_bfloat16_are_float32() -> None:
    layer = head(False).to(torch.bfloat16)
    hidden = torch.ones(2, 6, dtype=torch.bfloat16, requires_grad=True)
    ours, _ = token_logprobs(hidden, layer, torch.tensor([1, 2]), 1.0)
    assert ours.dtype == torch.float32
    ours.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
