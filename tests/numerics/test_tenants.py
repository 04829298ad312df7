"""Tenants in turn: bit for bit what each would be alone, nothing of one left for the next, and exact resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clora_engine.adapter_state import GRAD, MASTER, VECTORS
from clora_engine.errors import CapacityError, EngineError, UserError
from clora_engine.trainer import Trainer
from clora_engine.types import AdamParams, Completion, LoraConfig, Loss, Row
from tests.numerics.tiny import batch, tiny_trainer, trained_tokens
from tests.torch_threads import torch_threads

ADAM = AdamParams(learning_rate=5e-3)
# Ranks of two buckets, some padded; different target modules share a slot.
TENANTS = {
    "A": LoraConfig(rank=8, alpha=16, seed=1),
    "B": LoraConfig(rank=8, alpha=16, seed=2),
    "C": LoraConfig(rank=5, alpha=10, seed=3),
    "D": LoraConfig(rank=16, alpha=16, seed=4),
    "E": LoraConfig(rank=8, alpha=8, target_modules=("q_proj", "v_proj"), seed=5),
    "F": LoraConfig(rank=12, alpha=24, seed=6),
    "G": LoraConfig(rank=8, alpha=16, target_modules=r".*\.0\.mlp\..*", seed=7),
    "H": LoraConfig(rank=8, alpha=32, seed=8),
}


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread, or as many as a test asks for; the number is part of what bit-for-bit promises are about."""
    wanted = getattr(request, "param", 1)
    with torch_threads(wanted):
        yield wanted


def half_step(trainer: Trainer, name: str, step: int, half: int) -> None:
    rows = batch(1000 * step + ord(name) + 500 * half)
    loss = Loss(name="PPO" if half else "CrossEntropy", denominator=trained_tokens(rows))
    trainer.forward_backward(name, rows, loss)


def vectors(trainer: Trainer, name: str) -> dict[str, Tensor]:
    state = trainer.store.sync(name)
    return {v: state.vectors[v].clone() for v in VECTORS if not (v == GRAD and state.grad_is_zero)}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_eight_tenants_in_turn_equal_each_alone_bit_for_bit(threads: int) -> None:
    assert torch.get_num_threads() == threads
    together = tiny_trainer()
    for name, config in TENANTS.items():
        together.create(name, config)
    for step in range(3):
        # Every tenant is swapped out between its two halves and before its optimizer step, with a gradient pending.
        for half in range(2):
            for name in TENANTS:
                half_step(together, name, step, half)
        for name in TENANTS:
            together.optim_step(name, ADAM)
    for name, config in TENANTS.items():
        alone = tiny_trainer()
        alone.create(name, config)
        for step in range(3):
            half_step(alone, name, step, 0)
            half_step(alone, name, step, 1)
            alone.optim_step(name, ADAM)
        assert_same(vectors(together, name), vectors(alone, name))
    first, second = vectors(together, "A"), vectors(together, "B")
    assert not torch.equal(first[MASTER], second[MASTER])


def test_a_tenant_in_a_used_slot_starts_from_nothing() -> None:
    used, fresh = tiny_trainer(), tiny_trainer()
    used.create("A", TENANTS["A"])
    for step in range(2):
        half_step(used, "A", step, 0)
        used.optim_step("A", ADAM)
    half_step(used, "A", 9, 0)  # a gradient is pending when B comes
    for trainer in (used, fresh):
        trainer.create("E", TENANTS["E"])
        half_step(trainer, "E", 0, 0)
        trainer.optim_step("E", ADAM)
    assert_same(vectors(used, "E"), vectors(fresh, "E"))


def test_padding_stays_zero() -> None:
    trainer = tiny_trainer()
    trainer.create("C", TENANTS["C"])
    for step in range(3):
        half_step(trainer, "C", step, 0)
        trainer.optim_step("C", AdamParams(learning_rate=0.05, weight_decay=0.1))
    half_step(trainer, "C", 3, 1)
    state = trainer.store.sync("C")
    for name in VECTORS:
        trimmed = torch.zeros_like(state.vectors[name])
        views = state.layout.matrices(state.vectors[name], 5)
        for module, (a, b) in state.layout.matrices(trimmed, 5).items():
            a.copy_(views[module][0])
            b.copy_(views[module][1])
        assert trimmed.any()
        assert torch.equal(trimmed, state.vectors[name]), f"{name} is not zero in the padding"


def test_a_deleted_tenant_leaves_nothing_in_its_slot() -> None:
    trainer = tiny_trainer()
    trainer.create("A", TENANTS["A"])
    half_step(trainer, "A", 0, 0)
    trainer.optim_step("A", ADAM)
    half_step(trainer, "A", 1, 0)
    (slot,) = trainer.store.swap_in(["A"])
    assert all(buffer.any() for buffer in slot.buffers.values())
    trainer.delete("A")
    assert not any(buffer.any() for buffer in slot.buffers.values())
    assert slot.owner is None
    assert trainer.store.host_bytes == 0
    with pytest.raises(EngineError, match="no adapter 'A'"):
        trainer.optim_step("A", ADAM)


def test_saved_and_loaded_continues_bit_for_bit(tmp_path: Path) -> None:
    trainer = tiny_trainer()
    trainer.create("F", TENANTS["F"])
    half_step(trainer, "F", 0, 0)
    trainer.optim_step("F", ADAM)
    half_step(trainer, "F", 1, 0)  # the pending gradient is part of the state
    trainer.save("F", tmp_path / "state", optimizer=True)
    resumed = tiny_trainer()
    assert resumed.load("F", tmp_path / "state", optimizer=True, config=TENANTS["F"]).step == 1
    for each in (trainer, resumed):
        half_step(each, "F", 1, 1)
        each.optim_step("F", ADAM)
        half_step(each, "F", 2, 0)
        each.optim_step("F", ADAM)
    assert_same(vectors(trainer, "F"), vectors(resumed, "F"))


def test_loading_weights_alone_starts_a_fresh_optimizer(tmp_path: Path) -> None:
    trainer = tiny_trainer()
    trainer.create("A", TENANTS["A"])
    half_step(trainer, "A", 0, 0)
    trainer.optim_step("A", ADAM)
    trainer.save("A", tmp_path / "state", optimizer=True)
    other = tiny_trainer()
    assert other.load("A", tmp_path / "state", optimizer=False).step == 0
    state = other.store.sync("A")
    assert torch.equal(state.vectors[MASTER], trainer.store.sync("A").vectors[MASTER])
    assert not any(state.vectors[name].any() for name in VECTORS if name != MASTER)
    for each in (trainer, other):
        half_step(each, "A", 1, 0)
        each.optim_step("A", ADAM)
    assert not torch.equal(vectors(trainer, "A")[MASTER], vectors(other, "A")[MASTER])


def overflowing(rows: list[Row]) -> list[Row]:
    """The same rows with advantages whose gradient does not fit FP32."""

    def change(one: Completion) -> Completion:
        return Completion(ids=one.ids, weights=one.weights, logprobs=one.logprobs, advantages=[3e38] * len(one.ids))

    return [Row(prompt=row.prompt, completions=[change(one) for one in row.completions]) for row in rows]


def test_a_non_finite_gradient_skips_that_tenant_alone() -> None:
    trainer, undisturbed = tiny_trainer(), tiny_trainer()
    for each in (trainer, undisturbed):
        for name in ("A", "B"):
            each.create(name, TENANTS[name])
            half_step(each, name, 0, 0)
            each.optim_step(name, ADAM)
    before = vectors(trainer, "A")
    trainer.forward_backward("A", overflowing(batch(3)), Loss(name="CISPO", denominator=1e-3))
    half_step(trainer, "B", 1, 0)
    result = trainer.optim_step("A", ADAM)
    assert (result.skipped, result.step) == (True, 1)
    assert not result.grad_norm < float("inf")
    assert_same(vectors(trainer, "A"), before)
    trainer.optim_step("B", ADAM)
    half_step(undisturbed, "B", 1, 0)
    undisturbed.optim_step("B", ADAM)
    for each in (trainer, undisturbed):
        half_step(each, "A", 2, 1)
        assert not each.optim_step("A", ADAM).skipped
    for name in ("A", "B"):
        assert_same(vectors(trainer, name), vectors(undisturbed, name))


@pytest.mark.parametrize("pending", [False, True])
def test_a_call_that_fails_halfway_changes_nothing(pending: bool) -> None:
    trainer, undisturbed = tiny_trainer(budget=60), tiny_trainer(budget=60)
    for each in (trainer, undisturbed):
        each.create("A", TENANTS["A"])
        if pending:
            half_step(each, "A", 0, 0)
    passes = 0

    def run_out_of_memory(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes >= 3:
            raise torch.OutOfMemoryError("the device is full")

    rows = batch(11, rows=8)
    hook = trainer._base.decoder.register_forward_pre_hook(run_out_of_memory)
    with pytest.raises(CapacityError, match="does not hold a row of"):
        trainer.forward_backward("A", rows, Loss(name="CrossEntropy", denominator=1.0))
    hook.remove()
    assert passes > 3, "tried again with smaller micro-batches"
    for each in (trainer, undisturbed):
        half_step(each, "A", 1, 1)
        each.optim_step("A", ADAM)
    assert_same(vectors(trainer, "A"), vectors(undisturbed, "A"))


def test_a_bad_batch_is_refused_before_anything_is_computed() -> None:
    trainer = tiny_trainer()
    trainer.create("A", TENANTS["A"])
    one = Completion(ids=[1, 128], weights=[1.0, 1.0], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])
    with pytest.raises(UserError, match=r"rows\[0\].completions\[0\].ids has a token id outside the vocabulary"):
        trainer.forward_backward("A", [Row(prompt=[1], completions=[one])], Loss(name="PPO", denominator=1.0))
    assert trainer.store.state("A").grad_is_zero


def test_weightless_tokens_cannot_poison_a_batch() -> None:
    trainer = tiny_trainer()
    trainer.create("A", TENANTS["A"])
    nan = float("nan")
    one = Completion(ids=[1, 2, 3], weights=[1.0, 0.0, 1.0], logprobs=[-4.0, nan, -4.0], advantages=[1.0, nan, 1.0])
    result = trainer.forward_backward("A", [Row(prompt=[1], completions=[one])], Loss(name="PPO", denominator=2.0))
    assert all(value == value for value in result.metrics.values())
    assert not trainer.optim_step("A", ADAM).skipped
