"""vLLM behind the gate, simulated: every step gives one token to each sequence that runs. Exact and without a clock."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count

from clora_engine.gate_queue import GateQueue, Ticket


class Simulation:
    """`now` counts steps. `tokens` are those generated so far, by tenant, of running sequences too; `ended` is the step
    in which a tenant's last sequence so far ended."""

    def __init__(self, queue: GateQueue) -> None:
        self.queue = queue
        self.now = 0
        self.ended: dict[str, int] = {}
        self.order: list[str] = []  # tenants in the order of their grants
        self._lengths: dict[Ticket, int] = {}
        self._started: dict[Ticket, int] = {}
        self._done: Counter[str] = Counter()
        self._ends: list[tuple[int, int, Ticket]] = []
        self._ids = count()

    def ask(self, tenant: str, *lengths: int, max_tokens: int | None = None) -> None:
        """One request for a sample of each length. The gate learns the lengths only as they end."""
        tickets = self.queue.put(tenant, len(lengths), max_tokens or max(lengths), 0)
        self._lengths.update(zip(tickets, lengths, strict=True))
        self.fill()

    def fill(self) -> None:
        while (ticket := self.queue.grant()) is not None:
            self.order.append(ticket.tenant)
            self._started[ticket] = self.now
            heapq.heappush(self._ends, (self.now + self._lengths[ticket], next(self._ids), ticket))

    def run(self, until: Callable[[], bool] = lambda: False, steps: int | None = None) -> None:
        """Until the condition holds after some sequence's end, so many steps have passed, or nothing is left."""
        last = None if steps is None else self.now + steps
        while self._ends and not until():
            if last is not None and self._ends[0][0] > last:
                self.now = last
                return
            self.now = self._ends[0][0]
            while self._ends and self._ends[0][0] == self.now:
                self._end(heapq.heappop(self._ends)[2])
            self.fill()

    def _end(self, ticket: Ticket) -> None:
        length = self._lengths.pop(ticket)
        del self._started[ticket]
        self._done[ticket.tenant] += length
        self.ended[ticket.tenant] = self.now
        self.queue.leave(ticket, generated=length)

    @property
    def tokens(self) -> Counter[str]:
        running = Counter[str]()
        for ticket, start in self._started.items():
            running[ticket.tenant] += self.now - start
        return self._done + running

    def pending(self, tenant: str) -> int:
        return self.queue.waiting(tenant) + self.queue.running(tenant)
