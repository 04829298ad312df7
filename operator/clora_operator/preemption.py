"""The slots of one engine in the course of a placement pass: which are free, which come free, and whose are taken for
an experiment of a higher priority.

Who gives up a slot: the lowest priority, of those what is only served, then the youngest; strictly lower ones only. A
slot that comes free by itself is waited for first, and each is promised once, so that nobody leaves for nothing. A
namespace that has all its maxPerNamespace gets another slot only from itself. Leaves out how an experiment leaves
(decide) and the order in which experiments are asked (placement).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from clora_operator.claims import Claim, Room


@dataclass(slots=True)
class Slots:
    """taken      slots that are held, or given to who is admitted in this pass
    of         the same by namespace, and what is promised to it
    holders    who hold one
    victims    uid of who has to leave -> for whom
    promised   how many of those that leave by themselves are promised
    queued     how many wait
    """

    room: Room
    taken: int
    of: Counter[str] = field(default_factory=Counter)
    holders: list[Claim] = field(default_factory=list)
    victims: dict[str, Claim] = field(default_factory=dict)
    promised: int = 0
    queued: int = 0

    def free_for(self, claim: Claim) -> int:
        return 0 if self.room.full or self.limited(claim) else self.room.capacity - self.taken

    def limited(self, claim: Claim) -> bool:
        """The claim's namespace has all the slots that it may have."""
        limit = self.room.max_per_namespace
        return limit is not None and self.of[claim.namespace] >= limit

    def hold(self, claim: Claim) -> None:
        self.holders.append(claim)
        self.admit(claim)

    def admit(self, claim: Claim) -> None:
        self.taken += 1
        self.of[claim.namespace] += 1

    def enqueue(self, claim: Claim) -> Claim | None:
        """Puts `claim` at the queue's end; the one who has to leave for it, if somebody has to."""
        self.queued += 1
        victim = None
        if not self.limited(claim) and self._comes_free():
            self.promised += 1
        elif (victim := self._victim(claim)) is not None:
            self.victims[victim.uid] = claim
            self.of[victim.namespace] -= 1
        else:
            return None
        self.of[claim.namespace] += 1
        return victim

    def obtainable(self, claim: Claim) -> bool:
        """`claim` would get a slot that is free, comes free, or can be taken."""
        if self.free_for(claim) > 0 or self._victim(claim) is not None:
            return True
        return not self.limited(claim) and self._comes_free()

    def _comes_free(self) -> bool:
        return self.promised < sum(holder.leaving for holder in self.holders)

    def _victim(self, claim: Claim) -> Claim | None:
        if not claim.preempts or not self.room.ready:
            return None
        lower = self.holders
        if self.limited(claim):
            lower = [h for h in self.holders if h.namespace == claim.namespace]
            if any(h.leaving for h in lower):
                return None
        elif self.taken != self.room.capacity:
            # An engine that says it is full while we count a free slot knows of somebody whom we do not: wait for news.
            return None
        lower = [h for h in lower if h.preemptible and h.priority < claim.priority]
        lower = [h for h in lower if not h.leaving and h.uid not in self.victims]
        if not lower:
            return None
        lowest = min(holder.priority for holder in lower)
        return max((h for h in lower if h.priority == lowest), key=lambda h: (h.served, h.created, h.namespace, h.name))
