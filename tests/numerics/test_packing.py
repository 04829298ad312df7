"""Shared prompts, merged twins and micro-batches change nothing but the last bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clora_engine.adapter_state import GRAD
from clora_engine.trainer import Trainer
from clora_engine.types import AdamParams, LoraConfig, Loss, Row
from tests.numerics.tiny import batch, plain, tiny_trainer, trained_tokens

LOSSES = ["CrossEntropy", "ImportanceSampling", "PPO", "CISPO", "DRO"]


def started(*, family: str = "qwen3", budget: int = 4096, share: bool = True) -> Trainer:
    """A trainer with one adapter that no longer equals the base model."""
    trainer = tiny_trainer(family, budget=budget, share=share)
    trainer.create("a", LoraConfig(rank=8, alpha=16, seed=5))
    trainer.forward_backward("a", batch(99), Loss(name="CrossEntropy", denominator=10.0))
    trainer.optim_step("a", AdamParams(learning_rate=0.02))
    return trainer


def gradient(trainer: Trainer) -> Tensor:
    return trainer.store.sync("a").vectors[GRAD].clone()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("loss_name", LOSSES)
def test_packed_rows_equal_plain_rows(family: str, loss_name: Any) -> None:
    rows = batch(4, rows=6, completions=4)
    loss = Loss(name=loss_name, denominator=trained_tokens(rows), temperature=0.8)
    packed, alone = started(family=family), started(family=family)
    ours = packed.forward_backward("a", rows, loss)
    singles = [[row] for row in plain(rows)]
    theirs = [alone.forward_backward("a", single, loss) for single in singles]
    assert ours.loss == pytest.approx(sum(each.loss for each in theirs), rel=1e-5)
    assert ours.tokens < sum(each.tokens for each in theirs)
    for name, value in ours.metrics.items():
        total = sum(each.metrics[name] * trained_tokens(single) for each, single in zip(theirs, singles, strict=True))
        assert value == pytest.approx(total / trained_tokens(rows), rel=1e-4, abs=1e-6)
    difference = (gradient(packed) - gradient(alone)).norm() / gradient(alone).norm()
    assert difference < 1e-5


@pytest.mark.parametrize("loss_name", LOSSES)
def test_savings_switched_off_give_the_same(loss_name: Any) -> None:
    rows = batch(4, rows=6, completions=4)
    loss = Loss(name=loss_name, denominator=trained_tokens(rows), temperature=0.8)
    saved, without = started(), started(share=False)
    ours, theirs = (trainer.forward_backward("a", rows, loss) for trainer in (saved, without))
    assert theirs.loss == pytest.approx(ours.loss, rel=1e-5)
    assert theirs.metrics == pytest.approx(ours.metrics, rel=1e-4, abs=1e-6)
    assert (gradient(saved) - gradient(without)).norm() / gradient(without).norm() < 1e-5
    # without savings every completion has a row, and only padding is computed beside
    assert (
        ours.plain_tokens == theirs.plain_tokens == sum(len(r.prompt) + len(r.completions[0].ids) for r in plain(rows))
    )
    assert ours.tokens < ours.plain_tokens <= theirs.tokens


def test_log_probs_do_not_depend_on_packing() -> None:
    rows = batch(5, rows=5, completions=4)
    trainer = started()
    packed = trainer.forward("a", rows, temperature=1.3)
    cut = started(budget=40).forward("a", rows, temperature=1.3)
    alone = [trainer.forward("a", [row], temperature=1.3)[0][0] for row in plain(rows)]
    for ours, theirs in zip((one for row in packed for one in row), alone, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-5)
    for ours, theirs in zip((one for row in cut for one in row), alone, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-5)


def test_twins_of_different_sign_are_merged_exactly_for_ppo() -> None:
    # min(r A, clip(r) A) is not linear in A: twins of advantages +1 and -1 do not cancel once r leaves the clip range.
    (row,) = batch(6, rows=1, completions=2)
    first = row.completions[0]
    length = len(first.ids)
    twins = [
        type(first)(ids=first.ids, weights=[1.0] * length, logprobs=[-9.0] * length, advantages=[sign] * length)
        for sign in (1.0, -1.0)
    ]
    rows = [Row(prompt=row.prompt, completions=twins)]
    loss = Loss(name="PPO", denominator=float(length))
    merged, alone = started(), started()
    ours = merged.forward_backward("a", rows, loss)
    theirs = [alone.forward_backward("a", [single], loss) for single in plain(rows)]
    assert ours.tokens == len(row.prompt) + length
    assert gradient(alone).norm() > 0.01
    assert (gradient(merged) - gradient(alone)).norm() / gradient(alone).norm() < 1e-5
    assert ours.loss == pytest.approx(sum(each.loss for each in theirs), rel=1e-5)


def test_gradients_accumulate_over_calls() -> None:
    rows = batch(7, rows=6)
    loss = Loss(name="PPO", denominator=trained_tokens(rows))
    once, thrice = started(), started()
    whole = once.forward_backward("a", rows, loss)
    parts = [thrice.forward_backward("a", rows[i : i + 2], loss) for i in (0, 2, 4)]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-5)
    assert (gradient(once) - gradient(thrice)).norm() / gradient(once).norm() < 1e-5
    adam = AdamParams(learning_rate=1e-3)
    assert once.optim_step("a", adam).grad_norm == pytest.approx(thrice.optim_step("a", adam).grad_norm, rel=1e-5)
    assert once.optim_step("a", adam).grad_norm == 0.0


def test_bfloat16_base_accumulates_in_float32() -> None:
    trainer = tiny_trainer(dtype=torch.bfloat16)
    reference = tiny_trainer()
    rows = batch(8)
    loss = Loss(name="CrossEntropy", denominator=trained_tokens(rows))
    for each in (trainer, reference):
        each.create("a", LoraConfig(rank=8, alpha=16))
        each.forward_backward("a", rows, loss)
    assert gradient(trainer).dtype == torch.float32
    # bfloat16 has 8 bits of mantissa: gradients agree in direction, not in digits.
    cosine = torch.cosine_similarity(gradient(trainer), gradient(reference), dim=0)
    assert cosine > 0.99
