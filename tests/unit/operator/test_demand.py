"""demand: which engines somebody wants awake; and placement among engines that sleep."""

from __future__ import annotations

from typing import Any

import pytest

from clora_api.v1alpha1.conditions import Reason
from clora_operator.claims import Claim, NamespaceLabels, Room, Seat
from clora_operator.demand import releases, wanted
from clora_operator.observe import Memory
from clora_operator.placement import place
from tests.unit.operator.factories import UID, claimed, experiment
from tests.unit.operator.test_placement import by_labels, claim, room

MAIN = ("team", "main")


def asleep(name: str = "main", **fields: Any) -> Room:
    return room(name, ready=False, wakes=True, **fields)


def who(rooms: list[Room], claims: list[Claim], held: dict[Seat, str] | None = None) -> dict[Seat, str]:
    return wanted(rooms, claims, place(rooms, claims), held or {})


def needing(uid: str, age: int = 0, **fields: Any) -> Claim:
    return claim(uid, age, needs=True, **fields)


@pytest.mark.parametrize("of", [room(), asleep()])
def test_the_oldest_that_may_run_is_named(of: Room) -> None:
    assert who([of], [needing("b", 2), needing("a", 1), needing("c", 3)]) == {MAIN: "a"}


@pytest.mark.parametrize(
    ("rooms", "claims"),
    [
        ([asleep()], []),
        ([asleep()], [claim("suspended or refused", needs=False)]),
        ([asleep(max_rank=8)], [needing("too large", rank=16)]),
        ([asleep(draining=True)], [needing("waits for the end of the drain")]),
        ([asleep("other")], [needing("on an engine that is not there")]),
        ([asleep()], [needing("not let in", namespace="foreign")]),
        ([asleep(allowed_from="Selector", allowed_labels={"a": "b"})], [needing("not known yet", namespace="foreign")]),
    ],
)
def test_nobody_wants_it(rooms: list[Room], claims: list[Claim]) -> None:
    assert who(rooms, claims) == {}


def test_who_is_let_in_wants_it_and_is_not_named_elsewhere() -> None:
    labels = NamespaceLabels({"a": "b"})
    guest = needing("guest-uid", namespace="foreign", name="secret-plan", namespace_labels=labels)
    found = who([asleep(allowed_from="Selector", allowed_labels={"a": "b"})], [guest])
    assert found == {MAIN: "guest-uid (of another namespace)"}


def test_one_that_lacks_something_else_keeps_its_engine_awake_and_takes_no_slot() -> None:
    waits, ready = needing("waits-for-init", 1, wants=False), needing("ready", 2)
    found = place([room(capacity=1)], [waits, ready])
    assert found["ready"].admitted
    assert who([room(capacity=1)], [waits, ready]) == {MAIN: "waits-for-init"}


def test_one_by_labels_goes_to_an_awake_engine_with_room() -> None:
    rooms = [asleep("a-asleep"), room("b-awake", capacity=1)]
    assert who(rooms, [by_labels("x", needs=True)]) == {("team", "b-awake"): "x"}


def test_one_by_labels_wakes_an_engine_rather_than_to_queue() -> None:
    rooms = [asleep("a-asleep", capacity=1), room("b-awake", capacity=1)]
    runs = by_labels("runs", 1, needs=True, pinned="b-awake", holds=True)
    waits, queues = by_labels("waits", 2, needs=True), by_labels("queues", 3, needs=True)
    found = place(rooms, [runs, waits, queues])
    assert (found["waits"].engine, found["waits"].reason) == ("a-asleep", Reason.WAITING_FOR_ENGINE)
    assert "waking" in found["waits"].message
    assert (found["queues"].engine, found["queues"].reason) == ("b-awake", Reason.QUEUED)
    assert who(rooms, [runs, waits, queues]) == {("team", "a-asleep"): "waits", ("team", "b-awake"): "runs"}


def test_who_runs_elsewhere_wants_no_other_engine() -> None:
    runs = by_labels("runs", needs=True, pinned="b", holds=True)
    assert set(who([asleep("a"), room("b")], [runs])) == {("team", "b")}


def test_an_engine_that_is_simply_not_there_is_no_better_than_a_queue() -> None:
    rooms = [room("a", ready=False), room("b", capacity=0)]
    assert place(rooms, [by_labels("x")])["x"].engine == "b"


DELETED = {"deletionTimestamp": "2026-01-01T11:00:00Z"}


@pytest.mark.parametrize(
    ("fields", "memory", "expected"),
    [
        ({"deletionPolicy": "Delete", "meta": DELETED}, Memory(), {MAIN: "one"}),
        ({"deletionPolicy": "Delete", "meta": DELETED}, Memory(released=True), {}),
        ({"deletionPolicy": "Retain", "meta": DELETED}, Memory(), {}),
        ({"deletionPolicy": "Delete"}, Memory(), {}),
        ({"deletionPolicy": "Delete", "meta": DELETED, "status": {}}, Memory(), {}),
    ],
)
def test_files_that_are_to_be_deleted(fields: dict[str, Any], memory: Memory, expected: dict[Seat, str]) -> None:
    of = experiment(**({"status": claimed()} | fields))
    assert releases([of], {UID: memory}) == expected
    assert who([asleep()], [], releases([of], {UID: memory})) == expected
