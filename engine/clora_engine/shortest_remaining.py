"""Least work left first, with ageing: the rule of ShortestRemaining, in the sampler's gate and in the trainer's queue.

The least work left, in tokens over weight, is served first; work is what the experiment told, one number for both
queues, less what was served since. Ageing: a tenant that has been passed by for more than PATIENCE times its own work
is served first (the one passed by longest). What it is given then uses up PATIENCE times as much of that, so it is
served on to its end, and all its work together waits for at most PATIENCE times itself in tokens of others, and what
every other tenant that starved too is given at a time. Less patience, or an age that counts from the first token on,
would turn equal tenants into a round robin, which is what this policy is there to avoid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

DEFAULT_WEIGHT = 100
PATIENCE = 8
"""Work of others, in multiples of one's own, after which one is served first."""


@dataclass(eq=False, slots=True)
class Contender(ABC):
    """A tenant of a queue. remaining: tokens of work left; None if nobody told. registered: it is known until it is
    removed; another one only while anything of it waits. passed_by: tokens given to others while it waited, less
    PATIENCE times its own."""

    name: str
    weight: int = DEFAULT_WEIGHT
    remaining: int | None = None
    registered: bool = False
    passed_by: int = 0

    @abstractmethod
    def backlog(self) -> int:
        """Tokens of all that waits."""

    def work(self) -> float:
        """Tokens of work left, at the default weight; what waits, if nobody told."""
        left = self.backlog() if self.remaining is None else self.remaining
        return left * DEFAULT_WEIGHT / self.weight

    def haste(self) -> tuple[bool, float]:
        """Least first."""
        work = self.work()
        starved = self.passed_by > PATIENCE * work
        return not starved, -self.passed_by if starved else work


C = TypeVar("C", bound=Contender)


def served(costs: Mapping[C, int], waiting: Iterable[C]) -> None:
    """Some were given so many tokens, at once, while others, who may be the same, went on waiting."""
    total = sum(costs.values())
    for tenant in waiting:
        if tenant not in costs:
            tenant.passed_by += total
    for tenant, cost in costs.items():
        tenant.passed_by = max(0, tenant.passed_by - PATIENCE * cost)
        if tenant.remaining is not None:
            tenant.remaining = max(0, tenant.remaining - cost)  # until the next report says it better
