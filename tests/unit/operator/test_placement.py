"""place: who goes where, who waits, and in what order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clora_api.v1alpha1.conditions import Reason
from clora_operator.claims import Assignment, Claim, Room
from clora_operator.placement import place

START = datetime(2026, 1, 1, tzinfo=UTC)


def room(name: str = "main", **fields: Any) -> Room:
    values: dict[str, Any] = {
        "namespace": "team",
        "name": name,
        "labels": {"pool": "a"},
        "ready": True,
        "capacity": 2,
        "max_rank": 32,
    }
    return Room(**(values | fields))


def claim(uid: str, age: int = 0, **fields: Any) -> Claim:
    """`age`: seconds after the first."""
    values: dict[str, Any] = {
        "uid": uid,
        "namespace": "team",
        "name": uid,
        "created": START + timedelta(seconds=age),
        "rank": 16,
        "engine_namespace": "team",
        "engine": "main",
        "selector": None,
        "wants": True,
    }
    return Claim(**(values | fields))


def by_labels(uid: str, age: int = 0, **fields: Any) -> Claim:
    return claim(uid, age, engine=None, selector={"pool": "a"}, **fields)


def admitted(found: dict[str, Assignment]) -> dict[str, str | None]:
    return {uid: a.engine for uid, a in found.items() if a.admitted}


def test_the_older_come_first() -> None:
    found = place([room()], [claim("c", 3), claim("a", 1), claim("d", 4), claim("b", 2)])
    assert admitted(found) == {"a": "main", "b": "main"}
    assert [(found[u].reason, found[u].position) for u in "cd"] == [(Reason.QUEUED, 1), (Reason.QUEUED, 2)]


def test_who_has_a_slot_keeps_it_from_the_older() -> None:
    holders = [claim("x", 8, pinned="main", holds=True), claim("y", 9, pinned="main", holds=True)]
    found = place([room()], [claim("old", 1), *holders])
    assert set(admitted(found)) == {"x", "y"}
    assert found["old"].position == 1


def test_a_slot_is_reserved_only_for_who_wants_it() -> None:
    found = place([room(capacity=1)], [claim("waits-for-data", 1, wants=False), claim("ready", 2)])
    assert admitted(found) == {"ready": "main"}
    assert found["waits-for-data"] == Assignment("main")


def test_who_was_attached_before_the_engine_went_down_comes_back_first() -> None:
    found = place([room(capacity=1)], [claim("queued", 1), claim("ran", 2, pinned="main", attached=True)])
    assert admitted(found) == {"ran": "main"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"strangers": 2}, Reason.QUEUED),
        ({"full": True}, Reason.QUEUED),
        ({"capacity": 0}, Reason.QUEUED),
        ({"ready": False}, Reason.WAITING_FOR_ENGINE),
        ({"max_rank": 8}, Reason.RANK_TOO_HIGH),
        ({"name": "other"}, Reason.ENGINE_NOT_FOUND),
        ({"namespace": "other"}, Reason.ENGINE_NOT_FOUND),
        ({"max_rank": None}, None),
    ],
)
def test_fit(fields: dict[str, Any], reason: Reason | None) -> None:
    found = place([room(**fields)], [claim("a")])["a"]
    assert found.reason == reason
    assert found.admitted == (reason is None)


def test_an_engine_that_drains_takes_nobody_and_keeps_nobody() -> None:
    drains = [room("a", draining=True), room("b", draining=True, ready=False)]
    held = claim("held", engine="a", pinned="a", holds=True)
    found = place(
        drains, [held, claim("new", engine="a"), claim("down", engine="b"), claim("no", engine="a", wants=False)]
    )
    for uid in ("held", "new", "down"):
        assert found[uid].reason is Reason.ENGINE_DRAINING
        assert not found[uid].admitted
        assert "spec.drain" in found[uid].message
    assert found["no"] == Assignment("a")


def test_labels_avoid_an_engine_that_drains() -> None:
    rooms = [room("a", draining=True, capacity=9), room("b", capacity=1, strangers=1)]
    assert place(rooms, [by_labels("x")])["x"].reason is Reason.QUEUED
    assert admitted(place([rooms[0], room("c")], [by_labels("x")])) == {"x": "c"}


def test_nobody_is_preempted_on_an_engine_that_drains() -> None:
    held = claim("held", pinned="main", holds=True)
    found = place([room(capacity=1, draining=True)], [held, claim("high", priority=9)])
    assert {a.reason for a in found.values()} == {Reason.ENGINE_DRAINING}


def test_labels_choose_the_emptier_engine() -> None:
    rooms = [room("a", strangers=1), room("b"), room("c", labels={"pool": "other"}, capacity=9)]
    assert admitted(place(rooms, [by_labels("x")])) == {"x": "b"}


def test_labels_prefer_an_engine_that_is_ready_and_fits() -> None:
    rooms = [room("a", ready=False, capacity=9), room("b", max_rank=8, capacity=9), room("c", capacity=1)]
    assert admitted(place(rooms, [by_labels("x")])) == {"x": "c"}


def test_labels_spread_over_engines() -> None:
    found = place([room("a"), room("b")], [by_labels(u, i) for i, u in enumerate("wxyz")])
    assert sorted(a.engine or "" for a in found.values()) == ["a", "a", "b", "b"]
    assert all(a.admitted for a in found.values())


def test_committed_steps_stay_with_their_engine() -> None:
    rooms = [room("a", ready=False), room("b")]
    found = place(rooms, [by_labels("x", pinned="a")])["x"]
    assert (found.engine, found.reason) == ("a", Reason.WAITING_FOR_ENGINE)
    gone = place([room("b")], [by_labels("x", pinned="a")])["x"]
    assert (gone.engine, gone.reason) == ("a", Reason.ENGINE_NOT_FOUND)


def test_messages_name_what_is_missing() -> None:
    assert "no LoRAEngine main" in place([], [claim("a")])["a"].message
    assert "pool=a" in place([], [by_labels("a")])["a"].message
    assert "spec.lora.rank 64 is above its maxRank 32" in place([room()], [claim("a", rank=64)])["a"].message


claims = st.lists(
    st.builds(
        claim,
        st.uuids().map(str),
        st.integers(0, 5),
        engine=st.sampled_from(["a", "b"]),
        wants=st.booleans(),
        rank=st.sampled_from([8, 64]),
    ),
    max_size=12,
)


@given(claims, st.integers(0, 4), st.integers(0, 4))
def test_never_more_than_fit_and_never_an_older_one_behind(some: list[Claim], a: int, b: int) -> None:
    found = place([room("a", capacity=a), room("b", capacity=b)], some)
    for name, capacity in (("a", a), ("b", b)):
        here = [c for c in some if c.engine == name and c.wants and c.rank == 8]
        inside = [c for c in here if found[c.uid].admitted]
        waiting = [c for c in here if not found[c.uid].admitted]
        assert len(inside) == min(capacity, len(here))
        assert sorted(found[c.uid].position or 0 for c in waiting) == list(range(1, len(waiting) + 1))
        if inside and waiting:
            assert max(c.created for c in inside) <= min(c.created for c in waiting)
    assert found == place([room("b", capacity=b), room("a", capacity=a)], list(reversed(some)))
