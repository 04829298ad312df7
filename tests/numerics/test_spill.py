"""Adapters past the host's limit go to files and come back bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from clora_engine.adapter_state import GRAD, MASTER, VECTORS
from clora_engine.errors import CapacityError, EngineError
from clora_engine.trainer import Trainer
from clora_engine.trainer_pass import Request
from clora_engine.types import AdamParams, LoraConfig, Loss
from tests.numerics.tiny import batch, tiny_trainer, trained_tokens

ADAM = AdamParams(learning_rate=5e-3)
TENANTS = {name: LoraConfig(rank=8 if n % 3 else 12, alpha=16, seed=n) for n, name in enumerate("ABCDEFGH")}


pytestmark = pytest.mark.usefixtures("one_thread")


def trainer_for(adapters: float, directory: Path | None, *, slots: int = 1) -> Trainer:
    """A host that holds so many adapters of rank 12."""
    one = tiny_trainer().create("one", LoraConfig(rank=12, alpha=8)).host_bytes
    return tiny_trainer(host_limit_bytes=int(adapters * one), spill_directory=directory, slots=slots)


def half_step(trainer: Trainer, name: str, step: int) -> None:
    rows = batch(100 * step + ord(name))
    trainer.forward_backward(name, rows, Loss(name="PPO", denominator=trained_tokens(rows)))


def cold(trainer: Trainer) -> set[str]:
    return {name for name in trainer.store._states if trainer.store.state(name).cold is not None}


def test_eight_tenants_on_a_host_for_three_equal_each_alone_bit_for_bit(tmp_path: Path) -> None:
    together = trainer_for(3, tmp_path)
    for name, config in TENANTS.items():
        together.create(name, config)
    seen: set[str] = set()
    for step in range(2):
        for name in TENANTS:
            half_step(together, name, step)  # a gradient is pending in the file too
        seen |= cold(together)
        assert together.store.host_bytes <= together.store._host_limit_bytes
        for name in TENANTS:
            together.optim_step(name, ADAM)
    assert {"A", "B", "C", "D"} <= seen <= set("ABCDEF"), "the least recently used are cold"
    for name, config in TENANTS.items():
        alone = tiny_trainer()
        alone.create(name, config)
        for step in range(2):
            half_step(alone, name, step)
            alone.optim_step(name, ADAM)
        ours, theirs = together.store.sync(name), alone.store.sync(name)
        assert (ours.step, ours.grad_is_zero) == (theirs.step, theirs.grad_is_zero) == (2, True)
        for vector in VECTORS:
            assert vector == GRAD or torch.equal(ours.vectors[vector], theirs.vectors[vector]), (name, vector)


def test_a_joined_pass_warms_all_its_adapters(tmp_path: Path) -> None:
    spilled, roomy = trainer_for(3, tmp_path, slots=2), tiny_trainer(slots=2)
    for trainer in (spilled, roomy):
        for name in "ABCDE":
            trainer.create(name, TENANTS[name])
        for pair in ("AB", "CD", "AE"):
            requests = [Request(name, batch(ord(name)), Loss(name="CrossEntropy", denominator=9.0)) for name in pair]
            assert not any(isinstance(one, Exception) for one in trainer.forward_backward_joined(requests))
    assert cold(spilled)
    for name in "ABCDE":
        ours, theirs = spilled.store.sync(name), roomy.store.sync(name)
        for vector in VECTORS:
            assert torch.equal(ours.vectors[vector], theirs.vectors[vector]), (name, vector)


def test_files_of_cold_adapters_have_no_name_and_go_with_them(tmp_path: Path) -> None:
    trainer = trainer_for(1, tmp_path)
    trainer.create("A", TENANTS["A"])
    trainer.create("B", TENANTS["B"])
    assert cold(trainer) == {"A"}
    assert list(tmp_path.iterdir()) == []
    file = trainer.store.state("A").cold
    assert file is not None
    assert os.fstat(file.fileno()).st_mode & 0o077 == 0
    trainer.delete("A")
    assert file.closed
    with pytest.raises(EngineError, match="no adapter 'A'"):
        trainer.optim_step("A", ADAM)


def test_without_a_place_for_files_the_limit_refuses() -> None:
    trainer = trainer_for(1, None)
    trainer.create("A", TENANTS["A"])
    with pytest.raises(CapacityError, match="raise the trainer's host limit"):
        trainer.create("B", TENANTS["B"])


def test_a_file_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    trainer = trainer_for(1, tmp_path / "gone")
    trainer.create("A", TENANTS["A"])
    before = trainer.store.sync("A").vectors[MASTER].clone()
    with pytest.raises(CapacityError, match="cannot be written: No such file"):
        trainer.create("B", TENANTS["B"])
    assert torch.equal(trainer.store.sync("A").vectors[MASTER], before)
    assert "B" not in trainer.store


def test_an_adapter_larger_than_the_host_is_refused_and_nobody_is_spilled_for_it(tmp_path: Path) -> None:
    trainer = trainer_for(0.9, tmp_path)
    trainer.create("E", TENANTS["E"])
    with pytest.raises(CapacityError):
        trainer.create("A", TENANTS["A"])
    assert cold(trainer) == set()


def test_a_frozen_adapter_takes_a_quarter_and_gives_the_same_log_probs_warm_or_cold(tmp_path: Path) -> None:
    trainer = trainer_for(1.25, tmp_path)
    trainer.create("A", TENANTS["A"])
    half_step(trainer, "A", 0)
    trainer.optim_step("A", ADAM)
    trainer.save("A", tmp_path / "A", optimizer=False)
    expected = trainer.forward("A", batch(3))
    info = trainer.load("A/start", tmp_path / "A", optimizer=False, frozen=True)
    assert 4 * info.host_bytes == trainer.store.state("A").host_bytes
    trainer.create("B", TENANTS["A"])
    assert "A/start" in trainer.store
    for name in ("B", "A", "B", "A/start", "A", "A/start"):
        if name != "A/start":
            half_step(trainer, name, 1)
        assert trainer.forward("A/start", batch(3)) == expected
    assert cold(trainer)


def test_a_frozen_adapter_is_not_trained_and_finds_nothing_of_others_in_its_slot(tmp_path: Path) -> None:
    trainer = tiny_trainer()
    trainer.create("A", TENANTS["A"])
    trainer.save("A", tmp_path / "A", optimizer=True)
    trainer.load("A/start", tmp_path / "A", optimizer=False, frozen=True)
    half_step(trainer, "A", 0)
    trainer.optim_step("A", ADAM)
    half_step(trainer, "A", 0)
    for refused in (
        lambda: trainer.forward_backward("A/start", batch(0), Loss(name="PPO", denominator=1.0)),
        lambda: trainer.optim_step("A/start", ADAM),
        lambda: trainer.save("A/start", tmp_path / "B", optimizer=True),
    ):
        with pytest.raises(EngineError) as caught:
            refused()
        assert caught.value.reason == "AdapterFrozen"
    (slot,) = trainer.store.swap_in(["A/start"])
    assert all(slot.buffers[vector].any() == (vector == MASTER) for vector in VECTORS)
    assert not trainer.store.state("A").grad_is_zero
