"""decide_experiment, where a slot has to be given up for others: what is done and said, as tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clora_api.control import Phase, RunMode, spec_digest
from clora_api.v1alpha1.conditions import Reason
from clora_operator.claims import Assignment
from clora_operator.decide import decide_experiment
from clora_operator.desired import desired_experiment
from clora_operator.observe import Memory
from clora_operator.plan import PutOnEngine
from clora_operator.priorities import Priority
from tests.unit.operator.factories import (
    NOW,
    SETTINGS,
    ago,
    as_stored,
    experiment,
    message,
    observed,
    report,
    running,
    said,
    view,
)

TAKEN = Assignment("main", reason=Reason.PREEMPTED, message="high took it; place 2", position=2, preemptor="high")
QUEUED = Assignment("main", reason=Reason.QUEUED, message="place 1", position=1)


def decide(*arguments: Any, **fields: Any) -> Any:
    return decide_experiment(observed(*arguments, **fields), NOW, SETTINGS)


def test_a_preempted_one_finishes_its_step_and_says_for_whom() -> None:
    told = experiment(status=running())
    plan = decide(told, reported=report(told), assignment=TAKEN)
    (put,) = plan.actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.mode is RunMode.SUSPEND
    assert said(plan, "Attached") == ("True", "Preempted")
    assert said(plan, "Progressing") == ("False", "Preempted")
    assert (plan.status["preemptedBy"], plan.status["queuePosition"]) == ("high", 2)
    assert plan.status["state"] == "Queued"
    assert plan.wants_slot
    assert plan.events == ()
    asked = report(told, mode=RunMode.SUSPEND)
    assert decide(told, reported=asked, assignment=TAKEN).actions == ()


def test_then_it_waits_is_told_once_and_counts_no_retry() -> None:
    told = experiment(status=running())
    leaving = as_stored(told, decide(told, reported=report(told), assignment=TAKEN))
    leaving = replace(leaving, spec=told.spec)
    left = report(told, Phase.SUSPENDED, mode=RunMode.SUSPEND)
    plan = decide(leaving, reported=left, assignment=QUEUED)
    assert said(plan, "Attached") == ("False", "Preempted")
    assert "LoRAExperiment high" in message(plan, "Attached")
    assert (plan.status["state"], plan.status["queuePosition"]) == ("Queued", 1)
    assert plan.status["restarts"] == 0
    assert [(event.type, event.reason) for event in plan.events] == [("Normal", "Preempted")]
    assert plan.actions == ()
    assert plan.wants_slot
    waits = replace(as_stored(leaving, plan), spec=told.spec)
    again = decide(waits, reported=left, assignment=QUEUED)
    assert (again.status, again.events) == (None, ())
    new_epoch = decide(waits, view=view(epoch=2), assignment=QUEUED)
    assert new_epoch.events == ()
    assert new_epoch.wants_slot


@pytest.mark.parametrize(
    ("fields", "still_queued"),
    [
        ({"view": None, "memory": Memory(wants_slot=True, silent_since=ago(9))}, True),
        ({"view": None, "memory": Memory(wants_slot=True, silent_since=ago(10))}, False),
        ({"view": view(info=None, down_since=ago(9))}, True),
        ({"view": view(info=None, down_since=ago(9), error="refused")}, False),
        ({"view": view(ready=False)}, False),
    ],
)
def test_an_operator_that_has_just_started_leaves_the_queue_as_it_was(
    fields: dict[str, Any], still_queued: bool
) -> None:
    fresh = experiment()
    waits = replace(as_stored(fresh, decide(fresh, assignment=QUEUED)), spec=fresh.spec)
    not_ready = Assignment("main", reason=Reason.WAITING_FOR_ENGINE, message="not ready")
    plan = decide(waits, assignment=not_ready, **fields)
    assert (plan.status is None) == still_queued
    assert plan.wants_slot
    if still_queued:
        assert plan.requeue_after == 1
    else:
        assert said(plan, "Attached") == ("False", "WaitingForEngine")


def test_with_a_slot_it_resumes_and_nothing_of_it_is_left() -> None:
    told = experiment(status=running(preemptedBy="high"))
    left = report(told, Phase.SUSPENDED, mode=RunMode.SUSPEND)
    (put,) = decide(told, reported=left).actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.mode is RunMode.RUN
    assert "preemptedBy" not in decide(told, reported=report(told)).status


@pytest.mark.parametrize("fields", [{"suspend": True}, {"activeDeadlineSeconds": 30}])
def test_who_does_not_wait_for_a_slot_is_not_preempted(fields: dict[str, Any]) -> None:
    told = experiment(status=running(preemptedBy="high"), **fields)
    plan = decide(told, reported=report(told, Phase.SUSPENDED, mode=RunMode.SUSPEND), assignment=QUEUED)
    assert "preemptedBy" not in plan.status


def test_a_preemption_that_is_no_longer_needed_is_taken_back() -> None:
    told = experiment(status=running())
    leaving = replace(as_stored(told, decide(told, reported=report(told), assignment=TAKEN)), spec=told.spec)
    (put,) = decide(leaving, reported=report(told, mode=RunMode.SUSPEND)).actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.mode is RunMode.RUN


DRAINS = Assignment("main", reason=Reason.ENGINE_DRAINING, message="main drains")


def test_an_engine_that_drains_is_left_and_waited_for() -> None:
    told = experiment(status=running(), backoffLimit=0)
    plan = decide(told, reported=report(told), assignment=DRAINS)
    (put,) = plan.actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.mode is RunMode.SUSPEND
    assert said(plan, "Attached") == ("True", "EngineDraining")
    assert plan.events == ()
    left = report(told, Phase.SUSPENDED, mode=RunMode.SUSPEND)
    after = decide(told, reported=left, assignment=DRAINS)
    assert said(after, "Attached") == ("False", "EngineDraining")
    assert (after.status["state"], after.status["restarts"]) == ("Queued", 0)
    assert "queuePosition" not in after.status
    assert [event.reason for event in after.events] == ["EngineDraining"]
    assert after.wants_slot
    (back,) = decide(told, reported=left).actions
    assert isinstance(back, PutOnEngine)
    assert back.desired.mode is RunMode.RUN


@pytest.mark.parametrize("of_view", [view(), view(ready=False), None])
def test_who_waits_for_an_engine_that_drains_says_so_whatever_the_engine_does(of_view: Any) -> None:
    plan = decide(experiment(), view=of_view, assignment=DRAINS)
    assert said(plan, "Attached") == ("False", "EngineDraining")
    assert plan.wants_slot


MISSING = Priority(reason=Reason.PRIORITY_CLASS_NOT_FOUND, problem="spec.priorityClassName: there is no x")


def test_a_missing_class_is_not_attached() -> None:
    plan = decide(experiment(priorityClassName="x"), priority=MISSING)
    assert said(plan, "Accepted") == ("False", "PriorityClassNotFound")
    assert said(plan, "Attached") == ("False", "PriorityClassNotFound")
    assert (plan.actions, plan.wants_slot) == ((), False)
    assert [event.type for event in plan.events] == ["Warning"]


def test_what_runs_while_its_class_goes_runs_on() -> None:
    told = experiment(status=running(), priorityClassName="x")
    plan = decide(told, reported=report(told, spec_digest=spec_digest(digested(told))), priority=MISSING)
    assert said(plan, "Accepted") == ("False", "PriorityClassNotFound")
    assert said(plan, "Attached") == ("True", "EngineConfirmed")
    assert plan.actions == ()


def digested(of: Any) -> Any:
    return desired_experiment(observed(of))


def test_the_engine_is_told_nothing_of_priorities() -> None:
    assert spec_digest(digested(experiment(priorityClassName="x"))) == spec_digest(digested(experiment()))
