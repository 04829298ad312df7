"""What the trainer promises on a CPU, on a GPU: the same numbers, tenants bit for bit, exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from clora_engine.adapter_state import GRAD, VECTORS
from clora_engine.trainer import Trainer
from clora_engine.trainer_pass import Request
from clora_engine.types import AdamParams, ForwardBackwardResult, LoraConfig, Loss
from tests.numerics.tiny import batch, tiny_trainer, trained_tokens

pytestmark = pytest.mark.gpu

ADAM = AdamParams(learning_rate=5e-3)


def step(trainer: Trainer, name: str, seed: int) -> None:
    rows = batch(seed)
    trainer.forward_backward(name, rows, Loss(name="PPO", denominator=trained_tokens(rows)))
    trainer.optim_step(name, ADAM)


def vectors(trainer: Trainer, name: str) -> dict[str, Tensor]:
    state = trainer.store.sync(name)
    return {v: state.vectors[v].clone() for v in VECTORS if v != GRAD}


def test_gradients_agree_with_the_cpu() -> None:
    gradients = []
    for device in ("cpu", "cuda"):
        trainer = tiny_trainer(device=device)
        trainer.create("a", LoraConfig(rank=8, alpha=16))
        rows = batch(1)
        trainer.forward_backward("a", rows, Loss(name="PPO", denominator=trained_tokens(rows)))
        gradients.append(trainer.store.sync("a").vectors[GRAD])
    assert (gradients[0] - gradients[1]).norm() / gradients[0].norm() < 1e-4


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_a_joined_pass_agrees_with_each_alone(dtype: torch.dtype, tolerance: float) -> None:
    joined, alone = (tiny_trainer(device="cuda", dtype=dtype, slots=slots) for slots in (3, 1))
    requests = []
    for seed, name in enumerate("abc"):
        rows = batch(seed)
        requests.append(Request(name, rows, Loss(name="PPO", denominator=trained_tokens(rows))))
        for trainer in (joined, alone):
            trainer.create(name, LoraConfig(rank=8 + seed % 2 * 4, alpha=16, seed=seed))
    results = joined.forward_backward_joined(requests)
    for one, result in zip(requests, results, strict=True):
        assert isinstance(result, ForwardBackwardResult), result
        alone.forward_backward(one.adapter, one.rows, one.loss)
        ours, theirs = (trainer.store.sync(one.adapter).vectors[GRAD] for trainer in (joined, alone))
        assert (ours - theirs).norm() / theirs.norm() < tolerance


def test_prefetching_changes_no_bit() -> None:
    trainers = [tiny_trainer(device="cuda"), tiny_trainer(device="cuda")]
    for trainer, prefetch in zip(trainers, (True, False), strict=True):
        for seed, name in enumerate("abc"):
            trainer.create(name, LoraConfig(rank=8, alpha=16, seed=seed))
        for round_ in range(2):
            for seed, (name, following) in enumerate((("a", "b"), ("b", "c"), ("c", "a"))):
                rows = batch(10 * round_ + seed)
                one = Request(name, rows, Loss(name="PPO", denominator=trained_tokens(rows)))
                (result,) = trainer.forward_backward_joined([one], then=following if prefetch else None)
                assert isinstance(result, ForwardBackwardResult), result
                trainer.optim_step(name, ADAM)
    for name in "abc":
        ours, theirs = (vectors(trainer, name) for trainer in trainers)
        assert all(torch.equal(ours[vector], theirs[vector]) for vector in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tenants_in_turn_and_a_resumed_one_equal_each_alone_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    together = tiny_trainer(device="cuda", dtype=dtype)
    names = "ABCDEFGH"
    for seed, name in enumerate(names):
        together.create(name, LoraConfig(rank=8 + seed % 2 * 4, alpha=16, seed=seed))
    for round_ in range(2):
        for seed, name in enumerate(names):
            step(together, name, 100 * round_ + seed)
    for seed, name in enumerate(names):
        alone = tiny_trainer(device="cuda", dtype=dtype)
        alone.create(name, LoraConfig(rank=8 + seed % 2 * 4, alpha=16, seed=seed))
        step(alone, name, seed)
        alone.save(name, tmp_path / name, optimizer=True)
        resumed = tiny_trainer(device="cuda", dtype=dtype)
        resumed.load(name, tmp_path / name, optimizer=True)
        step(resumed, name, 100 + seed)
        ours, theirs = vectors(together, name), vectors(resumed, name)
        for vector in ours:
            assert torch.equal(ours[vector], theirs[vector]), (name, vector)
