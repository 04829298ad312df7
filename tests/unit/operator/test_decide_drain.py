"""decide_engine, while an engine drains: what its conditions say, and when its pod is replaced."""

from __future__ import annotations

from typing import Any

import pytest

from clora_operator.decide_engine import decide_engine
from clora_operator.plan import Connect, DeletePod, Plan
from clora_operator.resources import Engine, parse_engine
from clora_operator.workload import digest, manifests
from tests.unit.operator.factories import (
    NOW,
    SETTINGS,
    ago,
    condition,
    engine,
    experiment,
    metadata,
    observed_engine,
    report,
    said,
    view,
)

EXTERNAL: dict[str, Any] = {"endpoint": "http://engine:1", "tokenSecretRef": {"name": "t"}}
BUSY = view(report(experiment()))


def draining(*conditions: dict[str, Any], generation: int = 1, drain: bool = True, **fields: Any) -> Engine:
    where = EXTERNAL if "image" not in fields else {}
    spec = {"model": {"name": "small"}, "drain": drain, **where, **fields}
    meta = metadata("main", "engine-uid", generation=generation)
    return parse_engine({"metadata": meta, "spec": spec, "status": {"conditions": list(conditions)}})


def decide(of: Engine, **fields: Any) -> Plan:
    return decide_engine(observed_engine(of, **fields), NOW, SETTINGS)


WAS = condition("Drained", "True", "Drained")


@pytest.mark.parametrize(
    ("before", "of_view", "expected"),
    [
        ((), view(), ("True", "Drained")),
        ((), BUSY, ("False", "Draining")),
        ((), view(down_since=ago(60), error="refused"), ("False", "Draining")),
        ((), None, ("False", "Draining")),
        ((WAS,), view(down_since=ago(60), error="refused"), ("True", "Drained")),
        ((WAS,), BUSY, ("False", "Draining")),  # a stranger
    ],
)
def test_drained_is_what_the_engine_says(before: Any, of_view: Any, expected: tuple[str, str]) -> None:
    plan = decide(draining(*before), view=of_view)
    assert said(plan, "Drained") == expected
    if not before:
        assert ("Normal", expected[1]) in [(event.type, event.reason) for event in plan.events]


def test_without_a_drain_nothing_is_said_until_there_was_one() -> None:
    plan = decide(draining(drain=False), view=view())
    assert plan.status is not None
    assert "Drained" not in {c["type"] for c in plan.status["conditions"]}
    assert said(decide(draining(WAS, drain=False), view=view()), "Drained") == ("False", "NotDraining")


def test_an_engine_that_drains_stays_connected_and_ready() -> None:
    plan = decide(draining(), view=BUSY)
    assert said(plan, "Ready") == ("True", "Serving")
    assert plan.actions == decide(engine(**EXTERNAL)).actions


NEW, OLD = "b", "a"
RUNS = {"phase": "Running"}


def pod(revision: str = OLD, status: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    labels = {"controller-revision-hash": revision}
    return {"metadata": {"name": "main-0", "uid": "pod-uid", "labels": labels, **meta}, "status": status or RUNS}


def replaced(of: Engine, **fields: Any) -> bool:
    """Whether the pod of an engine whose StatefulSet has a new template is deleted."""
    stateful_set = {"metadata": {"generation": 2}, "status": {"observedGeneration": 2, "updateRevision": NEW}}
    known: dict[str, Any] = {"stateful_set": stateful_set, "applied": digest(manifests(of)), "pod": pod()}
    plan = decide(of, **(known | {"view": view()} | fields))
    deleted = [action for action in plan.actions if isinstance(action, DeletePod)]
    assert deleted in ([], [DeletePod("main-0", "pod-uid")])
    return bool(deleted)


def ours(*conditions: dict[str, Any], **fields: Any) -> Engine:
    return draining(*conditions, image="next", **fields)


@pytest.mark.parametrize(
    ("of", "fields", "expected"),
    [
        (ours(WAS), {}, True),
        (ours(), {}, False),  # first it is said
        (ours(WAS, generation=2), {}, False),  # of this spec
        (ours(WAS, drain=False), {}, False),
        (ours(condition("Drained", "False", "Draining")), {}, False),
        (ours(WAS), {"view": BUSY}, False),
        (ours(WAS), {"view": None}, True),  # nobody can have been attached since
        (ours(WAS), {"pod": pod(NEW)}, False),
        (ours(WAS), {"pod": pod(deletionTimestamp="2026-01-01T11:00:00Z")}, False),
        (ours(WAS), {"pod": None}, False),
        (ours(WAS), {"applied": "of-another-spec"}, False),
        (ours(WAS), {"stateful_set": None}, False),
    ],
)
def test_the_pod_is_replaced_once_drained_and_out_of_date(of: Engine, fields: dict[str, Any], expected: bool) -> None:
    assert replaced(of, **fields) == expected


def test_a_pod_that_never_started_holds_nobody() -> None:
    pending = pod(status={"phase": "Pending"})
    plan = decide(ours(), view=None, pod=pending)
    assert said(plan, "Drained") == ("True", "Drained")
    assert replaced(ours(WAS), view=None, pod=pending)


def test_a_pod_that_ends_is_said_to_end() -> None:
    ends = pod(deletionTimestamp="2026-01-01T11:00:00Z")
    stateful_set = {"metadata": {"generation": 2}, "status": {"observedGeneration": 2, "updateRevision": NEW}}
    plan = decide(ours(WAS), view=view(), pod=ends, stateful_set=stateful_set)
    assert plan.status is not None
    (current,) = [c for c in plan.status["conditions"] if c["type"] == "WorkloadCurrent"]
    assert current["reason"] == "UpdatePending"
    assert "main-0 ends" in current["message"]


@pytest.mark.parametrize("of_view", [None, view(down_since=ago(60), error="refused")])
def test_a_spec_that_is_mended_reaches_a_drained_engine_that_does_not_answer(of_view: Any) -> None:
    """It crash-loops: with its memory raised, or another image, it would start."""
    mended = ours(WAS, generation=2)
    stateful_set = {"metadata": {"generation": 2}, "status": {"observedGeneration": 2, "updateRevision": NEW}}
    known: dict[str, Any] = {"stateful_set": stateful_set, "applied": digest(manifests(mended)), "pod": pod()}
    first = decide(mended, view=of_view, **known)
    assert first.actions == (Connect("http://main.team.svc:8080", "secret-token", "pod-uid"),), "first it is said"
    assert first.status is not None
    (stored,) = [c for c in first.status["conditions"] if c["type"] == "Drained"]
    assert (stored["status"], stored["observedGeneration"]) == ("True", 2)
    assert "Drained" not in {event.reason for event in first.events}
    assert replaced(ours(stored, generation=2), view=of_view)


@pytest.mark.parametrize(("drain", "words"), [(True, "once the engine is drained"), (False, "set spec.drain to true")])
def test_what_moves_an_engine_to_its_new_template_is_said(drain: bool, words: str) -> None:
    stateful_set = {"metadata": {"generation": 2}, "status": {"observedGeneration": 2, "updateRevision": NEW}}
    plan = decide(ours(drain=drain), view=BUSY, pod=pod(), stateful_set=stateful_set)
    assert said(plan, "WorkloadCurrent") == ("False", "UpdatePending")
    assert plan.status is not None
    (current,) = [c for c in plan.status["conditions"] if c["type"] == "WorkloadCurrent"]
    assert words in current["message"]
