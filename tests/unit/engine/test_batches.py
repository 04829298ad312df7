"""Per-token terms, importance weights and minibatches, with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from clora_engine.advantages import Batch
from clora_engine.batches import (
    minibatches,
    row_sizes,
    with_entropy_bonus,
    with_importance_weights,
    with_kl_penalty,
)
from clora_engine.losses import TrainedTokens, loss_sum
from clora_engine.types import Completion, Loss, Row


def completion(logprobs: list[float], *, advantage: float = 0.0, weights: list[float] | None = None) -> Completion:
    weights = weights or [1.0] * len(logprobs)
    return Completion(
        ids=list(range(len(logprobs))),
        weights=weights,
        logprobs=logprobs,
        advantages=[advantage if w else 0.0 for w in weights],
    )


def of(batch: Batch) -> list[list[float]]:
    return [c.advantages for row in batch.rows for c in row.completions]


def test_the_kl_penalty_is_centred_and_leaves_other_tokens_alone() -> None:
    first = completion([-1.0, -9.0, -2.0], advantage=1.0, weights=[1.0, 0.0, 1.0])
    batch = Batch([Row(prompt=[1], completions=[first, completion([-3.0])])], 3.0)
    penalised, kl = with_kl_penalty(batch, [[[-1.5, -1.0, -1.0], [-4.0]]], 0.5)
    assert kl == pytest.approx((0.5 - 1.0 + 1.0) / 3)
    expected = [[1.0 - 0.5 * (0.5 - kl), 0.0, 1.0 - 0.5 * (-1.0 - kl)], [-0.5 * (1.0 - kl)]]
    for found, wanted in zip(of(penalised), expected, strict=True):
        assert found == pytest.approx(wanted)
    assert penalised.rows[0].completions[0].weights == [1.0, 0.0, 1.0]
    assert penalised.denominator == 3.0


def gradients(advantages_V: torch.Tensor, logits_V: torch.Tensor) -> torch.Tensor:
    """Gradient that the loss ImportanceSampling gives to the logits, taken over all tokens with their probabilities:
    its mean over samples."""
    leaf_V = logits_V.clone().requires_grad_()
    logprobs_V = leaf_V.log_softmax(-1)
    tokens = TrainedTokens(logprobs_V.detach().exp(), logprobs_V.detach(), advantages_V)
    loss_sum(Loss(name="ImportanceSampling", denominator=1.0), logprobs_V, tokens).backward()
    assert leaf_V.grad is not None
    return leaf_V.grad


def every_token(logits_V: torch.Tensor) -> Batch:
    logprobs = logits_V.log_softmax(-1).tolist()
    return Batch([Row(prompt=[1], completions=[completion([value]) for value in logprobs])], 1.0)


def test_on_average_the_terms_are_the_gradients_of_kl_and_entropy() -> None:
    """Over a vocabulary of five: the mean over samples against autograd through the closed forms."""
    policy_V = torch.tensor([0.3, -1.0, 2.0, 0.1, 0.0], dtype=torch.float64)
    start_V = torch.tensor([1.0, 0.0, 0.5, -0.5, 0.2], dtype=torch.float64)
    start_logprobs_V = start_V.log_softmax(-1)
    penalised, _ = with_kl_penalty(every_token(policy_V), [[[v] for v in start_logprobs_V.tolist()]], 0.7)
    leaf_V = policy_V.clone().requires_grad_()
    logprobs_V = leaf_V.log_softmax(-1)
    (0.7 * (logprobs_V.exp() * (logprobs_V - start_logprobs_V)).sum()).backward()
    found_V = gradients(torch.tensor([a for (a,) in of(penalised)], dtype=torch.float64), policy_V)
    torch.testing.assert_close(found_V, leaf_V.grad)

    explored = with_entropy_bonus(every_token(policy_V), 0.7)
    leaf_V = policy_V.clone().requires_grad_()
    logprobs_V = leaf_V.log_softmax(-1)
    (0.7 * (logprobs_V.exp() * logprobs_V).sum()).backward()
    found_V = gradients(torch.tensor([a for (a,) in of(explored)], dtype=torch.float64), policy_V)
    torch.testing.assert_close(found_V, leaf_V.grad)


def test_importance_weights_are_truncated_and_the_loss_compares_with_the_trainer() -> None:
    one = completion([-1.0, -1.0, -5.0], advantage=1.0, weights=[1.0, 0.5, 0.0])
    batch = Batch([Row(prompt=[1], completions=[one])], 2.0)
    now = [[[-1.0 + math.log(3.0), -1.0 + math.log(0.5), -0.1]]]
    corrected, values = with_importance_weights(batch, now, 2.0)
    (found,) = corrected.rows[0].completions
    assert found.weights == pytest.approx([2.0, 0.25, 0.0])
    assert found.logprobs == now[0][0]
    assert found.advantages == one.advantages
    assert values["importance_weight"] == pytest.approx((2.0 + 0.5) / 2)
    assert values["importance_capped"] == 0.5
    kl = [3.0 - 1 - math.log(3.0), 0.5 - 1 - math.log(0.5)]
    assert values["sampler_kl"] == pytest.approx(sum(kl) / 2)


def test_ratios_beyond_all_bounds_stay_finite() -> None:
    batch = Batch([Row(prompt=[1], completions=[completion([-2000.0, 0.0])])], 1.0)
    corrected, values = with_importance_weights(batch, [[[0.0, -2000.0]]], 4.0)
    assert corrected.rows[0].completions[0].weights == [4.0, 0.0]
    assert all(math.isfinite(value) for value in values.values())


def rows(count: int) -> list[Row]:
    return [Row(prompt=[r], completions=[completion([-1.0] * (r + 1), advantage=1.0)]) for r in range(count)]


def cut(batch: Batch, count: int, seed: str = "seed") -> list[Batch]:
    return list(minibatches(batch, count, seed, row_sizes(batch.rows)))


def test_minibatches_hold_every_row_once_and_share_out_the_denominator() -> None:
    batch = Batch(rows(5), 30.0)  # 15 trained tokens, as many of dropped groups
    parts = cut(batch, 2)
    assert sorted(row.prompt[0] for part in parts for row in part.rows) == [0, 1, 2, 3, 4]
    assert [len(part.rows) for part in parts] == [2, 3]
    assert sum(part.denominator for part in parts) == pytest.approx(30.0)
    for part in parts:
        assert part.denominator == 2 * sum(len(row.completions[0].ids) for row in part.rows)


def test_minibatches_are_cut_anew_by_their_seed_alone() -> None:
    def order(seed: str) -> list[list[int]]:
        return [[row.prompt[0] for row in part.rows] for part in cut(Batch(rows(8), 1.0), 4, seed)]

    assert order("0/1/0") == order("0/1/0") != order("0/1/1")


def test_one_minibatch_is_the_batch_and_more_than_rows_are_fewer() -> None:
    batch = Batch(rows(3), 7.0)
    assert cut(batch, 1) == [batch]
    assert len(cut(batch, 64)) == 3
    without = Batch([Row(prompt=[0], completions=[completion([-1.0], weights=[0.0])])], 7.0)
    assert cut(without, 1) == cut(without, 4) == []


def test_importance_weights_change_no_minibatchs_share_of_the_denominator() -> None:
    batch = Batch([Row(prompt=[r], completions=[completion([-1.0, -1.0], advantage=1.0)]) for r in range(2)], 4.0)
    now = [[[-1.0 + math.log(0.1)] * 2], [[-1.0] * 2]]
    corrected, _ = with_importance_weights(batch, now, 2.0)
    parts = list(minibatches(corrected, 2, "seed", row_sizes(batch.rows)))
    assert [part.denominator for part in parts] == [2.0, 2.0]
    assert sorted(sum(part.rows[0].completions[0].weights) for part in parts) == pytest.approx([0.2, 2.0])


def test_a_token_whose_weight_is_too_small_for_fp32_is_left_out() -> None:
    batch = Batch([Row(prompt=[r], completions=[completion([-1.0], advantage=1.0)]) for r in range(2)], 2.0)
    corrected, _ = with_importance_weights(batch, [[[-111.0]], [[-1.0]]], 2.0)
    assert [row.completions[0].weights for row in corrected.rows] == [[0.0], [1.0]]
    (part,) = minibatches(corrected, 2, "seed", row_sizes(batch.rows))
    assert (part.rows, part.denominator) == ([corrected.rows[1]], 1.0)
