"""Whose call the trainer makes next. Pure bookkeeping, without asyncio and without a clock.

An adapter's calls keep the order in which they were put. Of what could be made, the first that is no pass through the
model goes before all passes: an optimizer step, or an export, that waited for the passes of others would hold up its
whole experiment and drive all of them into lock-step. Passes go by the engine's scheduling, between tenants (an
experiment with all its adapters), and piece by piece: a large call has been cut, and others come in between. The unit
is the position computed, which is known before.

FairShare is weighted fair queuing (Demers, Keshav and Shenker, 1989): virtual time grows with what is served, divided
by the weights of all that wait. Every tenant has a time up to which it was served, which moves on by cost over weight,
and is now for one that comes back: idling hoards nothing. The piece that would be over first in this time is next. So
two tenants that wait get positions by their weights, whatever the sizes of their calls, up to a piece of each; and a
short call waits for the piece that is being made and for others' shares of its own time. Deficit round robin, as in the
sampler's gate, would do that only for tenants with many calls: an experiment has one at a time, and would lose its
credit in the short while in which it makes the next.

ShortestRemaining serves first who has the least work left, with ageing (shortest_remaining.py); of equals the one that
was known first. There is no rule of its own for a call that is half made: what was made counts as done, which puts its
tenant before its equals, so that these don't take turns. One with less work left comes in all the same: it ends sooner,
by more than the other ends later, and what waits costs no memory that it would not cost anyway.

Calls that join a pass are charged like others, and may so be ahead of their share, which they pay back by waiting: by
one call at most. A debt that grew with every pass would be collected by those who come later, and be hours long.

Left out: futures, bytes and the process (trainer_client.py), and into what a call is cut (trainer_cut.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from clora_api.v1alpha1.engine import Scheduling
from clora_engine.shortest_remaining import Contender, served
from clora_engine.trainer_calls import Call


@dataclass(eq=False, slots=True)
class _Tenant(Contender):
    """until: virtual time up to which it was served. waiting: tokens of its passes that wait."""

    until: float = 0.0
    waiting: int = 0

    def backlog(self) -> int:
        return self.waiting


_Turn = tuple[_Tenant, Call]


class TrainerQueue:
    """Iterates over the calls that wait, an adapter's in their order."""

    def __init__(self, scheduling: Scheduling) -> None:
        self._fair = scheduling is Scheduling.FAIR_SHARE
        self._calls: list[Call] = []
        self._tenants: dict[str, _Tenant] = {}
        self._virtual = 0.0

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    # ------------------------------------------------------------------------------------------ tenants

    @property
    def tenants(self) -> frozenset[str]:
        """Everybody of whom anything is kept; one that was removed until the next pass."""
        return frozenset(self._tenants)

    def register(self, name: str, weight: int, remaining: int | None) -> None:
        """Make a tenant known, or change its weight and its remaining work (tokens): also of what waits already."""
        tenant = self._tenants.setdefault(name, _Tenant(name, until=self._virtual))
        tenant.registered = True
        tenant.weight, tenant.remaining = weight, remaining

    def remove(self, name: str) -> None:
        """Forget a tenant as soon as nothing of it waits."""
        if name in self._tenants:
            self._tenants[name].registered = False

    # ------------------------------------------------------------------------------------------ calls

    def put(self, call: Call) -> None:
        """Queue a call, which need not be ready yet: it has its place at once."""
        if not call.quick:
            tenant = self._tenants.setdefault(call.tenant, _Tenant(call.tenant))
            if not any(one.tenant == call.tenant and not one.quick for one in self._calls):
                tenant.until = max(tenant.until, self._virtual)
        self._calls.append(call)

    def put_back(self, call: Call) -> None:
        """A call that was taken and has further pieces: before all that its adapter asked for after it."""
        own = [one for one in self._calls if one.adapter == call.adapter]
        self._calls = [*(one for one in self._calls if one.adapter != call.adapter), call, *own]

    def keep(self, waits: Callable[[Call], bool]) -> None:
        """Drop the calls that are no longer to be made."""
        self._calls = [call for call in self._calls if waits(call)]

    def take(self, slots: int, join_below: int, most_tokens: int) -> list[Call]:
        """Take the call whose turn it is, none if none is ready, and those that are made in one pass with it: of other
        tenants, in the order of their turns, all of fewer than `join_below` tokens, at most `slots` and `most_tokens`
        together, a micro-batch of each process. Nothing waits for others to come."""
        firsts = self._firsts()
        quick = next((call for call in firsts if call.quick), None)
        if quick is not None:
            self._calls.remove(quick)
            return [quick]
        turns = self._turns(firsts)
        joined: list[_Turn] = []
        tokens = 0
        for tenant, call in turns:
            fits = tokens + call.tokens <= most_tokens and len(joined) < slots
            small = all(one.trains and one.tokens < join_below for one in (turns[0][1], call))
            if not joined or (small and fits):
                joined.append((tenant, call))
                tokens += call.tokens
        self._serve(joined)
        taken = [call for _, call in joined]
        self._calls = [call for call in self._calls if call not in taken]
        self._forget()
        return taken

    def upcoming(self) -> str | None:
        """The adapter of the call whose turn it is, or will be when it is ready; None if none waits."""
        firsts = self._firsts()
        quick = (call.adapter for call in firsts if call.quick)
        turns = (call.adapter for _, call in self._turns(firsts))
        waiting = (call.adapter for call in self._calls)
        return next((name for names in (quick, turns, waiting) for name in names if name is not None), None)

    # ------------------------------------------------------------------------------------------ inside

    def _firsts(self) -> list[Call]:
        """Ready, and with no other of their adapter before them."""
        passed = set[str | None]()
        firsts: list[Call] = []
        for call in self._calls:
            if call.ready and call.adapter not in passed:
                firsts.append(call)
            passed.add(call.adapter)
        return firsts

    def _turns(self, firsts: Sequence[Call]) -> list[_Turn]:
        """Tenants with a pass that can be made, and the oldest such of each, in the order of their turns."""
        for tenant in self._tenants.values():
            tenant.waiting = 0
        for call in self._calls:
            if not call.quick:
                self._tenants[call.tenant].waiting += max(1, call.tokens)
        heads: dict[str, Call] = {}
        for call in firsts:
            if not call.quick:
                heads.setdefault(call.tenant, call)
        if self._fair:
            turns = [(self._tenants[name], call) for name, call in heads.items()]
            return sorted(turns, key=lambda turn: turn[0].until + turn[1].pieces[0].cost / turn[0].weight)
        known = [(tenant, heads[name]) for name, tenant in self._tenants.items() if name in heads]
        return sorted(known, key=lambda turn: turn[0].haste())

    def _serve(self, turns: Sequence[_Turn]) -> None:
        costs = {tenant: call.pieces[0].cost for tenant, call in turns}
        waiting = [tenant for tenant in self._tenants.values() if tenant.waiting]
        served(costs, waiting)
        if costs:
            self._virtual += sum(costs.values()) / sum(tenant.weight for tenant in waiting)
        for place, (tenant, cost) in enumerate(costs.items()):
            due = tenant.until + cost / tenant.weight
            if place:  # it joined, whether it was its turn or not: ahead by this call at most
                due = max(tenant.until, min(due, self._virtual + cost / tenant.weight))
            tenant.until = due

    def _forget(self) -> None:
        """A tenant whose last call was just taken stays until the next pass: a piece of it may come back."""
        for name in [name for name, one in self._tenants.items() if not (one.registered or one.waiting)]:
            del self._tenants[name]
