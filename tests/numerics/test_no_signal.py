"""Steps without signal: when all rewards of every group are equal, nothing is trained, and no moment drifts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch

from clora_engine.adapter_state import GRAD, VECTORS
from clora_engine.advantages import grpo
from clora_engine.journal import Journal
from clora_engine.plan import Plan
from clora_engine.trainer_client import TrainerClient
from clora_engine.types import AdamParams, Group, LoraConfig, Loss, Trajectory
from clora_engine.updates import Updates
from tests.numerics.tiny import batch, tiny_trainer

ADAM = AdamParams(learning_rate=5e-3)


def group(index: int, reward: float) -> Group:
    one = Trajectory(ids=[1, 2, 3], mask=[1, 1, 1], logprobs=[-1.0] * 3, reward=reward, turns=1)
    return Group(index=index, example=index, version_step=0, prompt=[4, 5], trajectories=[one] * 4)


async def test_three_steps_of_uniform_groups_move_nothing(tmp_path: Path) -> None:
    trainer = tiny_trainer()
    trainer.create("a", LoraConfig(rank=8, alpha=16))
    trainer.forward_backward("a", batch(1), Loss(name="CrossEntropy", denominator=10.0))
    trainer.optim_step("a", ADAM)  # from here on, a step with a gradient of zero would move weights and moments
    before = {name: vector.clone() for name, vector in trainer.store.sync("a").vectors.items() if name != GRAD}
    plan = cast(Plan, SimpleNamespace(adam=lambda step: ADAM))
    updates = Updates(cast(TrainerClient, trainer), Journal(tmp_path, "a", 1), "a")
    for step in range(2, 5):
        uniform = grpo([group(0, 1.0), group(1, 0.0), group(2, 0.0)])
        assert uniform.rows == []
        values = await updates.apply(plan, step, uniform, 1.0)
        assert values["updates"] == 0.0
    after = trainer.store.sync("a")
    assert after.step == 1
    assert all(torch.equal(after.vectors[name], before[name]) for name in VECTORS if name != GRAD)
