"""Where an experiment is: its last step, and what its steps have taken so far.

Left out: phases and reasons (experiment.py), what is on disk (journal.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic.alias_generators import to_camel

from clora_api.control import ReportedProgress
from clora_engine.journal import Commit
from clora_engine.stop_when import MOST_STEPS

# Of a step's line of metrics, what is shown in .status.progress.metrics (at most 16).
SHOWN = (
    *("reward_mean", "reward_std", "groups_without_spread", "completion_tokens_mean", "truncated", "eval_accuracy"),
    *("loss", "entropy", "kl", "grad_norm", "learning_rate", "tokens_per_second"),
    *("rollout_seconds", "train_seconds", "publish_seconds", "step_seconds"),
)
NEWEST = 0.3
"""Weight of the newest step in running means."""


@dataclass(slots=True)
class Progress:
    """position: in the data. recent: the metrics of the last so many steps, a line each. waited: seconds, for sampler
    and trainer. pace, step_tokens: running means of a step's seconds and of its work, the tokens that it sampled or
    those that it trained on, whichever are more. published_step: what the sampler serves."""

    step: int = 0
    position: int = 0
    reward: float | None = None
    waited: float = 0.0
    pace: float | None = None
    step_tokens: float | None = None
    published_step: int | None = None
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))

    @property
    def values(self) -> dict[str, Any]:
        """The last step's line of metrics."""
        return self.recent[-1] if self.recent else {}

    def take(self, step: int, position: int, values: dict[str, Any]) -> None:
        """A step was made."""
        self.step, self.position = step, position
        self.recent.append(values)
        self.reward = values.get("reward_mean", self.reward)
        self.waited += _waited(values)
        self.pace = _running_mean(self.pace, values.get("step_seconds"))
        self.step_tokens = _running_mean(self.step_tokens, _tokens(values))
        if values.get("updates", 1.0) > 0:  # step 0 has none, and is published
            self.published_step = step

    def resume(self, commit: Commit, lines: Sequence[dict[str, Any]]) -> None:
        """Goes on from a commit and the metrics of all steps up to its own."""
        self.step, self.position = commit.manifest.step, commit.manifest.position
        self.recent.clear()
        self.recent.extend(lines)
        values = self.values
        self.waited = sum(map(_waited, lines))
        self.reward, self.pace = values.get("reward_mean"), values.get("step_seconds")
        self.step_tokens = _tokens(values)

    def end(self, last: ReportedProgress) -> None:
        """Shows what was last reported of an experiment that has ended in an earlier life."""
        self.step = self.published_step = last.step
        self.reward = last.reward
        self.waited = last.seconds_waited

    def report(self, max_steps: int, activity: str) -> ReportedProgress:
        shown = {to_camel(name): self.values[name] for name in SHOWN if _finite(self.values.get(name))}
        return ReportedProgress(
            step=self.step,
            max_steps=max_steps,
            reward=self.reward,
            activity=activity,
            metrics=shown,
            seconds_waited=self.waited,
            seconds_per_step=self.pace,
            last_step_time=self.values.get("time"),
        )


def _waited(values: dict[str, Any]) -> float:
    waited: float = values.get("wait_trainer_seconds", 0.0) + values.get("wait_sampler_seconds", 0.0)
    return waited


def _tokens(values: dict[str, Any]) -> float | None:
    """Prompts are trained on and were not sampled; a group without spread was sampled and is not trained on."""
    return max((values[name] for name in ("sampled_tokens", "trained_tokens") if name in values), default=None)


def _running_mean(mean: float | None, value: float | None) -> float | None:
    if mean is None or value is None:
        return value if mean is None else mean
    return (1 - NEWEST) * mean + NEWEST * value


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
