"""The gate before vLLM: every sequence waits here for its seat, in the order that gate_queue.py decides.

One queue for each data-parallel rank. Nothing is granted while vLLM's core is down (`is_open`): what waits goes on
waiting, and its owner calls `dispatch` when the core is back. How long one may wait has no bound of its own, for a
light weight beside a heavy one waits for hours with good reason; but where nobody is granted anything for the time-out,
all that wait are given up. All calls belong to one event loop.

Left out: vLLM (sampler.py), and how long a sequence may keep its seat.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from clora_api.v1alpha1.engine import Scheduling
from clora_engine.errors import EngineError, TransientError
from clora_engine.gate_queue import GateQueue, Ticket

__all__ = ["Gate", "GateStats", "Seat"]


@dataclass(frozen=True, slots=True)
class GateStats:
    """Sequences, over all ranks. granted_tokens: what ended sequences took, generated and of prompts computed.
    wait_seconds: from the request to the grant, summed over all sequences granted."""

    seats: int
    taken: int
    queued: int
    granted: int
    granted_tokens: int
    wait_seconds: float


@dataclass(eq=False, slots=True)
class Seat:
    """One sequence's place, from `Gate.enter` on. `rank` and `priority` are for vLLM. serving: for a tenant."""

    rank: int
    ticket: Ticket
    since: float
    granted: asyncio.Future[None] = field(repr=False)
    serving: bool = False
    running: bool = False

    @property
    def priority(self) -> int:
        return self.ticket.priority


@dataclass(slots=True)
class _Stall:
    """Seconds during which a tenant had sequences waiting and none running, those of its served requests apart."""

    seconds: float = 0.0
    since: float | None = None


class Gate:
    """See the module. `now` gives monotonic seconds."""

    def __init__(
        self,
        *,
        ranks: int,
        seats: int,
        scheduling: Scheduling,
        max_queued: int,
        queue_timeout_seconds: float,
        is_open: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        self._queues = [GateQueue(seats, scheduling, max_queued) for _ in range(ranks)]
        self._seats: dict[Ticket, Seat] = {}
        self._timeout = queue_timeout_seconds
        self._is_open = is_open
        self._now = now
        self._stalls: dict[str, _Stall] = {}
        self._ended: EngineError | None = None
        self._waiting: Counter[str] = Counter()  # sequences by tenant, without served requests
        self._running: Counter[str] = Counter()
        self._watches: dict[int, asyncio.TimerHandle] = {}  # by rank, while anything waits there
        self._granted_tokens = 0
        self._wait_seconds = 0.0

    # ------------------------------------------------------------------------------------------ tenants

    def register(self, tenant: str, weight: int, remaining: int | None) -> None:
        """Make a tenant known, or change its weight and remaining work (tokens); at once, also of what waits."""
        for queue in self._queues:
            queue.register(tenant, weight, remaining)
        self._stalls.setdefault(tenant, _Stall())
        self.dispatch()

    def remove(self, tenant: str) -> None:
        """Forget a tenant; what of it waits or runs is still served, and forgotten then."""
        for queue in self._queues:
            queue.remove(tenant)
        self._stalls.pop(tenant, None)
        self.dispatch()

    def seconds_waited(self, tenant: str) -> float:
        """Seconds since it was registered in which it had sequences waiting here and none running; served requests are
        no sequences of its own."""
        stall = self._stalls.get(tenant)
        if stall is None:
            return 0.0
        return stall.seconds + (0.0 if stall.since is None else self._now() - stall.since)

    @property
    def tenants(self) -> frozenset[str]:
        """Everybody of whom anything is kept."""
        return frozenset(self._stalls).union(*(queue.tenants for queue in self._queues))

    # ------------------------------------------------------------------------------------------ sequences

    def enter(
        self, tenant: str, rank: int, n: int, max_tokens: int, prompt_tokens: int, *, serving: bool = False
    ) -> list[Seat]:
        """Queue n sequences. Every seat must be passed to `leave` in the end, whatever becomes of it.

        Raises CapacityError (SamplerQueueFull), or the error that the gate was closed with."""
        if self._ended is not None:
            raise EngineError(str(self._ended), reason=self._ended.reason)
        loop = asyncio.get_running_loop()
        tickets = self._queues[rank].put(tenant, n, max_tokens, prompt_tokens)
        seats = [Seat(rank, ticket, self._now(), loop.create_future(), serving) for ticket in tickets]
        self._seats.update(zip(tickets, seats, strict=True))
        if not serving:
            self._waiting[tenant] += n
        self._note(tenant)
        self.dispatch()
        self._watch(rank)
        return seats

    @asynccontextmanager
    async def taken(self, seat: Seat) -> AsyncIterator[None]:
        """Wait for the seat, and give it back in the end. Raises TransientError (SamplerBusy) when nothing is granted
        for the time-out, or the error that the gate was closed with."""
        try:
            await seat.granted
        except BaseException:
            self.leave(seat)
            raise
        try:
            yield
        finally:
            self.leave(seat)

    def leave(self, seat: Seat, generated: int | None = None, prompt: int = 0) -> None:
        """The sequence has ended with so many tokens generated and of its prompt computed, or is given up. A second
        call does nothing."""
        if self._seats.pop(seat.ticket, None) is None:
            return
        self._queues[seat.rank].leave(seat.ticket, generated, prompt)
        self._granted_tokens += prompt + (generated or 0)
        seat.granted.cancel()
        if not seat.serving:
            _count_down(self._running if seat.running else self._waiting, seat.ticket.tenant)
        self._note(seat.ticket.tenant)
        self.dispatch()

    def emptiest(self, extra: Mapping[int, int]) -> int:
        """The rank with the least sequences running and waiting, `extra` added to those of each rank."""
        return min(
            range(len(self._queues)),
            key=lambda rank: self._queues[rank].taken + self._queues[rank].queued + extra.get(rank, 0),
        )

    # ------------------------------------------------------------------------------------------ the core's life

    def dispatch(self) -> None:
        """Grant the seats that are free."""
        for queue in self._queues:
            while self._ended is None and self._is_open() and (ticket := queue.grant()) is not None:
                seat = self._seats[ticket]
                if seat.granted.done():  # its owner was cancelled, or told to give up, and has not come to `leave` yet
                    queue.take_back(ticket)
                    continue
                self._wait_seconds += self._now() - seat.since
                seat.granted.set_result(None)
                seat.running = True
                if not seat.serving:
                    _count_down(self._waiting, ticket.tenant)
                    self._running[ticket.tenant] += 1
                self._note(ticket.tenant)

    def close(self, error: EngineError) -> None:
        """There will be no core any more: whoever waits gets the error, and whoever comes."""
        self._ended = error
        for watch in self._watches.values():
            watch.cancel()
        for seat in list(self._seats.values()):
            _give_up(seat, EngineError(str(error), reason=error.reason))

    def stats(self) -> GateStats:
        return GateStats(
            seats=sum(queue.seats for queue in self._queues),
            taken=sum(queue.taken for queue in self._queues),
            queued=sum(queue.queued for queue in self._queues),
            granted=sum(queue.granted for queue in self._queues),
            granted_tokens=self._granted_tokens,
            wait_seconds=self._wait_seconds,
        )

    def _watch(self, rank: int) -> None:
        """Look after the time-out whether anything was granted meanwhile, for as long as anything waits."""
        queue = self._queues[rank]
        if rank not in self._watches and queue.queued:
            loop = asyncio.get_running_loop()
            self._watches[rank] = loop.call_later(self._timeout, self._look, rank, queue.granted)

    def _look(self, rank: int, granted: int) -> None:
        del self._watches[rank]
        if self._queues[rank].granted == granted:
            message = f"waited for the sampler, which has begun no sequence for {self._timeout:g} s"
            for seat in list(self._seats.values()):
                if seat.rank == rank:
                    _give_up(seat, TransientError(message, reason="SamplerBusy"))
        else:
            self._watch(rank)

    def _note(self, tenant: str) -> None:
        """Start or stop the tenant's clock."""
        stall = self._stalls.get(tenant)
        if stall is None:
            return
        stalled = self._waiting[tenant] > 0 and not self._running[tenant]
        if stalled and stall.since is None:
            stall.since = self._now()
        elif not stalled and stall.since is not None:
            stall.seconds += self._now() - stall.since
            stall.since = None


def _count_down(counts: Counter[str], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]


def _give_up(seat: Seat, error: EngineError) -> None:
    if not seat.granted.done():
        seat.granted.set_exception(error)
        seat.granted.exception()  # not every seat is waited for already
