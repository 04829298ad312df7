"""decide_engine, for an engine that may sleep: when it is idle, when its pod goes, and when it comes back."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from clora_operator.decide_engine import decide_engine
from clora_operator.decide_sleep import asleep, wakes_on_demand, waking
from clora_operator.plan import ApplyWorkload, Connect, Disconnect, Plan
from clora_operator.resources import Engine, parse_engine
from clora_operator.workload import digest, manifests
from tests.unit.operator.factories import (
    NOW,
    SETTINGS,
    ago,
    condition,
    engine,
    experiment,
    message,
    metadata,
    observed_engine,
    report,
    said,
    view,
)

AFTER = 600
BUSY = view(report(experiment()))
SILENT = view(down_since=ago(60), error="refused")
PENDING = {"metadata": {"name": "main-0", "uid": "u", "labels": {}}, "status": {"phase": "Pending"}}
SERVES = condition("Ready", "True", "Serving")
SLEEPS = condition("Ready", "False", "Asleep")


def ours(*conditions: dict[str, Any], after: int | None = AFTER, **fields: Any) -> Engine:
    spec = {"model": {"name": "small"}, "image": "clora-engine:test", **fields}
    if after is not None:
        spec["scaleDownAfterSeconds"] = after
    body = {"metadata": metadata("main", "engine-uid"), "spec": spec, "status": {"conditions": list(conditions)}}
    return parse_engine(body)


def idle_since(seconds: float) -> dict[str, Any]:
    return condition("Idle", "True", "Unused", since=seconds)


def decide(of: Engine, now: datetime = NOW, **fields: Any) -> Plan:
    return decide_engine(observed_engine(of, **({"view": view(), "wanted": ""} | fields)), now, SETTINGS)


def replicas(plan: Plan) -> int:
    (apply,) = [action for action in plan.actions if isinstance(action, ApplyWorkload)]
    (stateful_set,) = [child for child in apply.manifests if child["kind"] == "StatefulSet"]
    return int(stateful_set["spec"]["replicas"])


def kinds(plan: Plan) -> set[str]:
    assert plan.status is not None
    return {c["type"] for c in plan.status["conditions"]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("True", "Unused")),
        ({"wanted": "one"}, ("False", "Wanted")),
        ({"view": BUSY}, ("False", "InUse")),
        ({"view": None, "pod": PENDING}, ("True", "Unused")),
        ({"view": None, "pod": PENDING, "wanted": "one"}, ("False", "Wanted")),
        ({"view": view(down_since=ago(9), starting=True, error="loading")}, ("True", "Unused")),
        ({"wanted": None}, None),  # the operator has only just started
        ({"view": None}, None),
        ({"view": SILENT}, None),
    ],
)
def test_idle(fields: dict[str, Any], expected: tuple[str, str] | None) -> None:
    plan = decide(ours(), **fields)
    assert (said(plan, "Idle") if expected else "Idle" in kinds(plan)) == (expected or False)
    assert "Idle" not in {event.reason for event in plan.events}


@pytest.mark.parametrize("fields", [{"wanted": None}, {"view": None}, {"view": SILENT}])
@pytest.mark.parametrize("before", [idle_since(5), condition("Idle", "False", "Wanted")])
def test_what_is_not_known_changes_nothing(before: dict[str, Any], fields: dict[str, Any]) -> None:
    assert said(decide(ours(before), **fields), "Idle") == (before["status"], before["reason"])


def test_nobody_is_told_of_idleness_who_did_not_ask() -> None:
    assert "Idle" not in kinds(decide(ours(after=None)))
    external = engine(endpoint="http://engine:1", tokenSecretRef={"name": "t"})
    assert "Idle" not in kinds(decide(external))
    changed = decide(ours(idle_since(7200), SLEEPS, after=None), view=None)
    assert said(changed, "Idle") == ("False", "StaysAwake")
    assert said(changed, "Ready") == ("False", "Waking")
    assert replicas(changed) == 1


@pytest.mark.parametrize(
    ("conditions", "fields", "expected"),
    [
        ((idle_since(AFTER - 1), SERVES), {}, 1),
        ((idle_since(AFTER), SERVES), {}, 0),
        ((SERVES,), {}, 1),  # first it is said, from then on the time runs
        ((condition("Idle", "False", "InUse", since=7200), SERVES), {}, 1),
        ((idle_since(AFTER), SERVES), {"wanted": "one"}, 1),
        ((idle_since(AFTER), SERVES), {"view": BUSY}, 1),
        ((idle_since(AFTER), SERVES), {"wanted": None}, 1),  # somebody may have come meanwhile
        ((idle_since(AFTER), SERVES), {"view": SILENT}, 1),
        # asleep
        ((idle_since(7200), SLEEPS), {"view": None}, 0),
        ((idle_since(7200), SLEEPS), {"view": None, "wanted": None}, 0),
        ((idle_since(7200), SLEEPS), {"view": None, "wanted": "one"}, 1),
        # its pod is gone, and the status that says so was not taken
        ((idle_since(AFTER), SERVES), {"view": None, "stateful_set": {"spec": {"replicas": 0}}}, 0),
    ],
)
def test_when_it_sleeps(conditions: Any, fields: dict[str, Any], expected: int) -> None:
    plan = decide(ours(*conditions), **fields)
    assert replicas(plan) == expected
    assert any(isinstance(action, Disconnect) for action in plan.actions) == (expected == 0)
    assert any(isinstance(action, Connect) for action in plan.actions) == (expected == 1)


def test_it_looks_again_when_the_time_is_over() -> None:
    assert decide(ours()).requeue_after == AFTER
    assert decide(ours(idle_since(100), SERVES)).requeue_after == AFTER - 100
    assert decide(ours(SERVES), view=BUSY).requeue_after is None
    assert decide(ours(idle_since(AFTER), SLEEPS), view=None).requeue_after is None


def test_a_sleeping_engine_says_what_wakes_it() -> None:
    plan = decide(ours(idle_since(AFTER), SERVES))
    assert said(plan, "Ready") == ("False", "Asleep")
    assert "wakes it" in message(plan, "Ready")
    assert said(plan, "WorkloadCurrent") == ("Unknown", "Asleep")
    assert ("Normal", "Asleep") in [(event.type, event.reason) for event in plan.events]


def test_it_wakes_and_is_not_called_unreachable_meanwhile() -> None:
    woken = decide(ours(idle_since(7200), SLEEPS), view=None, wanted="one")
    assert said(woken, "Idle") == ("False", "Wanted")
    assert said(woken, "Ready") == ("False", "Waking")
    assert ("Normal", "Waking") in [(event.type, event.reason) for event in woken.events]
    assert [c["lastTransitionTime"] for c in (woken.status or {})["conditions"] if c["type"] == "Idle"] == [
        "2026-01-01T12:00:00Z"
    ]
    wakes = ours(condition("Idle", "False", "Wanted"), condition("Ready", "False", "Waking"))
    assert said(decide(wakes, view=SILENT, wanted="one"), "Ready") == ("False", "Waking")
    loading = view(down_since=ago(5), starting=True, error="loading")
    assert said(decide(wakes, view=loading, wanted="one"), "Ready") == ("False", "Starting")
    assert said(decide(wakes, wanted="one"), "Ready") == ("True", "Serving")


def test_a_woken_engine_is_idle_for_the_whole_time_before_it_sleeps_again() -> None:
    released = decide(ours(condition("Idle", "False", "Wanted", since=7200), SERVES))
    assert replicas(released) == 1
    assert released.status is not None
    stored = parse_engine({"metadata": metadata("main", "u"), "spec": {}, "status": dict(released.status)})
    after = ours(*[c.model_dump(by_alias=True) for c in stored.status.conditions])
    assert replicas(decide(after, NOW + timedelta(seconds=AFTER - 1))) == 1
    assert replicas(decide(after, NOW + timedelta(seconds=AFTER))) == 0


def test_a_drained_engine_may_sleep() -> None:
    was = condition("Drained", "True", "Drained")
    assert replicas(decide(ours(idle_since(AFTER), SERVES, was, drain=True))) == 0
    told_while_asleep = decide(ours(idle_since(AFTER), SLEEPS, drain=True), view=None)
    assert said(told_while_asleep, "Drained") == ("True", "Drained")


def test_sleep_leaves_the_pod_template_alone() -> None:
    """So that waking is no update."""
    awake, sleeping = manifests(ours()), manifests(ours(), asleep=True)
    assert digest(awake) != digest(sleeping)
    for one, other in zip(awake, sleeping, strict=True):
        changed = {key for key in one["spec"] if one["spec"][key] != other["spec"][key]}
        assert changed == ({"replicas"} if one["kind"] == "StatefulSet" else set())


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (ours(SLEEPS), (True, True, True)),
        (ours(condition("Ready", "False", "Waking")), (False, True, True)),
        (ours(condition("Ready", "False", "Starting")), (False, False, True)),
        (ours(condition("Ready", "False", "Unreachable")), (False, False, False)),
        (ours(SERVES), (False, False, False)),
        (ours(condition("Ready", "False", "Starting"), after=None), (False, False, False)),
        (ours(), (False, False, False)),
    ],
)
def test_what_its_status_says(of: Engine, expected: tuple[bool, bool, bool]) -> None:
    assert (asleep(of), waking(of), wakes_on_demand(of)) == expected
