"""Which commit was measured best. Pure.

With held-out examples a step is measured by its greedy accuracy on them. Without, by the mean reward of all that was
drawn with its version, in whatever steps, which is known once no step can draw with it any more; it is measured on
prompts that differ from step to step, so that the best of many steps is partly the luckiest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from clora_engine.types import Group


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """A step, and the metric and value that it was measured by."""

    step: int
    metric: str
    value: float


class Rewards:
    """Rewards by the version that they were drawn with."""

    def __init__(self) -> None:
        self._of: defaultdict[int, list[float]] = defaultdict(list)

    def add(self, groups: Iterable[Group]) -> None:
        """A step's groups; failed trajectories do not count."""
        for group in groups:
            self._of[group.version_step] += [t.reward for t in group.trajectories if not t.error]

    def take(self, last: int) -> list[Best]:
        """The means of versions up to `last`, of which nothing is to come; they are forgotten."""
        taken = {step: self._of.pop(step) for step in sorted(self._of) if step <= last}
        return [
            Best(step=step, metric="rewardMean", value=math.fsum(rewards) / len(rewards))
            for step, rewards in taken.items()
            if rewards
        ]

    def clear(self) -> None:
        self._of.clear()


def evaluated(values: Mapping[str, Any]) -> list[Best]:
    """What a step's line of metrics says of its version; nothing where it was not evaluated."""
    value = values.get("eval_accuracy")
    return [] if value is None else [Best(step=int(values["step"]), metric="evalAccuracy", value=float(value))]


def better(best: Best | None, found: Iterable[Best], commits: Collection[int]) -> Best | None:
    """The best after some were measured: of equals the earlier, and only what is committed."""
    for one in found:
        if one.step not in commits:
            continue
        stale = best is None or best.metric != one.metric or best.step not in commits
        if stale or (best is not None and one.value > best.value):
            best = one
    return best
