"""stopWhen: whether an experiment's metrics are good enough for it to end before maxSteps. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.alias_generators import to_snake

from clora_api.v1alpha1.base import number
from clora_api.v1alpha1.experiment import StopWhen

MOST_STEPS = 1000
"""stopWhen.steps is at most this; with evaluations in between, as many lines as are looked at."""


def is_met(rule: StopWhen, lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last `rule.steps` lines that have the metric all keep the bound. Step 0 (before any training) counts
    as the others do."""
    name = to_snake(rule.metric)
    values = [line[name] for line in lines if line.get(name) is not None][-rule.steps :]
    return len(values) == rule.steps and all(_keeps(rule, value) for value in values)


def reason(rule: StopWhen) -> str:
    """A sentence for people."""
    bound = f"at least {rule.at_least}" if rule.at_least is not None else f"at most {rule.at_most}"
    often = f"{rule.steps} steps in a row" if rule.steps > 1 else "one step"
    return f"stopWhen: {rule.metric} was {bound} for {often}"


def _keeps(rule: StopWhen, value: Any) -> bool:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return False
    if rule.at_least is not None:
        return value >= number(rule.at_least)
    assert rule.at_most is not None
    return value <= number(rule.at_most)
