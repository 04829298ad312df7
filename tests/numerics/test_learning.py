"""Every estimator with every loss learns one task on the real trainer; off-policy by many steps, only with correction.

The policy draws its own trajectories, so this is RL from end to end, but for vLLM. Two passes over each batch in two
minibatches, so that the losses differ: in the first pass of a step that is on-policy their gradients are the same.
"""

from __future__ import annotations

import random

import pytest

from clora_engine.advantages import Batch, grpo, reinforce, sft
from clora_engine.batches import minibatches, row_sizes, with_importance_weights
from clora_engine.chat import Demonstration
from clora_engine.types import Completion, Loss, LossName, Row
from tests.numerics.bandit import PROMPTS, Bandit, reward
from tests.numerics.tiny import VOCABULARY

CHANCE = 0.25


def learn(
    bandit: Bandit, name: LossName, batch: Batch, learning_rate: float, *, epochs: int = 1, parts: int = 1
) -> None:
    for epoch in range(epochs):
        for part in minibatches(batch, parts, f"{len(batch.rows)}/{epoch}", row_sizes(batch.rows)):
            loss = Loss(name=name, denominator=part.denominator)
            bandit.trainer.forward_backward("a", part.rows, loss)
            bandit.update(learning_rate)


@pytest.mark.parametrize("name", ["ImportanceSampling", "PPO", "CISPO", "DRO"])
@pytest.mark.parametrize("estimator", ["GRPO", "Reinforce"])
def test_every_estimator_learns_with_every_loss(estimator: str, name: LossName) -> None:
    bandit = Bandit(seed=1)
    assert bandit.expected_reward() == pytest.approx(CHANCE, abs=0.05)
    for _ in range(15):
        groups = bandit.draw()
        batch = grpo(groups) if estimator == "GRPO" else reinforce(groups)
        learn(bandit, name, batch, 1e-2, epochs=2, parts=2)
    assert bandit.expected_reward() > 2 * CHANCE


def test_demonstrations_are_learnt() -> None:
    bandit, rng = Bandit(seed=1), random.Random(0)
    likelihoods = []
    for _ in range(30):
        tokens = [
            (p, rng.choice([t for t in range(VOCABULARY) if reward(p, t)][:4])) for p in PROMPTS for _ in range(8)
        ]
        likelihoods.append(sum(bandit.policy()[p[0]][t] for p, t in tokens) / len(tokens))
        learn(bandit, "CrossEntropy", sft([Demonstration(p, [t], [1]) for p, t in tokens]), 1e-2)
    assert likelihoods[-1] > likelihoods[0] + 2.0
    assert bandit.expected_reward() > 0.45


@pytest.mark.parametrize("change", ["flipped", "shuffled", "rate 0"])
def test_controls_do_not_learn(change: str) -> None:
    bandit, rng = Bandit(seed=1), random.Random(0)
    for _ in range(12):
        batch = grpo(bandit.draw())
        batch = Batch([changed(row, change, rng) for row in batch.rows], batch.denominator)
        learn(bandit, "PPO", batch, 0.0 if change == "rate 0" else 1e-2)
    if change == "flipped":
        assert bandit.expected_reward() < 0.6 * CHANCE
    else:
        assert bandit.expected_reward() == pytest.approx(CHANCE, abs=0.12)


def changed(row: Row, change: str, rng: random.Random) -> Row:
    advantages = [completion.advantages[0] for completion in row.completions]
    if change == "flipped":
        advantages = [-advantage for advantage in advantages]
    elif change == "shuffled":
        rng.shuffle(advantages)
    return Row(
        prompt=row.prompt,
        completions=[
            Completion(ids=c.ids, weights=c.weights, logprobs=c.logprobs, advantages=[advantage])
            for c, advantage in zip(row.completions, advantages, strict=True)
        ],
    )


def off_policy(*, corrected: bool, seed: int) -> float:
    """The reward after 45 steps on trajectories that are 8 steps old, at a learning rate that is high for that."""
    bandit = Bandit(seed=seed, lag=8)
    for _ in range(45):
        batch = grpo(bandit.draw())
        if batch.rows:
            now = bandit.trainer.forward("a", batch.rows)
            weighed, _ = with_importance_weights(batch, now, 2.0)
            batch = weighed if corrected else _as_if_on_policy(batch, weighed)
            bandit.trainer.forward_backward(
                "a", batch.rows, Loss(name="ImportanceSampling", denominator=batch.denominator)
            )
        bandit.update(2e-2)
    return bandit.expected_reward()


def _as_if_on_policy(batch: Batch, weighed: Batch) -> Batch:
    """The trainer's own log-probs, so that every ratio begins at 1, and no weights."""
    rows = [
        Row(
            prompt=row.prompt,
            completions=[
                Completion(ids=c.ids, weights=c.weights, logprobs=w.logprobs, advantages=c.advantages)
                for c, w in zip(row.completions, other.completions, strict=True)
            ],
        )
        for row, other in zip(batch.rows, weighed.rows, strict=True)
    ]
    return Batch(rows, batch.denominator)


@pytest.mark.parametrize("seed", [0, 1])
def test_far_off_policy_learns_with_truncated_importance_weights_and_fails_without(seed: int) -> None:
    assert off_policy(corrected=True, seed=seed) > 0.8
    assert off_policy(corrected=False, seed=seed) < 0.7
