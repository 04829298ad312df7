"""Which commit was measured best. Pure.

With held-out examples a step is measured by its greedy accuracy on them. Without, by the mean reward of what was drawn
with its version, which is known one step later or more; it is measured on prompts that differ from step to step, so
that the best of many steps is partly the luckiest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """A step, and the metric and value that it was measured by."""

    step: int
    metric: str
    value: float


def measured(values: Mapping[str, Any], *, evaluates: bool) -> Best | None:
    """What a step's line of metrics says of a version: its own (evalAccuracy), or the one it was drawn with."""
    if evaluates:
        value, step = values.get("eval_accuracy"), values["step"]
    else:
        value, step = values.get("reward_mean"), values.get("drawn_with")
    if value is None or step is None:
        return None
    return Best(step=int(step), metric="evalAccuracy" if evaluates else "rewardMean", value=float(value))


def better(best: Best | None, found: Best | None, commits: Collection[int]) -> Best | None:
    """The best after something was measured: of equals the earlier, and only what is committed."""
    if found is None or found.step not in commits:
        return best
    if best is None or best.metric != found.metric or best.step not in commits:
        return found
    return found if found.value > best.value else best
