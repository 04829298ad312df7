"""place, where priorities differ: who goes first, who has to leave, and who never has to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clora_api.v1alpha1.conditions import Reason
from clora_operator.claims import Assignment, Claim
from clora_operator.placement import place
from tests.unit.operator.test_placement import admitted, by_labels, claim, room


def holder(uid: str, age: int = 0, priority: int = 0, **fields: Any) -> Claim:
    return claim(uid, age, priority=priority, pinned="main", holds=True, attached=True, **fields)


def leaving(found: dict[str, Assignment]) -> dict[str, str]:
    return {uid: a.preemptor for uid, a in found.items() if a.reason is Reason.PREEMPTED}


def test_priority_comes_before_everything_then_who_was_attached_then_age() -> None:
    claims = [
        claim("old", 1),
        claim("ran", 2, pinned="main", attached=True),
        claim("high", 3, priority=5),
        claim("higher", 4, priority=9),
    ]
    found = place([room(capacity=1)], claims)
    assert admitted(found) == {"higher": "main"}
    assert {uid: a.position for uid, a in found.items()} == {"higher": None, "high": 1, "ran": 2, "old": 3}


def test_the_lowest_leaves_and_of_equals_the_youngest() -> None:
    holders = [holder("a", 1, 5), holder("b", 2, 1), holder("c", 3, 1), holder("d", 4, 5)]
    found = place([room(capacity=4)], [*holders, claim("high", 9, priority=10)])
    assert leaving(found) == {"c": "high"}
    assert set(admitted(found)) == {"a", "b", "d"}
    assert found["c"].message == (
        "LoRAExperiment high of a higher priority has taken its slot; LoRAEngine main is full: place 2 in its queue"
    )
    assert (found["high"].reason, found["high"].position) == (Reason.QUEUED, 1)
    assert "LoRAExperiment c of a lower priority makes room" in found["high"].message


@pytest.mark.parametrize(
    ("of_holder", "of_claim", "of_room"),
    [
        ({"priority": 10}, {}, {}),  # an equal
        ({"priority": 11}, {}, {}),
        ({}, {"preempts": False}, {}),
        ({}, {"wants": False}, {}),
        ({}, {"rank": 64}, {}),
        ({}, {"engine": "other"}, {}),
        ({"preemptible": False}, {}, {}),
        ({"leaving": True}, {}, {}),  # comes free without
        ({}, {}, {"ready": False}),
        ({}, {}, {"full": True, "capacity": 2}),  # the engine counts otherwise than we do
        ({}, {}, {"capacity": 0}),
    ],
)
def test_nobody_leaves_for_nothing(
    of_holder: dict[str, Any], of_claim: dict[str, Any], of_room: dict[str, Any]
) -> None:
    high = claim("high", **({"priority": 10} | of_claim))
    found = place([room(**({"capacity": 1} | of_room))], [holder("x", **of_holder), high])
    assert leaving(found) == {}
    assert found["x"] == Assignment("main", admitted=True)
    assert not found["high"].admitted


def test_strangers_cannot_be_preempted() -> None:
    assert leaving(place([room(capacity=1, strangers=1)], [claim("high", priority=10)])) == {}


def test_a_free_slot_is_taken_before_anybodys() -> None:
    found = place([room(capacity=2)], [holder("x"), claim("high", priority=10)])
    assert leaving(found) == {}
    assert "high" in admitted(found)


def test_no_more_leave_than_are_needed() -> None:
    holders = [holder("goes", 1, leaving=True), holder("x", 2), holder("y", 3)]
    high = [claim("p", 4, priority=10), claim("q", 5, priority=10)]
    assert leaving(place([room(capacity=3)], [*holders, *high])) == {"y": "q"}


def test_the_same_ones_leave_until_they_have_left_and_stay_away_while_their_slot_is_in_use() -> None:
    engine, high = room(capacity=2), claim("high", 9, priority=10)
    holders = [holder("x", 1), holder("y", 2)]
    first = place([engine], [*holders, high])
    assert leaving(first) == {"y": "high"}
    assert place([engine], [*holders, high]) == first
    left = claim("y", 2, pinned="main")
    assert set(admitted(place([engine], [holders[0], left, high]))) == {"x", "high"}
    held = holder("high", 9, 10)
    after = place([engine], [holders[0], left, held])
    assert leaving(after) == {}
    assert (after["y"].reason, after["y"].position) == (Reason.QUEUED, 1)
    assert "y" in admitted(place([engine], [holders[0], left]))


def test_labels_prefer_the_engine_where_room_can_be_made() -> None:
    rooms = [room("a", capacity=1), room("b", capacity=1)]
    important = claim("x", engine="a", priority=10, pinned="a", holds=True)
    other = claim("y", engine="b", pinned="b", holds=True)
    assert leaving(place(rooms, [important, other, by_labels("high", 5, priority=10)])) == {"y": "high"}


settled = st.lists(
    st.builds(claim, st.uuids().map(str), st.integers(0, 5), priority=st.integers(0, 3), wants=st.just(True)),
    max_size=10,
)


@given(settled, st.integers(1, 4))
def test_in_the_end_the_highest_priorities_are_inside_and_nobody_leaves(some: list[Claim], room_for: int) -> None:
    """Whoever came in by chance, pass after pass: what leaves and what attaches, one pass at a time."""
    engine, inside = room(capacity=room_for), {c.uid for c in some[:room_for]}
    for _ in range(len(some) + 2):
        told = [
            Claim(**{name: getattr(c, name) for name in Claim.__slots__} | {"pinned": "main", "holds": c.uid in inside})
            for c in some
        ]
        found = place([engine], told)
        assert len(leaving(found)) <= sum(c.uid not in inside for c in some)
        inside = {uid for uid, a in found.items() if a.admitted}
        assert len(inside) <= room_for
    assert leaving(found) == {}
    values = sorted((c.priority for c in some), reverse=True)[:room_for]
    assert sorted((c.priority for c in some if c.uid in inside), reverse=True) == values
