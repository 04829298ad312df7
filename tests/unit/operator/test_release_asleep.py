"""decide_experiment, for a deleted experiment whose engine sleeps: what needs the engine, and for how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clora_operator.decide import decide_experiment
from clora_operator.plan import DeleteOnEngine, Plan, RemoveFinalizer
from clora_operator.resources import Engine, Experiment, to_rfc3339
from tests.unit.operator.factories import NOW, SETTINGS, ago, claimed, condition, experiment, observed, report, view
from tests.unit.operator.test_decide_sleep import ours

SILENT = view(down_since=ago(60), error="refused")
START = 3600.0


def deleted(seconds: float, files: str) -> Experiment:
    meta = {"deletionTimestamp": to_rfc3339(ago(seconds))}
    return experiment(meta=meta, status=claimed(), deletionPolicy=files)


def decide(of: Experiment, engine: Engine, of_view: Any = None, **fields: Any) -> Plan:
    return decide_experiment(observed(of, engine=engine, view=of_view, **fields), NOW, SETTINGS)


def unready(reason: str) -> dict[str, Any]:
    return condition("Ready", "False", reason)


@pytest.mark.parametrize("reason", ["Asleep", "Waking", "WakingHeldBack"])
@pytest.mark.parametrize("of_view", [None, SILENT])
def test_what_keeps_its_files_wakes_nobody_and_does_not_wait(reason: str, of_view: Any) -> None:
    plan = decide(deleted(1, "Retain"), ours(unready(reason)), of_view)
    assert plan.actions == (RemoveFinalizer(),)
    assert plan.events == ()


def test_an_engine_that_answers_again_is_asked_whatever_its_status_says_still() -> None:
    gone = deleted(1, "Retain")
    (ask,) = decide(gone, ours(unready("Waking")), view(report(gone))).actions
    assert isinstance(ask, DeleteOnEngine)


@pytest.mark.parametrize("reason", ["Starting", "Unreachable"])
def test_an_engine_that_may_hold_it_is_waited_for(reason: str) -> None:
    assert decide(deleted(1, "Retain"), ours(unready(reason)), SILENT).actions == ()


@pytest.mark.parametrize(
    ("ready", "seconds", "waits"),
    [
        (unready("Asleep"), START + 119, True),
        (unready("Waking"), START + 119, True),
        (unready("Starting"), START + 119, True),
        (unready("Waking"), START + 120, False),
        (unready("Unreachable"), 119, True),
        (unready("Unreachable"), 120, False),
        (condition("Ready", "True", "Serving", since=119), 1000, True),  # it has come up since
        (condition("Ready", "True", "Serving", since=120), 1000, False),
        (condition("Ready", "True", "Serving", since=1), START + 200, False),  # for ever up and down
    ],
)
def test_files_that_go_wait_for_the_engine_that_wakes(ready: dict[str, Any], seconds: float, waits: bool) -> None:
    plan = decide(deleted(seconds, "Delete"), ours(ready), SILENT)
    assert plan.actions == (() if waits else (RemoveFinalizer(),))
    assert [event.reason for event in plan.events] == ([] if waits else ["ReleasedWithoutEngine"])


def test_an_engine_that_never_sleeps_has_the_usual_deadline() -> None:
    plan = decide(deleted(120, "Delete"), ours(unready("Starting"), after=None), SILENT)
    assert plan.actions == (RemoveFinalizer(),)


def test_once_awake_it_deletes_the_files() -> None:
    gone = deleted(1000, "Delete")
    (ask,) = decide(gone, ours(condition("Ready", "True", "Serving", since=5)), view()).actions
    assert isinstance(ask, DeleteOnEngine)
    assert ask.files == "Delete"
    done = observed(gone, engine=ours())
    released = replace(done, memory=replace(done.memory, released=True))
    assert decide_experiment(released, NOW, SETTINGS).actions == (RemoveFinalizer(),)
