"""One trajectory in the making: the bookkeeping of tokens, rewards and ends, without any waiting.

Every list grows by appending only, so what was sampled stays token for token what the sampler gave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from clora_engine.environments.protocol import Environment
from clora_engine.types import Trajectory

MAX_ERROR = 500  # characters of an error that are kept


@dataclass(slots=True, eq=False)
class Episode:
    """State of one episode. `open`: another turn of the model is to come. For the other fields see types.Trajectory."""

    environment: Environment
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    truncated: bool = False
    tool_calls: int = 0
    tool_errors: int = 0
    error: str = ""
    open: bool = True

    @property
    def history(self) -> tuple[int, ...]:
        """All tokens so far: what the next turn is sampled after."""
        return (*self.prompt, *self.ids)

    def add_turn(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """The model's tokens."""
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logprobs += logprobs
        self.turns += 1

    def add_observation(self, ids: Sequence[int]) -> None:
        """Tokens that the model did not write."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def add_reward(self, reward: float) -> None:
        """A step's reward; one that is not finite fails the episode."""
        if math.isfinite(reward):
            self.reward += reward
        else:
            self.fail(f"BadReward: {reward}")

    def truncate(self) -> None:
        """Ends it by a token limit, with the reward it has so far."""
        self.truncated, self.open = True, False

    def fail(self, error: str) -> None:
        """Ends it without reward. `error` is `Reason: details`, where the reason is what metrics count."""
        self.error, self.reward, self.open = error[:MAX_ERROR], 0.0, False

    def finished(self) -> Trajectory:
        return Trajectory(
            ids=self.ids,
            mask=self.mask,
            logprobs=self.logprobs,
            reward=self.reward,
            turns=self.turns,
            truncated=self.truncated,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            error=self.error,
        )
