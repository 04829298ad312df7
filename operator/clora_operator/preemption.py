"""The slots of one engine in the course of a placement pass: which are free, which come free, and whose are taken for
an experiment of a higher priority.

Who gives up a slot: the lowest priority, of those the youngest; strictly lower ones only. A slot that comes free by
itself is waited for first, and each is promised once, so that nobody leaves for nothing. Leaves out how an experiment
leaves (decide) and the order in which experiments are asked (placement).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from clora_operator.claims import Claim, Room


@dataclass(slots=True)
class Slots:
    """taken      slots that are held, or given to who is admitted in this pass
    holders    who hold one
    victims    uid of who has to leave -> for whom
    promised   how many of those that leave by themselves are promised
    queued     how many wait
    """

    room: Room
    taken: int
    holders: list[Claim] = field(default_factory=list)
    victims: dict[str, Claim] = field(default_factory=dict)
    promised: int = 0
    queued: int = 0

    @property
    def free(self) -> int:
        return 0 if self.room.full else self.room.capacity - self.taken

    def hold(self, claim: Claim) -> None:
        self.holders.append(claim)
        self.taken += 1

    def enqueue(self, claim: Claim) -> Claim | None:
        """Puts `claim` at the queue's end; the one who has to leave for it, if somebody has to."""
        self.queued += 1
        if self._comes_free():
            self.promised += 1
            return None
        victim = self._victim(claim)
        if victim is not None:
            self.victims[victim.uid] = claim
        return victim

    def obtainable(self, claim: Claim) -> bool:
        """`claim` would get a slot that is free, comes free, or can be taken."""
        return self.free > 0 or self._comes_free() or self._victim(claim) is not None

    def _comes_free(self) -> bool:
        return self.promised < sum(holder.leaving for holder in self.holders)

    def _victim(self, claim: Claim) -> Claim | None:
        # An engine that says it is full while we count a free slot knows of somebody whom we do not: we wait for news.
        if not claim.preempts or not self.room.ready or self.taken != self.room.capacity:
            return None
        lower = [h for h in self.holders if h.preemptible and h.priority < claim.priority]
        lower = [h for h in lower if not h.leaving and h.uid not in self.victims]
        if not lower:
            return None
        lowest = min(holder.priority for holder in lower)
        return max((h for h in lower if h.priority == lowest), key=lambda h: (h.created, h.namespace, h.name))
