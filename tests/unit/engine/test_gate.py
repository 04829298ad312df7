"""The gate around its books: waiting, giving up, a core that goes and comes, and the seconds that were waited."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from clora_api.v1alpha1.engine import Scheduling
from clora_engine.errors import EngineError, TransientError
from clora_engine.gate import Gate, Seat


class World:
    """A clock that is set by hand, and a core that is up or not."""

    def __init__(self, **changes: Any) -> None:
        self.seconds = 0.0
        self.up = True
        settings: dict[str, Any] = {
            "ranks": 1, "seats": 4, "scheduling": Scheduling.FAIR_SHARE, "max_queued": 100,
            "queue_timeout_seconds": 60.0, "is_open": lambda: self.up, "now": lambda: self.seconds,
        }  # fmt: skip
        self.gate = Gate(**(settings | changes))

    def enter(self, tenant: str, n: int, rank: int = 0) -> list[Seat]:
        return self.gate.enter(tenant, rank, n, 10, 0)

    def has_seat(self, seats: list[Seat]) -> list[bool]:
        return [seat.granted.done() for seat in seats]


async def test_a_seat_that_is_given_back_goes_to_who_waits() -> None:
    world = World()
    seats = world.enter("a", 5)
    assert world.has_seat(seats) == [True, True, True, True, False]
    async with world.gate.taken(seats[0]):
        waiting = asyncio.ensure_future(_hold(world.gate, seats[4]))
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
    stats = world.gate.stats()
    assert (stats.seats, stats.taken, stats.queued, stats.granted) == (4, 3, 0, 5)


async def _hold(gate: Gate, seat: Seat) -> None:
    async with gate.taken(seat):
        pass


async def test_cancelled_while_waiting_it_leaves_the_queue_at_once() -> None:
    world = World()
    seats = world.enter("a", 6)
    waiting = asyncio.ensure_future(_hold(world.gate, seats[4]))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert world.gate.stats().queued == 1
    world.gate.leave(seats[0])
    assert world.has_seat(seats[5:]) == [True]


async def test_cancelled_at_the_moment_of_the_grant_it_gives_the_seat_back() -> None:
    world = World()
    seats = world.enter("a", 6)
    waiting = asyncio.ensure_future(_hold(world.gate, seats[4]))
    await asyncio.sleep(0)
    world.gate.leave(seats[0])
    assert world.has_seat(seats[4:]) == [True, False]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert world.has_seat(seats[4:]) == [True, True]
    assert world.gate.stats().taken == 4


async def test_a_grant_to_who_has_just_been_cancelled_goes_to_the_next_and_costs_nothing() -> None:
    world = World()
    seats = world.enter("a", 6)
    waiting = [asyncio.ensure_future(_hold(world.gate, seat)) for seat in seats[4:]]
    await asyncio.sleep(0)
    waiting[0].cancel()
    world.gate.leave(seats[0])  # before the cancelled task has run
    assert seats[5].granted.done()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    await waiting[1]
    stats = world.gate.stats()
    assert (stats.taken, stats.queued, stats.granted) == (3, 0, 5)


async def test_who_waits_is_given_up_when_nothing_is_granted_for_the_time_out() -> None:
    world = World(queue_timeout_seconds=0.001)
    seats = world.enter("a", 5)
    with pytest.raises(TransientError, match=r"has begun no sequence for 0\.001 s") as caught:
        await _hold(world.gate, seats[4])
    assert caught.value.reason == "SamplerBusy"
    assert world.gate.stats().queued == 0


async def test_one_that_waits_for_longer_than_the_time_out_goes_on_while_others_are_served() -> None:
    """As a light weight does beside a heavy one, or the longest work beside shorter."""
    world = World(queue_timeout_seconds=0.05, scheduling=Scheduling.SHORTEST_REMAINING, seats=1)
    world.gate.register("long", 100, 10**9)
    (running,) = world.enter("short", 1)
    (waiting,) = world.enter("long", 1)
    until = asyncio.get_running_loop().time() + 0.2
    while asyncio.get_running_loop().time() < until:
        (following,) = world.enter("short", 1)
        world.gate.leave(running)
        running = following
        await asyncio.sleep(0)
    assert not waiting.granted.done()
    world.gate.leave(running)
    async with world.gate.taken(waiting):
        pass


async def test_nothing_is_granted_to_who_was_told_that_it_is_over() -> None:
    world = World()
    running = world.enter("a", 4)
    (waiting,) = world.enter("a", 1)
    world.gate.close(EngineError("over", reason="SamplerClosed"))
    world.gate.leave(running[0])
    with pytest.raises(EngineError, match="over"):
        await _hold(world.gate, waiting)


async def test_nothing_is_granted_while_the_core_is_down() -> None:
    world = World()
    running = world.enter("a", 4)
    waiting = world.enter("a", 4)
    world.up = False
    for seat in running:
        world.gate.leave(seat)
    assert not any(world.has_seat(waiting))
    world.up = True
    world.gate.dispatch()
    assert all(world.has_seat(waiting))


async def test_when_no_core_will_come_who_waits_and_who_comes_is_told() -> None:
    world = World()
    seats = world.enter("a", 6)
    waiting = asyncio.ensure_future(_hold(world.gate, seats[4]))
    leaving = asyncio.ensure_future(_hold(world.gate, seats[5]))
    await asyncio.sleep(0)
    leaving.cancel()
    world.gate.close(EngineError("the end", reason="SamplerUnavailable"))
    with pytest.raises(EngineError, match="the end") as caught:
        await waiting
    assert caught.value.reason == "SamplerUnavailable"
    with pytest.raises(EngineError, match="the end"):
        world.enter("b", 1)


async def test_seconds_count_in_which_a_tenant_waits_and_nothing_of_it_runs() -> None:
    world = World()
    for tenant in "ab":
        world.gate.register(tenant, 100, None)
    many = world.enter("a", 20)
    world.gate.register("c", 100, None)
    few, late = world.enter("b", 1), world.enter("c", 1)
    world.seconds = 5.0
    assert [world.gate.seconds_waited(tenant) for tenant in "abc"] == [0.0, 0.0, 5.0]
    world.gate.leave(many[0])
    assert world.has_seat(late) == [True]
    world.seconds = 9.0
    assert world.gate.seconds_waited("c") == 5.0
    assert world.gate.stats().wait_seconds == 5.0
    world.gate.leave(few[0], 10, 3)
    assert world.gate.stats().granted_tokens == 13


async def test_served_requests_neither_wait_nor_run_for_training() -> None:
    world = World(seats=1)
    for tenant in "ab":
        world.gate.register(tenant, 100, None)
    (other,) = world.enter("b", 1)
    served = world.gate.enter("a", 0, 1, 10, 0, serving=True)
    world.seconds = 5.0
    assert world.gate.seconds_waited("a") == 0.0, "a tenant's request waits, and no step does"
    own = world.enter("a", 1)
    world.gate.leave(other)
    assert world.has_seat([*served, *own]) == [True, False]
    world.seconds = 8.0
    assert world.gate.seconds_waited("a") == 3.0, "a tenant's request runs, and the step waits still"
    world.gate.leave(served[0])
    assert world.has_seat(own) == [True]
    world.seconds = 9.0
    assert world.gate.seconds_waited("a") == 3.0
    world.gate.leave(own[0])
    assert not world.gate._waiting
    assert not world.gate._running


async def test_nothing_stays_of_a_tenant_that_left() -> None:
    world = World(ranks=2)
    world.gate.register("a", 100, 1000)
    seats = world.enter("a", 6, rank=1)
    world.gate.remove("a")
    assert world.gate.tenants == {"a"}, "its sequences are still served"
    for seat in seats:
        world.gate.leave(seat)
    assert world.gate.tenants == frozenset()


async def test_the_emptiest_rank_counts_what_runs_what_waits_and_what_is_promised() -> None:
    world = World(ranks=3)
    world.enter("a", 6, rank=0)
    world.enter("a", 2, rank=1)
    assert world.gate.emptiest({}) == 2
    assert world.gate.emptiest({2: 3}) == 1
    assert world.gate.emptiest({1: 5, 2: 9}) == 0
