"""decide_experiment, after the end: when the resource is deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clora_api.control import Phase, RunMode
from clora_operator.decide import decide_experiment
from clora_operator.plan import AddFinalizer, DeleteExperiment, Plan, PutOnEngine
from clora_operator.resources import Experiment, to_rfc3339
from tests.unit.operator.factories import NOW, SETTINGS, ago, condition, experiment, observed, report, running


def ended(kind: str, seconds: float, *, status: dict[str, Any] | None = None, **fields: Any) -> Experiment:
    """One whose end was `seconds` ago."""
    end = condition(kind, "True", "Completed", since=seconds)
    said = running(completionTime=to_rfc3339(ago(seconds))) | {"conditions": [end]} | (status or {})
    return experiment(status={key: value for key, value in said.items() if value is not None}, **fields)


def decide(of: Experiment, **fields: Any) -> Plan:
    return decide_experiment(observed(of, **fields), NOW, SETTINGS)


@pytest.mark.parametrize("kind", ["Succeeded", "Failed"])
@pytest.mark.parametrize(
    ("ttl", "seconds", "left"),
    [(None, 1e6, None), (0, 0, 0), (60, 59, 1), (60, 60, 0), (2147483647, 60, 2147483587)],
)
def test_it_goes_that_long_after_its_end(kind: str, ttl: int | None, seconds: float, left: float | None) -> None:
    plan = decide(ended(kind, seconds, ttlSecondsAfterFinished=ttl))
    expected = Plan() if left is None else Plan(requeue_after=left) if left else Plan(actions=(DeleteExperiment(),))
    assert plan == expected


@pytest.mark.parametrize("completion", [None, "", "yesterday"])
def test_a_completion_time_that_somebody_spoilt_is_made_up_for(completion: str | None) -> None:
    of = ended("Failed", 50, status={"completionTime": completion}, ttlSecondsAfterFinished=60)
    assert decide(of) == Plan(requeue_after=10)


def test_what_runs_or_waits_stays() -> None:
    told = experiment(status=running(), ttlSecondsAfterFinished=0)
    assert DeleteExperiment() not in decide(told, reported=report(told)).actions


def test_an_engine_that_still_runs_it_is_stopped_first() -> None:
    of = ended("Failed", 60, ttlSecondsAfterFinished=0)
    (put,) = decide(of, reported=report(of)).actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.mode is RunMode.SUSPEND
    assert decide(of, reported=report(of, Phase.RUNNING, mode=RunMode.SUSPEND)).actions == (DeleteExperiment(),)


@pytest.mark.parametrize("ttl", [None, 0])
def test_what_an_uninstall_has_released_is_held_again_before_it_is_deleted(ttl: int | None) -> None:
    """Else its deletion would ask no engine, and files that are to be deleted would stay."""
    of = ended("Succeeded", 60, ttlSecondsAfterFinished=ttl, deletionPolicy="Delete")
    bare = replace(of, meta=replace(of.meta, finalizers=("somebody.else/s",)))
    assert decide(bare) == Plan(actions=(AddFinalizer(),))
    nothing_to_release = replace(bare, status=bare.status.model_copy(update={"engine": None}))
    assert AddFinalizer() not in decide(nothing_to_release).actions
