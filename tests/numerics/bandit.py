"""The smallest task that is RL: a policy of one token on a real trainer, drawn from its own log-probs.

Each of four prompts has 32 of 128 tokens as its right answers; a random model finds them by chance, 1 in 4.
"""

from __future__ import annotations

import math
import random
from collections import deque

import torch

from clora_engine.trainer import Trainer
from clora_engine.types import AdamParams, Completion, Group, LoraConfig, Row, Trajectory
from tests.numerics.tiny import VOCABULARY, tiny_trainer

PROMPTS = [[p, 9, 9] for p in range(4)]
GROUP_SIZE = 16


def reward(prompt: list[int], token: int) -> float:
    return float(token % len(PROMPTS) == prompt[0])


class Bandit:
    """A trainer with one adapter, and the policies of its last `lag` + 1 steps to draw from."""

    def __init__(self, *, seed: int = 0, lag: int = 0) -> None:
        torch.set_num_threads(1)  # the model is too small for more
        self.trainer: Trainer = tiny_trainer(budget=1024)
        self.trainer.create("a", LoraConfig(rank=8, alpha=16, seed=seed))
        self._rng = random.Random(seed)
        self._policies: deque[list[list[float]]] = deque(maxlen=lag + 1)
        self._policies.append(self.policy())

    def policy(self) -> list[list[float]]:
        """Log-probs of every token (V) for each prompt."""
        every = [Completion(ids=[v], weights=[1.0], logprobs=[0.0], advantages=[0.0]) for v in range(VOCABULARY)]
        found = self.trainer.forward("a", [Row(prompt=prompt, completions=every) for prompt in PROMPTS])
        return [[logprob for (logprob,) in of] for of in found]

    def expected_reward(self) -> float:
        """Of the newest policy, over all prompts and tokens: exact."""
        return sum(
            reward(prompt, token) * probability
            for prompt, logprobs in zip(PROMPTS, self._policies[-1], strict=True)
            for token, probability in enumerate(_exp(logprobs))
        ) / len(PROMPTS)

    def draw(self) -> list[Group]:
        """A group for each prompt, from the oldest policy that is kept."""
        groups = []
        for index, (prompt, logprobs) in enumerate(zip(PROMPTS, self._policies[0], strict=True)):
            tokens = self._rng.choices(range(VOCABULARY), weights=_exp(logprobs), k=GROUP_SIZE)
            trajectories = [
                Trajectory(ids=[t], mask=[1], logprobs=[logprobs[t]], reward=reward(prompt, t), turns=1) for t in tokens
            ]
            groups.append(Group(index=index, example=index, version_step=0, prompt=prompt, trajectories=trajectories))
        return groups

    def update(self, learning_rate: float) -> None:
        """An optimizer step with the gradient so far."""
        self.trainer.optim_step("a", AdamParams(learning_rate=learning_rate))
        self._policies.append(self.policy())


def _exp(logprobs: list[float]) -> list[float]:
    return [math.exp(logprob) for logprob in logprobs]
