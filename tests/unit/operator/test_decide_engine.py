"""decide_engine, as tables."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from clora_operator.decide_engine import decide_engine
from clora_operator.plan import ApplyWorkload, Connect, CreateToken, Disconnect, Plan
from clora_operator.resources import Engine, parse_engine
from clora_operator.settings import IngressPeers, ServiceAddressing, Settings
from clora_operator.workload import digest, manifests
from tests.unit.operator.factories import NOW, SETTINGS, ago, engine, message, metadata, observed_engine, said, view

EXTERNAL: dict[str, Any] = {"endpoint": "http://engine:1", "tokenSecretRef": {"name": "t"}}


def external() -> Engine:
    return engine(**EXTERNAL)


def ours(**fields: Any) -> Engine:
    return engine(image="clora-engine:test", **fields)


def decide(of: Engine, *, settings: Settings = SETTINGS, **fields: Any) -> Plan:
    return decide_engine(observed_engine(of, **fields), NOW, settings)


def as_stored(of: Engine, plan: Plan) -> Engine:
    assert plan.status is not None
    assert of.spec is not None
    body = {
        "metadata": metadata(of.meta.name, of.meta.uid),
        "spec": of.spec.to_api(),
        "status": dict(plan.status),
    }
    return parse_engine(body)


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"view": None}, "False", "Starting"),
        ({"view": view()}, "True", "Serving"),
        ({"view": view(ready=False)}, "False", "Starting"),
        ({"view": view(down_since=ago(1), starting=True, error="loading")}, "False", "Starting"),
        ({"view": view(down_since=ago(1), error="refused")}, "False", "Unreachable"),
        ({"view": view(down_since=ago(1), unauthorized=True, error="401")}, "False", "Unauthorized"),
        ({"view": view(), "rival": "older"}, "False", "EndpointInUse"),
        ({"token": None}, "False", "TokenNotFound"),
    ],
)
def test_ready(fields: dict[str, Any], status: str, reason: str) -> None:
    assert said(decide(external(), **fields), "Ready") == (status, reason)


def test_what_the_engine_says_goes_into_the_status() -> None:
    status = decide(external(), view=view()).status
    assert status is not None
    assert {key: status[key] for key in ("epoch", "model", "experiments", "capacity", "maxRank", "endpoint")} == {
        "epoch": 1,
        "model": "small",
        "experiments": 0,
        "capacity": 4,
        "maxRank": 32,
        "endpoint": "http://engine:1",
    }


def test_a_serving_engine_may_be_silent_for_a_moment() -> None:
    serving = as_stored(external(), decide(external(), view=view()))
    short = decide(serving, view=view(down_since=ago(9), error="refused"))
    assert short.status is None
    assert short.requeue_after == 1
    long = decide(serving, view=view(down_since=ago(10), error="refused"))
    assert said(long, "Ready") == ("False", "Unreachable")
    assert [event.type for event in long.events] == ["Warning"]


def test_an_external_engine_has_no_workload() -> None:
    plan = decide(external())
    assert plan.actions == (Connect("http://engine:1", "secret-token"),)
    assert said(plan, "WorkloadCurrent") == ("True", "External")


def test_a_token_is_in_no_text() -> None:
    assert "secret-token" not in repr(decide(external()))


def test_a_rival_is_not_connected() -> None:
    assert decide(external(), rival="older").actions == (Disconnect(),)


def test_our_own_engine_is_applied_once() -> None:
    plan = decide(ours(), token=None, token_secret=("main-token", "token"))
    token, apply = plan.actions
    assert token == CreateToken("main-token")
    assert isinstance(apply, ApplyWorkload)
    assert [m["kind"] for m in apply.manifests] == ["Service", "PersistentVolumeClaim", "StatefulSet"]
    current = digest(manifests(ours()))
    applied: dict[str, Any] = {"stateful_set": {"metadata": {"generation": 1}}, "applied": current}
    assert decide(ours(), **applied).actions == (Connect("http://main.team.svc:8080", "secret-token"),)
    assert isinstance(decide(ours(), stateful_set=None, applied=current).actions[0], ApplyWorkload)
    assert isinstance(decide(ours(resources={"limits": {"cpu": "1"}}), **applied).actions[0], ApplyWorkload)


def test_somebody_elses_secret_is_waited_for_not_made() -> None:
    plan = decide(ours(tokenSecretRef={"name": "t"}), token=None)
    assert plan.actions == ()
    assert said(plan, "Accepted") == ("False", "TokenNotFound")


def test_an_engine_whose_change_is_refused_goes_on() -> None:
    """And the refusal is forgotten when the spec is again as it was."""
    (as_it_was,) = [a for a in decide(ours()).actions if isinstance(a, ApplyWorkload)]
    there: dict[str, Any] = {
        "stateful_set": {"metadata": {"name": "main", "generation": 1}},
        "pod": {"metadata": {"name": "main-0", "uid": "u"}},
    }
    for spec, applied in (({"drain": True}, "digest-of-before"), ({}, as_it_was.digest)):
        plan = decide(ours(**spec), view=view(), apply_error="quota exceeded", applied=applied, **there)
        assert said(plan, "Accepted") == ("True", "SpecValid")
        assert said(plan, "Ready") == ("True", "Serving")
        assert (said(plan, "WorkloadCurrent"), message(plan, "WorkloadCurrent")) == (
            ("False", "UpdateRefused"),
            "quota exceeded",
        )
        assert any(isinstance(action, Connect) for action in plan.actions)
        assert any(isinstance(action, ApplyWorkload) for action in plan.actions)
        assert plan.requeue_after is not None


@pytest.mark.parametrize(
    ("queue", "error", "remedy"),
    [(True, "x: field is immutable", True), (True, "x", False), (False, "x: field is immutable", False)],
)
def test_what_kueue_keeps_is_said_with_its_remedy(queue: bool, error: str, remedy: bool) -> None:
    labels = {"kueue.x-k8s.io/queue-name": "research"} if queue else {}
    of = engine(meta={"labels": labels}, image="x")
    plan = decide(of, apply_error=error, stateful_set={"metadata": {"name": "main", "generation": 1}})
    words = " - drain the engine, then: kubectl delete statefulset main; the operator makes it anew"
    assert message(plan, "WorkloadCurrent") == error + (words if remedy else "")
    assert (said(plan, "Ready"), message(plan, "Ready")) == (("False", "UpdateRefused"), error)  # it has no pod


def test_a_refused_workload_is_said_and_tried_again() -> None:
    plan = decide(ours(), apply_error="quota exceeded")
    assert said(plan, "Accepted") == ("False", "InvalidSpec")
    assert any(isinstance(action, ApplyWorkload) for action in plan.actions)
    assert plan.requeue_after is not None


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [("10.0.0.1", "http://10.0.0.1:8080"), ("fd00::1", "http://[fd00::1]:8080"), ("None", ""), ("", "")],
)
def test_addressing_without_dns(address: str, endpoint: str) -> None:
    settings = Settings(service_addressing=ServiceAddressing.CLUSTER_IP)
    status = decide(ours(), settings=settings, service={"spec": {"clusterIP": address}}).status
    assert status is not None
    assert status["endpoint"] == endpoint


def workload(generation: int, observed: int, update: str) -> dict[str, Any]:
    return {
        "metadata": {"generation": generation},
        "status": {"observedGeneration": observed, "updateRevision": update},
    }


@pytest.mark.parametrize(
    ("stateful_set", "running", "expected"),
    [
        (None, None, ("Unknown", "Starting")),
        (workload(1, 1, "a"), None, ("Unknown", "Starting")),
        (workload(1, 1, "a"), "a", ("True", "UpToDate")),
        (workload(2, 2, "b"), "a", ("False", "UpdatePending")),
    ],
)
def test_workload_current(stateful_set: Any, running: str | None, expected: tuple[str, str]) -> None:
    pod = (
        {"metadata": {"name": "main-0", "uid": "u", "labels": {"controller-revision-hash": running}}}
        if running
        else None
    )
    assert said(decide(ours(), stateful_set=stateful_set, pod=pod), "WorkloadCurrent") == expected


def test_workload_current_waits_for_the_statefulsets_controller() -> None:
    pod = {"metadata": {"name": "main-0", "uid": "u", "labels": {"controller-revision-hash": "a"}}}
    plan = decide(ours(), stateful_set=workload(2, 1, "a"), pod=pod)
    assert plan.status is not None
    assert "WorkloadCurrent" not in {c["type"] for c in plan.status["conditions"]}


def test_an_engine_that_goes_is_left_alone() -> None:
    going = engine(meta={"deletionTimestamp": "2026-01-01T11:00:00Z"}, **EXTERNAL)
    assert decide(going) == Plan()


def test_a_spec_of_another_release() -> None:
    plan = decide(engine(image="x", capacity={"maxRank": 7}))
    assert said(plan, "Accepted") == ("False", "InvalidSpec")
    assert Disconnect() in plan.actions


def test_peers_of_the_settings_make_a_network_policy() -> None:
    peers = IngressPeers('[{"podSelector": {}}]')
    (workload,) = [
        a
        for a in decide(ours(), settings=replace(SETTINGS, engine_ingress_from=peers)).actions
        if isinstance(a, ApplyWorkload)
    ]
    (plain,) = [a for a in decide(ours()).actions if isinstance(a, ApplyWorkload)]
    kinds = [[child["kind"] for child in each.manifests] for each in (workload, plain)]
    assert ["NetworkPolicy" in each for each in kinds] == [True, False]
    assert workload.digest != plain.digest


def test_an_ingress_of_the_settings_reaches_the_tenants_port() -> None:
    operator, ingress = ({"podSelector": {"matchLabels": {"app": name}}} for name in ("operator", "ingress"))
    own, others = (IngressPeers(json.dumps([peer])) for peer in (operator, ingress))
    settings = replace(SETTINGS, engine_ingress_from=own, engine_tenants_from=others)
    plan = decide(ours(serving={"enabled": True}), settings=settings)
    (workload,) = [a for a in plan.actions if isinstance(a, ApplyWorkload)]
    (policy,) = [child for child in workload.manifests if child["kind"] == "NetworkPolicy"]
    control, tenants = policy["spec"]["ingress"]
    assert control["from"] == [operator]
    assert tenants["from"] == [{"podSelector": {}}, ingress]
