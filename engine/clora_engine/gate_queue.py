"""Who samples next: the books of one data-parallel rank's seats. Pure bookkeeping, without asyncio and without a clock.

A seat is one sequence that vLLM decodes; there are as many as vLLM's max_num_seqs, so that vLLM's own waiting queue
stays about empty and the order is decided here. The unit is the sequence, not the request: a request for n samples
queues n sequences, which take seats one by one. So a large n needs no n seats at once, keeps nobody from overtaking,
and gives every seat back as soon as that sequence has ended.

FairShare is deficit round robin (Shreedhar and Varghese, 1995). Each round gives every tenant with waiting sequences a
credit (deficit) of `weight` tokens; a tenant whose credit covers the cost of its head gets the next seat, and pays. The
cost is counted in tokens generated and tokens of a prompt computed, and estimated: the tenant's mean so far, at most
max_tokens plus, for the first sequence of a request, its prompt (the others find that in the prefix cache), which is
also where it starts. When the sequence ends, the difference to what it took is settled; one that is aborted stays
charged, for vLLM doesn't say what it took.
A tenant with nothing waiting loses its credit and keeps its debt, which the rounds that pass pay off. Credit is limited
to what a share of the seats costs: where an estimate was too high, the rounds that paid for it may have been those of a
tenant that was alone, and cost nobody anything. So over any time in which two tenants have sequences waiting, their
tokens over weight differ by no more than their deficits can, however long that time is.

ShortestRemaining serves first who has the least work left, with ageing (shortest_remaining.py).

Sequences that run are not taken back; so that a newcomer need not wait for one to end, seats are set aside. Every
tenant that is registered or has sequences here has a share, its part of the seats by weight, at least one. Whoever has
its share leaves free what others have not taken of theirs, up to a quarter of all seats (at least one); the others take
these without waiting for their turn, but pay. One that owes more than its share of sequences waits for its turn, and
nothing is set aside for it. With ShortestRemaining all others have that quarter between them, the least work first, and
the first has the rest: a newcomer beside several others may so have to wait for a sequence to end. A tenant that is
registered alone has all seats; beside idle ones, three quarters at least; and more than a quarter is never free while
anybody waits.

Left out: futures, time-outs and seconds (gate.py). Shares hold on each rank by itself: leases go to the emptiest.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from clora_api.v1alpha1.engine import Scheduling
from clora_engine.errors import CapacityError
from clora_engine.shortest_remaining import Contender, served

RESERVED_PART = 4
"""One seat in so many is set aside, and at least one."""
MEAN_OVER = 32
"""Sequences over which the mean length runs: long enough to be steady, short enough to follow a policy that learns."""


class TicketState(Enum):
    WAITING = "waiting"
    GRANTED = "granted"
    GONE = "gone"


@dataclass(eq=False, slots=True)
class Ticket:
    """One sequence. Only the queue writes to it. prompt_tokens: 0 where the prefix cache will hold the prompt. Once it
    is granted: `charged` tokens, and the `priority` among vLLM's requests (lower is first)."""

    tenant: str
    max_tokens: int
    prompt_tokens: int
    state: TicketState = TicketState.WAITING
    charged: int = 0
    priority: int = 0


@dataclass(eq=False, slots=True)
class _Tenant(Contender):
    """deficit: tokens of credit, negative for a debt. mean: tokens of a sequence; None before the first has ended."""

    waiting: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)
    taken: int = 0
    share: int = 1
    deficit: int = 0
    last_cost: int = 1
    mean: float | None = None
    ended: int = 0

    def cost(self) -> int:
        """Tokens that the head is expected to take; without one, what the last was expected to."""
        head = next(iter(self.waiting), None)
        if head is None:
            return self.last_cost
        most = head.max_tokens + head.prompt_tokens
        return most if self.mean is None else max(1, min(most, round(self.mean)))

    def backlog(self) -> int:
        return len(self.waiting) * self.cost()

    def claim(self) -> int:
        """Seats of its share that it may still take out of turn."""
        return max(0, self.share - self.taken) if self.deficit + self.share * self.cost() > 0 else 0

    def observe(self, tokens: int) -> None:
        """A sequence has taken so many tokens."""
        self.ended = min(self.ended + 1, MEAN_OVER)
        mean = tokens if self.mean is None else self.mean
        self.mean = mean + (tokens - mean) / self.ended


class GateQueue:
    """See the module. After every call, ask `grant` until it gives None."""

    def __init__(self, seats: int, scheduling: Scheduling, max_queued: int) -> None:
        self.seats = seats
        self.reserved = max(1, seats // RESERVED_PART) if seats > 1 else 0
        self.taken = 0
        self.granted = 0  # sequences so far
        self._scheduling = scheduling
        self._max_queued = max_queued
        self._tenants: dict[str, _Tenant] = {}
        self._ring: OrderedDict[str, _Tenant] = OrderedDict()  # those with waiting sequences, whose turn it is first

    # ------------------------------------------------------------------------------------------ tenants

    @property
    def tenants(self) -> tuple[str, ...]:
        """Everybody of whom anything is kept."""
        return tuple(self._tenants)

    @property
    def queued(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._ring.values())

    def waiting(self, name: str) -> int:
        """Sequences of this tenant that wait."""
        return len(self._tenants[name].waiting) if name in self._tenants else 0

    def running(self, name: str) -> int:
        """Seats that this tenant has."""
        return self._tenants[name].taken if name in self._tenants else 0

    def deficit(self, name: str) -> int:
        """Tokens of credit; a debt is negative."""
        return self._tenants[name].deficit

    def register(self, name: str, weight: int, remaining: int | None) -> None:
        """Make a tenant known, or change its weight and its remaining work (tokens): also of what waits already."""
        tenant = self._tenants.setdefault(name, _Tenant(name))
        tenant.registered = True
        tenant.weight, tenant.remaining = weight, remaining
        self._divide()

    def remove(self, name: str) -> None:
        """Forget a tenant as soon as nothing of it waits or runs."""
        tenant = self._tenants.get(name)
        if tenant is not None:
            tenant.registered = False
            self._forget_if_done(tenant)

    # ------------------------------------------------------------------------------------------ sequences

    def put(self, name: str, n: int, max_tokens: int, prompt_tokens: int) -> list[Ticket]:
        """Queue a request for n samples of one prompt. Raises CapacityError (SamplerQueueFull) when the tenant would
        have too many waiting; then none of the n is queued."""
        waiting = self.waiting(name)
        if waiting + n > self._max_queued:
            raise CapacityError(
                f"{waiting} sequences of {name} wait for the sampler, which queues at most {self._max_queued} of one "
                "experiment: lower environment.concurrency",
                reason="SamplerQueueFull",
                field="environment.concurrency",
            )
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name)
            self._divide()
        if not tenant.waiting:
            self._ring[name] = tenant
        tickets = [Ticket(name, max_tokens, 0 if i else prompt_tokens) for i in range(n)]
        tenant.waiting.update(dict.fromkeys(tickets))
        return tickets

    def grant(self) -> Ticket | None:
        """The next sequence to take a seat, which it has from now on until `leave`."""
        if self.taken >= self.seats or not self._ring:
            return None
        tenant = self._choose()
        if tenant is None:
            return None
        cost = tenant.cost()
        ticket, _ = tenant.waiting.popitem(last=False)
        self.granted += 1
        # When vLLM's KV cache runs out, it preempts the highest: what is above its tenant's share counts as granted a
        # whole turnover of the seats later; not for ever behind all others, or it might never come back.
        ticket.priority = self.granted + (self.seats if tenant.taken >= tenant.share else 0)
        ticket.state, ticket.charged = TicketState.GRANTED, cost
        tenant.taken += 1
        self.taken += 1
        tenant.last_cost = cost
        self._pay(tenant, cost)
        served({tenant: cost}, self._ring.values())
        self._ring.move_to_end(tenant.name)
        self._leave_ring_if_empty(tenant)
        return ticket

    def leave(self, ticket: Ticket, generated: int | None = None, prompt: int = 0) -> None:
        """A sequence has ended with so many tokens generated and of the prompt computed, or, without, was given up
        where it was. A second call does nothing."""
        if ticket.state is TicketState.GONE:
            return
        tenant = self._tenants[ticket.tenant]
        if ticket.state is TicketState.WAITING:
            del tenant.waiting[ticket]
            self._leave_ring_if_empty(tenant)
        else:
            tenant.taken -= 1
            self.taken -= 1
            if generated is not None:
                tenant.observe(generated + prompt)
                self._pay(tenant, generated + prompt - ticket.charged)
        ticket.state = TicketState.GONE
        self._limit_credit(tenant)
        self._forget_if_done(tenant)

    def take_back(self, ticket: Ticket) -> None:
        """A grant that came too late, for its owner has gone: nothing is charged."""
        assert ticket.state is TicketState.GRANTED
        self._pay(self._tenants[ticket.tenant], -ticket.charged)
        self.granted -= 1
        self.leave(ticket)

    # ------------------------------------------------------------------------------------------ inside

    def _choose(self) -> _Tenant | None:
        fair = self._scheduling is Scheduling.FAIR_SHARE
        # Of equals the one that was known first, so that it comes to its end before the next begins.
        first = self._turn() if fair else min((t for t in self._tenants.values() if t.waiting), key=_Tenant.haste)
        if first.taken < first.share or self.seats - self.taken > self._set_aside(first):
            return first
        claimants = [tenant for tenant in self._ring.values() if tenant.claim()]
        if fair or not claimants:
            return next(iter(claimants), None)
        return min(claimants, key=_Tenant.haste)

    def _turn(self) -> _Tenant:
        """Whose credit covers its head. If nobody's does, rounds pass until somebody's does."""
        while True:
            for tenant in self._ring.values():
                if tenant.deficit >= tenant.cost():
                    return tenant
            rounds = min(-((t.deficit - t.cost()) // t.weight) for t in self._ring.values())
            for tenant in self._tenants.values():
                self._pay(tenant, -rounds * tenant.weight)

    def _set_aside(self, tenant: _Tenant) -> int:
        """Free seats that this tenant must leave to others."""
        reserved = self.reserved
        if self._scheduling is Scheduling.SHORTEST_REMAINING:
            reserved = max(0, reserved - (self.taken - tenant.taken))  # those of others count: a quarter in all
        claims = sum(other.claim() for other in self._tenants.values() if other is not tenant)
        return min(reserved, claims)

    def _pay(self, tenant: _Tenant, tokens: int) -> None:
        """Negative: credit. Without anything waiting it pays off debts, and is otherwise lost."""
        if self._scheduling is Scheduling.FAIR_SHARE:
            tenant.deficit -= tokens
            if not tenant.waiting:
                tenant.deficit = min(0, tenant.deficit)

    def _limit_credit(self, tenant: _Tenant) -> None:
        """A share's worth of sequences and a round: what an estimate that was too high, or a dear head that was
        cancelled, leaves beyond that is lost."""
        tenant.deficit = min(tenant.deficit, tenant.share * tenant.cost() + tenant.weight)

    def _divide(self) -> None:
        """Every tenant's part of the seats, at least one."""
        total = sum(tenant.weight for tenant in self._tenants.values())
        for tenant in self._tenants.values():
            tenant.share = max(1, self.seats * tenant.weight // total)

    def _leave_ring_if_empty(self, tenant: _Tenant) -> None:
        if not tenant.waiting:
            del self._ring[tenant.name]
            tenant.deficit = min(0, tenant.deficit)

    def _forget_if_done(self, tenant: _Tenant) -> None:
        if not (tenant.registered or tenant.waiting or tenant.taken):
            del self._tenants[tenant.name]
            self._divide()
