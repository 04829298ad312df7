"""Which namespaces may use an engine, and how many of its slots."""

from __future__ import annotations

from typing import Any

import pytest

from clora_api.control import spec_digest
from clora_api.v1alpha1.conditions import Reason
from clora_operator.claims import Assignment, Claim, NamespaceLabels
from clora_operator.decide import decide_experiment
from clora_operator.decide_release import decide_release
from clora_operator.desired import desired_experiment, engine_key
from clora_operator.kube import KubeError
from clora_operator.placement import place
from clora_operator.plan import DeleteOnEngine, PutOnEngine
from clora_operator.resources import Key, to_rfc3339
from clora_operator.tenancy import namespaces as namespaces_of
from clora_operator.tenancy import needs_labels
from tests.unit.operator.factories import (
    NOW,
    SETTINGS,
    ago,
    engine,
    experiment,
    namespaces,
    observed,
    report,
    running,
    said,
)
from tests.unit.operator.test_placement import admitted, claim, room

SELECTS: dict[str, Any] = {"allowed_from": "Selector", "allowed_labels": {"team": "a"}}


def guest(uid: str, age: int = 0, *, namespace: str = "guests", **fields: Any) -> Claim:
    """Of another namespace than the engine's."""
    return claim(uid, age, namespace=namespace, engine_namespace="team", **fields)


def labelled(**labels: str) -> NamespaceLabels:
    return NamespaceLabels(labels)


@pytest.mark.parametrize(
    ("of_room", "labels", "reason"),
    [
        ({}, labelled(team="a"), Reason.NAMESPACE_NOT_ALLOWED),
        ({"allowed_from": "All"}, None, None),
        (SELECTS, labelled(team="a", more="b"), None),
        (SELECTS, labelled(team="b"), Reason.NAMESPACE_NOT_ALLOWED),
        (SELECTS, labelled(), Reason.NAMESPACE_NOT_ALLOWED),
        (SELECTS, NamespaceLabels({}, readable=False), Reason.NAMESPACE_UNREADABLE),
    ],
)
def test_who_is_let_in(of_room: dict[str, Any], labels: NamespaceLabels | None, reason: Reason | None) -> None:
    found = place([room(**of_room)], [guest("a", namespace_labels=labels)])["a"]
    assert (found.reason, found.admitted) == (reason, reason is None)
    if reason:
        assert "LoRAEngine main of namespace team" in found.message
        assert "allowedNamespaces" in found.message


@pytest.mark.parametrize("of_room", [{}, {"allowed_from": "All"}, SELECTS])
def test_the_engines_own_namespace_always_is(of_room: dict[str, Any]) -> None:
    assert admitted(place([room(**of_room)], [claim("a", namespace_labels=None)])) == {"a": "main"}


def test_before_the_labels_are_read_nobody_is_let_in_and_nobody_is_thrown_out() -> None:
    held = guest("held", pinned="main", holds=True)
    found = place([room(**SELECTS)], [guest("new"), held])
    assert found["new"] == Assignment("main")
    assert found["held"] == Assignment("main", admitted=True)


def test_who_is_let_in_no_longer_leaves_and_nobody_else_for_it() -> None:
    denied = guest("denied", 2, pinned="main", holds=True)
    kept = claim("kept", 1, pinned="main", holds=True)
    found = place([room(capacity=2)], [denied, kept, claim("high", 3, priority=9)])
    assert found["denied"].reason is Reason.NAMESPACE_NOT_ALLOWED
    assert found["kept"].admitted
    assert found["high"].reason is Reason.QUEUED


def test_an_engine_of_the_same_name_is_another_engine() -> None:
    rooms = [room(), room(namespace="guests")]
    assert place(rooms, [claim("mine", namespace="guests", engine_namespace="guests")])["mine"].admitted
    assert place(rooms, [guest("theirs")])["theirs"].reason is Reason.NAMESPACE_NOT_ALLOWED
    missing = place([], [guest("a")])["a"]
    assert missing.reason is Reason.ENGINE_NOT_FOUND
    assert "no LoRAEngine main in namespace team, or the operator does not watch it" in missing.message


SHARED: dict[str, Any] = {"allowed_from": "All", "capacity": 3, "max_per_namespace": 1}


def test_a_namespace_gets_no_more_than_its_share_and_holds_up_nobody() -> None:
    found = place([room(**SHARED)], [claim("a", 1), claim("b", 2), guest("c", 3), guest("d", 4)])
    assert set(admitted(found)) == {"a", "c"}
    assert [(found[u].reason, found[u].position) for u in "bd"] == [(Reason.QUEUED, 1), (Reason.QUEUED, 2)]
    assert "maxPerNamespace 1" in found["b"].message


def test_a_lowered_share_throws_nobody_out() -> None:
    held = [claim("a", 1, pinned="main", holds=True), claim("b", 2, pinned="main", holds=True)]
    assert set(admitted(place([room(**SHARED)], held))) == {"a", "b"}


def test_past_its_share_a_namespace_preempts_its_own_only() -> None:
    mine = claim("mine", 1, pinned="main", holds=True, priority=3)
    theirs = guest("theirs", 2, pinned="main", holds=True)
    found = place([room(**SHARED)], [mine, theirs, claim("high", 3, priority=9), claim("higher", 4, priority=10)])
    assert {uid: a.preemptor for uid, a in found.items() if a.reason is Reason.PREEMPTED} == {"mine": "higher"}
    equal = place([room(**SHARED)], [mine, theirs, claim("same", 3, priority=3)])
    assert set(admitted(equal)) == {"mine", "theirs"}


def test_two_of_one_namespace_do_not_preempt_two_for_a_share_of_one() -> None:
    held = [guest("x", 1, pinned="main", holds=True), guest("y", 2, namespace="third", pinned="main", holds=True)]
    shared = room(**(SHARED | {"capacity": 2}))
    found = place([shared], [*held, claim("p", 3, priority=9), claim("q", 4, priority=9)])
    assert [uid for uid, a in found.items() if a.reason is Reason.PREEMPTED] == ["y"]


def test_no_name_of_another_namespace_is_told() -> None:
    held = guest("victim-uid", name="victim", pinned="main", holds=True)
    high = claim("high-uid", 3, name="high", priority=9)
    found = place([room(allowed_from="All", capacity=1)], [held, high])
    assert found["victim-uid"].preemptor == "high-uid (of another namespace)"
    assert "LoRAExperiment high-uid (of another namespace)" in found["victim-uid"].message
    assert "LoRAExperiment victim-uid (of another namespace)" in found["high-uid"].message


# ------------------------------------------------------------------------------ beyond placement

ELSEWHERE = {"engineRef": {"name": "main", "namespace": "platform"}}
DENIED = Assignment("main", reason=Reason.NAMESPACE_NOT_ALLOWED, message="ask for allowedNamespaces")


def test_the_engine_is_that_of_the_spec_whatever_the_status_says() -> None:
    assert engine_key(observed(experiment(**ELSEWHERE))) == Key("engine", "platform", "main")
    assert engine_key(observed(experiment())) == Key("engine", "team", "main")
    unreadable = experiment(maxSteps=0, status=running(), **ELSEWHERE)
    assert unreadable.spec is None
    assert unreadable.engine_namespace == "platform"


def test_it_is_released_there_too() -> None:
    gone = experiment(meta={"deletionTimestamp": to_rfc3339(ago(1))}, status=running(), **ELSEWHERE)
    (ask,) = decide_release(observed(gone), NOW, SETTINGS).actions
    assert isinstance(ask, DeleteOnEngine)
    assert ask.engine == Key("engine", "platform", "main")


def test_the_engine_is_told_of_the_experiments_namespace_and_not_of_its_own() -> None:
    told = desired_experiment(observed(experiment(**ELSEWHERE)))
    assert told is not None
    assert told.namespace == "team"
    assert told.spec.engine_ref is not None
    assert told.spec.engine_ref.namespace is None


def test_not_let_in_is_said_and_nothing_is_told_to_the_engine() -> None:
    plan = decide_experiment(observed(experiment(**ELSEWHERE), assignment=DENIED), NOW, SETTINGS)
    assert said(plan, "Accepted") == ("False", "NamespaceNotAllowed")
    assert said(plan, "Attached") == ("False", "NamespaceNotAllowed")
    assert (plan.actions, plan.wants_slot) == ((), False)
    assert [event.reason for event in plan.events] == ["NamespaceNotAllowed"]


def test_let_in_no_longer_it_commits_and_leaves() -> None:
    told = experiment(status=running(), **ELSEWHERE)
    plan = decide_experiment(observed(told, reported=report(told), assignment=DENIED), NOW, SETTINGS)
    (put,) = plan.actions
    assert isinstance(put, PutOnEngine)
    assert said(plan, "Attached") == ("True", "NamespaceNotAllowed")


async def test_labels_are_read_only_where_they_decide() -> None:
    selects: dict[str, Any] = {"allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": {"team": "a"}}}}
    here = experiment()
    assert not needs_labels(here, None)
    assert not needs_labels(here, engine(image="x", **selects))
    there = engine(image="x", meta={"namespace": "platform"}, **selects)
    assert needs_labels(here, there)
    assert not needs_labels(here, engine(image="x", meta={"namespace": "platform"}))
    known = namespaces(team={"team": "a"})
    assert (await known.read("team")).labels == {"team": "a"}
    assert (await known.read("gone")).labels == {}


# ------------------------------------------------------------------------------ labels that may not be read

UNREADABLE = NamespaceLabels({}, readable=False)


def test_labels_that_may_not_be_read_throw_nobody_out() -> None:
    held = guest("held", 1, pinned="main", holds=True, namespace_labels=UNREADABLE)
    new = guest("new", 2, namespace_labels=UNREADABLE)
    found = place([room(capacity=2, **SELECTS)], [held, new])
    assert found["held"] == Assignment("main", admitted=True)
    assert found["new"].reason is Reason.NAMESPACE_UNREADABLE
    told = experiment(status=running(), **ELSEWHERE)
    unread = Assignment("main", reason=Reason.NAMESPACE_UNREADABLE, message="may not read")
    wanted = desired_experiment(observed(told))
    assert wanted is not None
    runs = report(told, spec_digest=spec_digest(wanted))
    plan = decide_experiment(observed(told, reported=runs, assignment=unread), NOW, SETTINGS)
    assert said(plan, "Attached") == ("True", "EngineConfirmed")
    assert plan.actions == ()


async def test_rights_that_are_taken_away_do_not_change_what_was_read() -> None:
    """Until they are back, or the operator starts anew."""

    class Answers:
        forbidden = False

        def namespace(self, name: str) -> dict[str, Any]:
            if self.forbidden:
                raise KubeError(403, "forbidden")
            return {"metadata": {"name": name, "labels": {"team": "a"}}}

    server = Answers()
    known = namespaces_of(server)  # type: ignore[arg-type]
    await known.read("early")
    server.forbidden = True
    await known.refresh(["early", "late"])
    assert known.known("early") == labelled(team="a")
    assert known.known("late") == UNREADABLE
    server.forbidden = False
    await known.refresh(["early", "late"])
    assert known.known("late") == labelled(team="a")


# ------------------------------------------------------------------------------ what one who is not let in learns


@pytest.mark.parametrize("of_room", [{}, SELECTS])
def test_who_is_not_let_in_learns_nothing_of_the_engine_but_that(of_room: dict[str, Any]) -> None:
    for rank in (8, 64):
        new = guest("new", rank=rank, namespace_labels=labelled())
        found = place([room(max_rank=32, draining=True, **of_room)], [new])["new"]
        assert (found.engine, found.reason) == ("main", Reason.NAMESPACE_NOT_ALLOWED)
        assert "32" not in found.message
        assert "team=a" not in found.message
    unread = place([room(max_rank=32, **SELECTS)], [guest("new", rank=64)])["new"]
    assert unread == Assignment("main")


def test_who_is_let_in_is_told_of_the_rank() -> None:
    found = place([room(max_rank=32, allowed_from="All")], [guest("new", rank=64)])["new"]
    assert found.reason is Reason.RANK_TOO_HIGH
