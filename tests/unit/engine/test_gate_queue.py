"""The gate's books under any order of events, and what its promises mean for tenants, with vLLM simulated."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from clora_api.v1alpha1.engine import Scheduling
from clora_engine.errors import CapacityError
from clora_engine.gate_queue import GateQueue, Ticket, TicketState
from clora_engine.shortest_remaining import PATIENCE
from tests.unit.engine.gate_simulation import Simulation

FAIR, SHORTEST = Scheduling.FAIR_SHARE, Scheduling.SHORTEST_REMAINING
BOTH = pytest.mark.parametrize("scheduling", [FAIR, SHORTEST])
TENANTS = st.sampled_from(["a", "b", "c", "d"])
SEATS, MAX_QUEUED, MAX_COST = 6, 12, 50


class Books(RuleBasedStateMachine):
    """Requests, ends, cancellations, tenants that come, change and go, in any order."""

    scheduling = FAIR
    sent: Bundle[Ticket] = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.queue = GateQueue(SEATS, self.scheduling, MAX_QUEUED)
        self.open: list[Ticket] = []
        self.granted: set[Ticket] = set()
        self.registered: set[str] = set()

    def fill(self) -> None:
        while (ticket := self.queue.grant()) is not None:
            assert ticket in self.open
            assert ticket.state is TicketState.GRANTED
            first = next(t for t in self.open if t.tenant == ticket.tenant and t not in self.granted)
            assert ticket is first, "within a tenant the order is that of arrival"
            self.granted.add(ticket)

    @rule(tenant=TENANTS, weight=st.sampled_from([1, 100, 300, 1000]), remaining=st.none() | st.integers(0, 500))
    def register(self, tenant: str, weight: int, remaining: int | None) -> None:
        self.queue.register(tenant, weight, remaining)
        self.registered.add(tenant)
        self.fill()

    @rule(tenant=TENANTS)
    def remove(self, tenant: str) -> None:
        self.queue.remove(tenant)
        self.registered.discard(tenant)
        self.fill()

    @rule(target=sent, tenant=TENANTS, n=st.integers(1, 5), max_tokens=st.integers(1, 40), prompt=st.integers(0, 10))
    def put(self, tenant: str, n: int, max_tokens: int, prompt: int) -> MultipleResults[Ticket]:
        waiting = self.queue.waiting(tenant)
        if waiting + n > MAX_QUEUED:
            with pytest.raises(CapacityError, match=r"at most 12 .* lower environment.concurrency"):
                self.queue.put(tenant, n, max_tokens, prompt)
            assert self.queue.waiting(tenant) == waiting
            return multiple()
        tickets = self.queue.put(tenant, n, max_tokens, prompt)
        self.open += tickets
        self.fill()
        return multiple(*tickets)

    @rule(ticket=consumes(sent), generated=st.none() | st.integers(0, 40))
    def end(self, ticket: Ticket, generated: int | None) -> None:
        """What waits is cancelled; what runs ends or is aborted."""
        self.queue.leave(ticket, generated if ticket.state is TicketState.GRANTED else None)
        self.open.remove(ticket)
        self.queue.leave(ticket)  # a second time: nothing
        self.fill()

    @invariant()
    def holds(self) -> None:
        queue = self.queue
        running = [t for t in self.open if t.state is TicketState.GRANTED]
        waiting = [t for t in self.open if t.state is TicketState.WAITING]
        assert queue.taken == len(running) <= queue.seats
        assert queue.queued == len(waiting)
        for tenant in queue.tenants:
            assert queue.running(tenant) == sum(t.tenant == tenant for t in running)
            assert queue.waiting(tenant) == sum(t.tenant == tenant for t in waiting) <= MAX_QUEUED
        assert set(queue.tenants) == self.registered | {t.tenant for t in self.open}
        if waiting:
            assert queue.seats - queue.taken <= queue.reserved
            if len(queue.tenants) == 1:
                assert queue.taken == queue.seats
        for tenant in queue.tenants:
            assert abs(queue.deficit(tenant)) <= (2 * SEATS + 2) * MAX_COST + 1000
            assert queue.waiting(tenant) or queue.deficit(tenant) <= 0


class ShortestBooks(Books):
    scheduling = SHORTEST


Books.TestCase.settings = ShortestBooks.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None
)
TestBooks = Books.TestCase
TestShortestBooks = ShortestBooks.TestCase


def simulation(weights: dict[str, int] | None = None, *, seats: int = 32, scheduling: Scheduling = FAIR) -> Simulation:
    queue = GateQueue(seats, scheduling, max_queued=10**9)
    for tenant, weight in (weights or {}).items():
        queue.register(tenant, weight, None)
    return Simulation(queue)


# --------------------------------------------------------------------------------------------- newcomers


@BOTH
@pytest.mark.parametrize("seed", range(5))
def test_five_thousand_long_sequences_do_not_hold_up_four_short_ones(scheduling: Scheduling, seed: int) -> None:
    running = simulation({"many": 100, "few": 100}, scheduling=scheduling)
    for _ in range(5000):
        running.ask("many", 1000)
    running.run(steps=random.Random(seed).randrange(20_000))
    before = running.now
    running.ask("few", 20, 20, 20, 20)
    running.run(until=lambda: not running.pending("few"))
    assert running.ended["few"] - before == 20, "as if it were alone"
    assert running.queue.waiting("many") > 4000


@BOTH
def test_a_burst_after_a_burst_is_as_quick(scheduling: Scheduling) -> None:
    """What the first took is a debt only as far as it was more than its part."""
    running = simulation({"many": 100, "few": 100}, scheduling=scheduling)
    for _ in range(5000):
        running.ask("many", 1000)
    for _ in range(20):
        running.run(steps=50)
        before = running.now
        running.ask("few", 20, 20, 20, 20)
        running.run(until=lambda: not running.pending("few"))
        assert running.ended["few"] - before == 20


def test_eight_newcomers_at_once_share_what_is_set_aside() -> None:
    names = [f"n{i}" for i in range(8)]
    running = simulation(dict.fromkeys(["many", *names], 100))
    for _ in range(5000):
        running.ask("many", 1000)
    running.run(steps=1500)
    before = running.now
    for name in names:
        running.ask(name, 20, 20, 20, 20)
    assert sum(running.queue.running(name) for name in names) == running.queue.reserved == 8
    running.run(until=lambda: not any(map(running.pending, names)))
    # 32 sequences on the 8 seats set aside take 4 turns; one more for what does not divide evenly
    assert max(running.ended[name] for name in names) - before <= 5 * 20


def test_a_tenant_that_is_alone_has_all_seats_and_beside_idle_ones_three_quarters() -> None:
    alone = simulation({"a": 100})
    alone.ask("a", *[10] * 40)
    assert alone.queue.running("a") == 32
    beside = simulation({"a": 100, "b": 100})
    beside.ask("a", *[10] * 40)
    assert beside.queue.running("a") == 24
    beside.queue.remove("b")
    beside.fill()
    assert beside.queue.running("a") == 32


def test_a_large_request_takes_seats_as_they_come() -> None:
    running = simulation({"a": 100, "b": 100}, seats=4)
    running.ask("b", 10)
    running.ask("a", *[10] * 100)
    assert running.queue.running("a") == 2  # one of four seats is set aside for b, who has one
    running.run()
    assert running.tokens == {"a": 1000, "b": 10}


@pytest.mark.parametrize("seats", [1, 2, 3])
def test_few_seats_serve_everybody(seats: int) -> None:
    running = simulation({f"t{i}": 100 for i in range(5)}, seats=seats)
    for i in range(5):
        running.ask(f"t{i}", *[10] * 20)
    running.run()
    assert set(running.tokens.values()) == {200}


# --------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("weights", "lengths"),
    [
        ((100, 100), (100, 100)),
        ((100, 100), (1000, 20)),
        ((100, 400), (100, 100)),
        ((100, 400), (20, 1000)),
        ((300, 100), (64, 64)),
    ],
)
def test_tokens_follow_the_weights(weights: tuple[int, int], lengths: tuple[int, int]) -> None:
    """Two tenants with work without end, lengths that nobody knows before, and limits four times as high."""
    draw = random.Random(7)
    running = simulation({"a": weights[0], "b": weights[1]})
    for tenant, mean in zip("ab", lengths, strict=True):
        for _ in range(150):
            drawn = [draw.randint(1, 2 * mean - 1) for _ in range(40_000 // mean)]
            running.ask(tenant, *drawn, max_tokens=4 * mean)
    running.run(steps=4 * max(lengths))
    start = running.tokens
    running.run(steps=30_000)
    assert running.pending("a")
    assert running.pending("b")
    got = [running.tokens[tenant] - start[tenant] for tenant in "ab"]
    assert got[1] / got[0] == pytest.approx(weights[1] / weights[0], rel=0.06)
    assert sum(got) == 32 * 30_000, "no seat was idle"


def test_a_weight_of_one_beside_a_thousand() -> None:
    running = simulation({"light": 1, "heavy": 1000})
    running.ask("heavy", *[100] * 40_000)
    running.ask("light", *[100] * 1000)
    assert running.queue.running("heavy") == 31
    assert running.queue.running("light") == 1, "at once, on the seat that was left for it"
    running.run(steps=1000)
    start = running.tokens
    running.run(steps=100_000)
    got = {tenant: running.tokens[tenant] - start[tenant] for tenant in ("light", "heavy")}
    assert got["heavy"] / got["light"] == pytest.approx(1000, rel=0.1)


def test_a_new_weight_counts_at_once_also_for_what_is_queued() -> None:
    running = simulation({"a": 100, "b": 100})
    for tenant in "ab":
        running.ask(tenant, *[100] * 40_000)
    running.run(steps=10_000)
    before = running.tokens
    assert before["a"] / before["b"] == pytest.approx(1, rel=0.02)
    running.queue.register("a", 300, None)
    running.fill()
    running.run(steps=20_000)
    after = running.tokens
    assert (after["a"] - before["a"]) / (after["b"] - before["b"]) == pytest.approx(3, rel=0.03)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    weights=st.lists(st.integers(1, 1000), min_size=2, max_size=5),
    seats=st.integers(1, 12),
    seed=st.integers(0, 2**16),
)
def test_what_backlogged_tenants_get_differs_by_a_bound_that_time_does_not_change(
    weights: list[int], seats: int, seed: int
) -> None:
    """With costs that are known, any lengths and any order of ends: charged tokens over weight of two tenants differ by
    at most what their deficits can, a share of sequences and one more each."""
    draw = random.Random(seed)
    queue = GateQueue(seats, FAIR, max_queued=10**6)
    names = [f"t{i}" for i in range(len(weights))]
    cost = {name: draw.choice([1, 10, 100]) for name in names}
    for name, weight in zip(names, weights, strict=True):
        queue.register(name, weight, None)
        queue.put(name, 4000, cost[name], 0)
    running: list[Ticket] = []
    charged = dict.fromkeys(names, 0)
    shares = [max(1, seats * weight // sum(weights)) for weight in weights]
    most = [
        ((share + 1) * cost[name] + share * cost[name] + weight) / weight
        for name, weight, share in zip(names, weights, shares, strict=True)
    ]
    for _ in range(800):
        while (ticket := queue.grant()) is not None:
            running.append(ticket)
            charged[ticket.tenant] += ticket.charged
        ended = running.pop(draw.randrange(len(running)))
        queue.leave(ended, ended.charged)
        if not all(map(queue.waiting, names)):
            break
        got = sorted((charged[name] / weight, bound) for name, weight, bound in zip(names, weights, most, strict=True))
        assert got[-1][0] - got[0][0] <= got[-1][1] + got[0][1]


# --------------------------------------------------------------------------------------------- no way to cheat


def test_estimates_that_were_too_high_make_no_credit_worth_having() -> None:
    """Alone, a tenant pays for sequences of 100,000 tokens that end after 100; what it gets back must not keep those
    out who come later."""
    running = simulation({"liar": 100, "late": 100})
    running.ask("liar", *[100] * 3000, max_tokens=100_000)
    running.run(steps=50)
    running.ask("late", *[100] * 3000, max_tokens=100)
    start = running.tokens
    running.run(steps=5000)
    got = {tenant: running.tokens[tenant] - start[tenant] for tenant in ("liar", "late")}
    assert got["late"] / got["liar"] == pytest.approx(1, rel=0.1)


def test_claiming_little_gains_nothing() -> None:
    """A tenant whose means were short pays for what its sequences take in the end."""
    running = simulation({"a": 100, "b": 100})
    running.ask("a", *([1] * 500 + [400] * 4000), max_tokens=400)
    running.ask("b", *[400] * 8000)
    running.run(steps=2000)
    start = running.tokens
    running.run(steps=20_000)
    assert (running.tokens["a"] - start["a"]) / (running.tokens["b"] - start["b"]) == pytest.approx(1, rel=0.05)


def test_idling_hoards_nothing_and_debts_are_paid_while_idle() -> None:
    queue = GateQueue(2, FAIR, max_queued=100)
    for name in "ab":
        queue.register(name, 100, None)
    first = queue.put("a", 1, 10, 0)[0]
    assert queue.grant() is first
    assert queue.deficit("a") == 0  # the rest of the round's credit went with the queue
    queue.leave(first, 1000)
    assert queue.deficit("a") == -990
    other = queue.put("b", 1, 1000, 0)[0]
    assert queue.grant() is other
    assert queue.deficit("a") == 0  # ten rounds passed for b, and paid 990 of 1,000 tokens of a's


# --------------------------------------------------------------------------------------------- ShortestRemaining


def completions(scheduling: Scheduling) -> list[int]:
    """When each of eight equal jobs ends, which leave the engine then. Sequences are of any length, as they are."""
    running = simulation(scheduling=scheduling)
    draw = random.Random(1)
    names = [f"job{i}" for i in range(8)]
    for name in names:
        running.queue.register(name, 100, 200 * 100)
    for name in names:
        running.ask(name, *[draw.randint(20, 180) for _ in range(200)])
    ended: dict[str, int] = {}

    def note() -> bool:
        for name in names:
            if name not in ended and not running.pending(name):
                ended[name] = running.now
                running.queue.remove(name)
        return len(ended) == len(names)

    running.run(until=note)
    assert note()
    return sorted(ended.values())


def test_equal_jobs_end_one_after_another_and_the_last_no_later() -> None:
    fair, shortest = completions(FAIR), completions(SHORTEST)
    assert sum(shortest) < 0.7 * sum(fair)
    assert shortest[-1] <= fair[-1] + 180  # the last sequence may begin as late as all others end
    assert all(later - earlier > fair[-1] / 16 for earlier, later in pairwise(shortest))


def test_less_work_over_weight_goes_first() -> None:
    running = simulation(seats=1, scheduling=SHORTEST)
    for name, weight, work in (("a", 100, 500), ("b", 100, 400), ("c", 200, 600)):
        running.queue.register(name, weight, work)
    running.ask("first", 5)
    for name in "abc":
        running.ask(name, 10)
    running.run()
    assert running.order == ["first", "c", "b", "a"]


def test_a_job_is_passed_by_for_a_bounded_time() -> None:
    """Short jobs without end beside a long one: all its sequences together wait for PATIENCE times its own work."""
    running = simulation(seats=1, scheduling=SHORTEST)
    running.queue.register("long", 100, 1000)
    running.ask("first", 10)
    running.ask("long", *[100] * 10)
    for i in range(2000):
        name = f"short{i}"
        running.queue.register(name, 100, 10)
        running.ask(name, 10)
        running.queue.remove(name)  # as soon as it has ended
        running.run(until=lambda: running.queue.queued <= running.queue.waiting("long"))
    places = [place for place, tenant in enumerate(running.order) if tenant == "long"]
    assert len(places) == 10
    assert 10 * places[0] >= PATIENCE * 1000 - 20
    assert 10 * (places[-1] - 9) <= PATIENCE * 1000 + 40


# --------------------------------------------------------------------------------------------- vLLM's priority


def test_what_is_above_a_share_is_preempted_first_but_not_for_ever() -> None:
    queue = GateQueue(8, FAIR, max_queued=100)
    for name in "ab":
        queue.register(name, 100, None)
    queue.put("a", 6, 10, 0)
    above = [ticket for _ in range(6) if (ticket := queue.grant()) is not None]
    queue.put("b", 2, 10, 0)
    within = [ticket for _ in range(2) if (ticket := queue.grant()) is not None]
    assert queue.grant() is None
    assert max(t.priority for t in above[:4] + within) < min(t.priority for t in above[4:])
    for ticket in above[:4] + within:
        queue.leave(ticket, 10)
    queue.put("b", 40, 10, 0)
    later: list[Ticket] = []
    while len(later) < 20:
        while (ticket := queue.grant()) is not None:
            later.append(ticket)
        queue.leave(later[-1], 10)
    assert later[-1].priority > above[-1].priority
