"""The trainer queue's books under any order of events, and what its promises mean for tenants."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from clora_api.v1alpha1.engine import Scheduling
from clora_engine import trainer_protocol as protocol
from clora_engine.shortest_remaining import PATIENCE
from clora_engine.trainer_calls import Call, cost_of
from clora_engine.trainer_queue import TrainerQueue
from clora_engine.types import AdamParams, Completion, Loss, Row
from tests.unit.engine.trainer_simulation import Simulation, make

FAIR, SHORTEST = Scheduling.FAIR_SHARE, Scheduling.SHORTEST_REMAINING
BOTH = pytest.mark.parametrize("scheduling", [FAIR, SHORTEST])
ADAPTERS = st.sampled_from(["a", "a/start", "b", "c", "d"])
TENANTS = st.sampled_from(["a", "b", "c", "d"])
SLOTS, JOIN_BELOW, MOST_TOKENS = 3, 20, 40
PASSES, QUICK = (protocol.ForwardBackward, protocol.Forward), (protocol.OptimStep, protocol.Export)


# ------------------------------------------------------------------------------------------------ the books


class Books(RuleBasedStateMachine):
    """Calls of all kinds, ready or not yet, with several pieces, that are made, dropped, or cancelled between their
    pieces; tenants that come, change and go; in any order."""

    scheduling = FAIR

    def __init__(self) -> None:
        super().__init__()
        self.queue = TrainerQueue(self.scheduling)
        self.waiting: list[Call] = []  # in the order in which they were put
        self.running: list[Call] = []
        self.registered: set[str] = set()

    @rule(tenant=TENANTS, weight=st.sampled_from([1, 100, 300, 1000]), remaining=st.none() | st.integers(0, 500))
    def register(self, tenant: str, weight: int, remaining: int | None) -> None:
        self.queue.register(tenant, weight, remaining)
        self.registered.add(tenant)

    @rule(tenant=TENANTS)
    def remove(self, tenant: str) -> None:
        self.queue.remove(tenant)
        self.registered.discard(tenant)

    @rule(
        adapter=ADAPTERS,
        wanted=st.lists(
            st.tuples(st.sampled_from([*PASSES, *QUICK]), st.lists(st.integers(1, 30), min_size=1, max_size=3)),
            min_size=1,
            max_size=3,
        ),
        ready=st.booleans(),
    )
    def put(self, adapter: str, wanted: list[tuple[type, list[int]]], ready: bool) -> None:
        for kind, costs in wanted:
            call = make(adapter, kind, *(costs if kind in PASSES else ()))
            call.ready = ready
            self.waiting.append(call)
            self.queue.put(call)

    @rule(data=st.data())
    def becomes_ready(self, data: st.DataObject) -> None:
        unready = [call for call in self.waiting if not call.ready]
        if unready:
            data.draw(st.sampled_from(unready)).ready = True

    @rule(data=st.data())
    def is_given_up(self, data: st.DataObject) -> None:
        if self.waiting:
            gone = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(gone)
            self.queue.keep(lambda call: call is not gone)

    @precondition(lambda self: not self.running)
    @rule()
    def take(self) -> None:
        firsts = [c for c in self.waiting if c.ready and self.waiting_of(c.adapter)[0] is c]
        upcoming = self.queue.upcoming()
        taken = self.queue.take(SLOTS, JOIN_BELOW, MOST_TOKENS)
        assert bool(taken) == bool(firsts)
        assert all(call in firsts for call in taken)
        if taken:
            assert taken[0].adapter == upcoming
            quick = [call for call in firsts if call.quick]
            assert not quick or taken == quick[:1]
        if len(taken) > 1:
            assert len({call.tenant for call in taken}) == len(taken) <= SLOTS
            assert all(call.trains and call.tokens < JOIN_BELOW for call in taken)
            assert sum(call.tokens for call in taken) <= MOST_TOKENS
        self.waiting = [call for call in self.waiting if call not in taken]
        self.running = taken

    def waiting_of(self, adapter: str | None) -> list[Call]:
        return [call for call in self.waiting if call.adapter == adapter]

    @precondition(lambda self: self.running)
    @rule(given_up=st.booleans())
    def made(self, given_up: bool) -> None:
        for call in self.running:
            call.pieces.popleft()
            if call.pieces and not given_up:
                self.queue.put_back(call)
                own = self.waiting_of(call.adapter)
                at = self.waiting.index(own[0]) if own else len(self.waiting)
                self.waiting.insert(at, call)
        self.running = []

    @invariant()
    def holds(self) -> None:
        queued = list(self.queue)
        assert len(queued) == len(self.waiting)
        assert set(queued) == set(self.waiting)
        for adapter in {call.adapter for call in queued}:
            assert [call for call in queued if call.adapter == adapter] == self.waiting_of(adapter)
        passing = {call.tenant for call in queued if not call.quick}
        assert self.registered | passing <= self.queue.tenants

    def teardown(self) -> None:
        """In the end everything is made, and nothing is kept of those who are not registered."""
        for call in self.waiting:
            call.ready = True
        while taken := self.queue.take(SLOTS, JOIN_BELOW, MOST_TOKENS):
            for call in taken:
                self.waiting.remove(call)
        assert not self.waiting
        self.queue.take(SLOTS, JOIN_BELOW, MOST_TOKENS)
        assert self.queue.tenants == self.registered


class ShortestBooks(Books):
    scheduling = SHORTEST


Books.TestCase.settings = ShortestBooks.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None
)
TestBooks = Books.TestCase
TestShortestBooks = ShortestBooks.TestCase


def test_a_pass_costs_its_positions_and_half_of_them_without_a_way_back() -> None:
    one = Completion(ids=[1] * 40, weights=[1.0] * 40, logprobs=[0.0] * 40, advantages=[1.0] * 40)
    rows = [Row(prompt=[2] * 20, completions=[one, one])]
    assert cost_of(protocol.ForwardBackward("a", rows, Loss(name="PPO", denominator=1.0))) == 100
    assert cost_of(protocol.Forward("a", rows, 1.0)) == 50
    assert cost_of(protocol.OptimStep("a", AdamParams(learning_rate=1.0))) == 0
    assert cost_of(protocol.Forward("a", [], 1.0)) == 1


@BOTH
def test_what_is_no_pass_goes_first_in_its_adapters_order(scheduling: Scheduling) -> None:
    running = Simulation(scheduling)
    running.ask("a", 10)
    for adapter in "ab":
        running.queue.put(make(adapter, protocol.OptimStep))
    running.ask("b", 10)
    running.run()
    assert running.order[0] == "b"
    assert sorted(map(str, running.order[1:])) == ["a", "a", "b"]
    own = [place for place, adapter in enumerate(running.order) if adapter == "a"]
    assert own[1] == own[0] + 1, "its optimizer step waits for no pass of another"


# ------------------------------------------------------------------------------------------------ FairShare


@pytest.mark.parametrize(
    ("weights", "costs"),
    [
        ((100, 300), (1000, 1000)),
        ((300, 100), (1000, 1000)),
        ((100, 300), (1000, 30)),
        ((100, 300), (30, 1000)),
        ((1, 1000), (100, 100)),
    ],
)
def test_positions_follow_the_weights_while_both_wait(weights: tuple[int, int], costs: tuple[int, int]) -> None:
    """Each asks for its next call only when the one before is over, as an experiment does."""
    running = Simulation(FAIR)
    for name, weight, cost in zip("ab", weights, costs, strict=True):
        running.queue.register(name, weight, None)
        running.ask(name, *[cost] * 3)
    each = dict(zip("ab", costs, strict=True))
    running.when_over = lambda call: void(running.ask(call.tenant, *[each[call.tenant]] * 3))
    ratios = dict(zip("ab", weights, strict=True))
    for _ in range(20_000):
        running.step()
        served = [running.positions[name] / ratios[name] for name in "ab"]
        assert abs(served[0] - served[1]) <= sum(each[name] / ratios[name] for name in "ab")
    assert min(running.positions.values()) > 0


def void(_: object) -> None:
    return None


def test_weights_count_for_those_who_ask_for_one_thing_at_a_time() -> None:
    """Four in a closed loop, each away for a while after every call: with a credit that is lost meanwhile, thrice the
    weight would get no more than the others."""
    running = Simulation(FAIR)
    away: list[tuple[int, str]] = []
    for name in "abcd":
        running.queue.register(name, 300 if name == "a" else 100, None)
        running.ask(name, 1000)
    running.when_over = lambda call: away.append((running.now + 500, call.tenant))
    for _ in range(4000):
        running.step()
        for back in [one for one in away if one[0] <= running.now]:
            away.remove(back)
            running.ask(back[1], 1000)
    others = [running.positions[name] for name in "bcd"]
    assert max(others) - min(others) <= 2000
    assert running.positions["a"] > 1.9 * others[0], "every other pass: it cannot have two in a row"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [1, 4])
def test_a_tenant_with_huge_batches_delays_a_short_one_by_its_share_and_a_piece(seed: int, factor: int) -> None:
    """64 pieces a call, and the next call at once; `factor`: its weight over that of the short one."""
    draw = random.Random(seed)
    piece, own = 1600, 1600 * 64 // 64
    running = Simulation(FAIR)
    running.queue.register("huge", 100 * factor, None)
    running.queue.register("short", 100, None)
    running.ask("huge", *[piece] * 64)
    running.when_over = lambda call: void(running.ask("huge", *[piece] * 64)) if call.tenant == "huge" else None
    for _ in range(50):
        for _ in range(draw.randrange(1, 40)):
            running.step()
        asked = running.now
        running.ask("short", own)
        while running.ended.get("short", -1) <= asked:
            running.step()
        assert running.ended["short"] - asked <= own + factor * own + piece


def test_idling_hoards_nothing() -> None:
    running = Simulation(FAIR)
    for name in "ab":
        running.queue.register(name, 100, None)
    for _ in range(100):
        running.ask("a", 10)
    running.run()
    for name in "ba":
        for _ in range(10):
            running.ask(name, 10)
    running.order.clear()
    running.run()
    assert all(running.order[:16].count(name) == 8 for name in "ab")


def test_a_call_that_joins_is_charged() -> None:
    """Two join each other's passes, and get no more than the third, whose calls are too large for that."""
    running = Simulation(FAIR, slots=2, join_below=50, most_tokens=100)
    costs = {"a": 40, "b": 40, "c": 60}
    for name, cost in costs.items():
        running.queue.register(name, 100, None)
        for _ in range(100):
            running.ask(name, cost)
    joined = 0
    for _ in range(60):
        joined += len(running.step()) == 2
        assert max(running.positions.values()) - min(running.positions[name] for name in costs) <= 100
    assert joined > 25


@pytest.mark.parametrize(("weight", "costs"), [(100, (18, 2)), (50, (10, 10)), (1, (10, 10))])
def test_who_has_joined_for_long_owes_a_newcomer_one_call(weight: int, costs: tuple[int, int]) -> None:
    """`a` trains more than its share in the passes of `b`; then `b` is done, and `c` comes with large calls."""
    running = Simulation(FAIR, slots=2, join_below=50, most_tokens=100)
    for name, own, cost in zip("ab", (weight, 100), costs, strict=True):
        running.queue.register(name, own, None)
        for _ in range(1000):
            running.ask(name, cost)
    for _ in range(1000):
        assert len(running.step()) == 2
    running.queue.remove("b")
    running.queue.register("c", 100, None)
    for _ in range(100):
        running.ask("a", costs[0])
        running.ask("c", 1000)
    had = running.positions["a"]
    running.run(lambda: running.positions["a"] > had)
    assert running.positions["c"] <= 2 * costs[0] * 100 // weight + 1000


@BOTH
def test_what_its_adapter_asked_for_later_waits_for_all_pieces(scheduling: Scheduling) -> None:
    running = Simulation(scheduling)
    first = running.ask("a", 10, 10, 10)
    later = running.ask("a", 10)
    running.ask("b", 10, 10)
    made: list[Call] = []
    while taken := running.step():
        made += taken
    assert [call for call in made if call.adapter == "a"] == [first] * 3 + [later]


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(1, 1000), min_size=2, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_what_those_who_wait_get_differs_by_a_bound_that_time_does_not_change(weights: list[int], seed: int) -> None:
    draw = random.Random(seed)
    running = Simulation(FAIR)
    names = [f"t{i}" for i in range(len(weights))]
    most = {name: draw.choice([1, 10, 1000]) for name in names}
    for name, weight in zip(names, weights, strict=True):
        running.queue.register(name, weight, None)
        running.ask(name, *(draw.randint(1, most[name]) for _ in range(600)))
    ratios = dict(zip(names, weights, strict=True))
    bound = sum(sorted(most[name] / ratios[name] for name in names)[-2:])
    while len(list(running.queue)) == len(names):
        running.step()
        served = [running.positions[name] / ratios[name] for name in names]
        assert max(served) - min(served) <= bound + 1e-6


# ------------------------------------------------------------------------------------------------ ShortestRemaining


def test_less_work_over_weight_trains_first_also_between_the_pieces_of_another() -> None:
    running = Simulation(SHORTEST)
    for name, weight, work in (("a", 100, 500), ("b", 100, 400), ("c", 200, 600)):
        running.queue.register(name, weight, work)
    running.ask("a", 10, 10, 10)
    running.step()
    running.ask("b", 10, 10)
    running.ask("c", 10)
    running.run()
    assert running.order == ["a", "c", "b", "b", "a", "a"]


def test_of_equals_what_is_begun_is_finished() -> None:
    running = Simulation(SHORTEST)
    for name in "abc":
        running.queue.register(name, 100, 300)
    running.ask("b", *[10] * 3)
    running.step()
    for name in "ac":
        running.ask(name, *[10] * 3)
    running.run()
    assert running.order == [*"bbb", *"aaa", *"ccc"]


def completions(scheduling: Scheduling, jobs: int = 8, steps: int = 10, pieces: int = 3) -> list[int]:
    """When each of so many equal jobs ends. A job asks for its next step as soon as the one before is over."""
    running = Simulation(scheduling)
    names = [f"job{i}" for i in range(jobs)]
    left = dict.fromkeys(names, steps)
    for name in names:
        running.queue.register(name, 100, steps * pieces * 100)
        running.ask(name, *[100] * pieces)

    def next_step(call: Call) -> None:
        name = call.tenant
        left[name] -= 1
        if left[name]:
            running.queue.register(name, 100, left[name] * pieces * 100)
            running.ask(name, *[100] * pieces)
        else:
            running.queue.remove(name)

    running.when_over = next_step
    running.run()
    assert sum(running.positions.values()) == running.now == jobs * steps * pieces * 100
    return sorted(running.ended.values())


def test_equal_jobs_end_one_after_another_and_the_last_no_later() -> None:
    fair, shortest = completions(FAIR), completions(SHORTEST)
    assert sum(shortest) < 0.6 * sum(fair)
    assert shortest[-1] == fair[-1]
    assert all(later - earlier == fair[-1] // 8 for earlier, later in pairwise(shortest))


def test_a_job_is_passed_by_for_a_bounded_time() -> None:
    """Short jobs without end beside a long one: all its steps together wait for PATIENCE times its own work."""
    running = Simulation(SHORTEST)
    running.queue.register("long", 100, 1000)
    running.ask("long", *[100] * 10)
    running.ask("short-0", 10)

    def another(call: Call) -> None:
        if call.tenant != "long":
            running.ask(f"short-{int(call.tenant.partition('-')[2]) + 1}", 10)

    running.when_over = another
    running.run(until=lambda: "long" in running.ended)
    others = running.now - running.positions["long"]
    assert PATIENCE * 1000 - 20 <= others <= PATIENCE * 1000 + 40
