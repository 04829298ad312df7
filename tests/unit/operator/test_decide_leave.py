"""decide_experiment, where one that holds a slot has to give it up and the engine cannot be told its spec: the engine
has refused it, its data are gone, or it does not parse."""

from __future__ import annotations

from typing import Any

import pytest

from clora_api.control import Phase, Problem, RunMode, spec_digest
from clora_api.v1alpha1.conditions import Reason
from clora_operator.act import Actor
from clora_operator.cache import Cache
from clora_operator.claims import Assignment
from clora_operator.decide import decide_experiment
from clora_operator.observe import Answer, Memory, ObservedExperiment
from clora_operator.plan import DeleteOnEngine, Plan, PutOnEngine
from clora_operator.resources import Experiment, Key, to_rfc3339
from tests.unit.operator.factories import (
    ADMITTED,
    NOW,
    SETTINGS,
    UID,
    ago,
    as_stored,
    desired,
    experiment,
    message,
    observed,
    report,
    running,
    said,
)

TAKEN = Assignment("main", reason=Reason.PREEMPTED, message="high took it; place 2", position=2, preemptor="high")
DRAINS = Assignment("main", reason=Reason.ENGINE_DRAINING, message="main drains")
TAKEN_OFF = (DeleteOnEngine(Key("engine", "team", "main"), UID, "Retain"),)


def refused(of: Experiment, *, seconds: float = 1) -> Memory:
    """The engine's answer to what `of` says now."""
    problem = Problem(
        type="https://clora.dev/problems/invalid-spec", title="t", status=422, detail="unknown", field="stopWhen"
    )
    return Memory(wants_slot=True, answer=Answer(spec_digest(desired(of)), ago(seconds), problem=problem))


def changed(assignment: Assignment = ADMITTED, *, reported: dict[str, Any] | None = None, **fields: Any) -> Plan:
    """Of one that runs with an earlier spec, and whose present one the engine has refused."""
    told = experiment(status=running(), maxSteps=20, **fields)
    runs = report(told, **({"spec_digest": "of-the-earlier-spec"} | (reported or {})))
    seen = observed(told, reported=runs, assignment=assignment, memory=refused(told))
    return decide_experiment(seen, NOW, SETTINGS)


def test_a_refused_change_is_said_and_what_runs_runs_on() -> None:
    plan = changed()
    assert said(plan, "Accepted") == ("False", "InvalidSpec")
    assert message(plan, "Accepted") == "spec.stopWhen: unknown"
    assert said(plan, "Attached") == ("True", "EngineConfirmed")
    assert said(plan, "Progressing") == ("True", "Running")
    assert (plan.actions, plan.wants_slot) == ((), True)


@pytest.mark.parametrize(
    ("assignment", "fields", "reason"),
    [
        (TAKEN, {}, "Preempted"),
        (DRAINS, {}, "EngineDraining"),
        (Assignment("main", reason=Reason.NAMESPACE_NOT_ALLOWED, message="no"), {}, "NamespaceNotAllowed"),
        (ADMITTED, {"suspend": True}, "Suspending"),
    ],
)
def test_a_refused_change_keeps_no_slot(assignment: Assignment, fields: dict[str, Any], reason: str) -> None:
    plan = changed(assignment, **fields)
    assert said(plan, "Attached") == ("True", reason)
    assert said(plan, "Accepted") == ("False", "InvalidSpec")
    assert plan.actions == TAKEN_OFF
    for leaves in ({"phase": Phase.DELETING}, {"mode": RunMode.SUSPEND}):
        assert changed(assignment, reported=leaves, **fields).actions == ()


def test_a_refused_change_keeps_no_deadline_away() -> None:
    told = experiment(status=running(), maxSteps=20, activeDeadlineSeconds=60)
    runs, memory = report(told, spec_digest="of-the-earlier-spec"), refused(told)
    plan = decide_experiment(observed(told, reported=runs, memory=memory), NOW, SETTINGS)
    assert said(plan, "Failed") == ("True", "DeadlineExceeded")
    ended = as_stored(told, plan)
    stop = decide_experiment(observed(ended, reported=runs, memory=memory), NOW, SETTINGS)
    assert stop.actions == TAKEN_OFF


def test_a_spec_that_the_engine_has_not_been_asked_about_is_told_first() -> None:
    told = experiment(status=running(), maxSteps=30, suspend=True)
    earlier = refused(experiment(status=running(), maxSteps=20))
    plan = decide_experiment(observed(told, reported=report(told), memory=earlier), NOW, SETTINGS)
    (put,) = plan.actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.mode is RunMode.SUSPEND


def without_data(assignment: Assignment, **fields: Any) -> ObservedExperiment:
    told = experiment(status=running(), data={"configMap": {"name": "d", "key": "k"}}, **fields)
    return observed(told, reported=report(told), assignment=assignment, data_missing="spec.data.configMap: gone")


@pytest.mark.parametrize(
    ("assignment", "fields", "reason"),
    [(TAKEN, {}, "Preempted"), (DRAINS, {}, "EngineDraining"), (ADMITTED, {"suspend": True}, "Suspending")],
)
def test_lost_data_keep_no_slot(assignment: Assignment, fields: dict[str, Any], reason: str) -> None:
    plan = decide_experiment(without_data(assignment, **fields), NOW, SETTINGS)
    assert plan.actions == TAKEN_OFF
    assert said(plan, "Attached") == ("True", reason)
    assert said(plan, "Accepted") == ("False", "DataNotFound")


@pytest.mark.parametrize(
    ("assignment", "reason", "actions"),
    [(TAKEN, "Preempted", TAKEN_OFF), (DRAINS, "EngineDraining", TAKEN_OFF), (ADMITTED, "EngineConfirmed", ())],
)
def test_a_spec_that_does_not_parse_keeps_no_slot_and_stops_nothing(
    assignment: Assignment, reason: str, actions: tuple[Any, ...]
) -> None:
    told = experiment(status=running(), maxSteps=0)
    assert told.spec is None
    runs = report(experiment(status=running()))
    plan = decide_experiment(observed(told, reported=runs, assignment=assignment), NOW, SETTINGS)
    assert plan.actions == actions
    assert said(plan, "Attached") == ("True", reason)
    assert said(plan, "Accepted") == ("False", "InvalidSpec")
    assert message(plan, "Accepted").startswith("spec.maxSteps: ")


@pytest.mark.parametrize(("meta", "released"), [({}, False), ({"deletionTimestamp": to_rfc3339(NOW)}, True)])
async def test_only_one_that_is_deleted_is_released_for_good(meta: dict[str, Any], released: bool) -> None:
    """One that was taken off its engine may come back, and its deletion has to ask the engine then."""

    class Link:
        async def delete(self, uid: str, files: str) -> bool:
            return True

    actor = Actor(None, Cache(), {Key("engine", "team", "main"): Link()}, lambda: NOW)  # type: ignore[arg-type]
    outcome = await actor.carry_out(experiment(status=running(), meta=meta), Plan(actions=TAKEN_OFF))
    assert (outcome.released, outcome.errors) == (released, [])
