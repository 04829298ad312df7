"""What goes wrong around experiments: bad manifests, engines that die, restart, refuse or go, an operator that is
killed, resources that vanish."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import httpx
import pytest
from kubernetes import client

from local.control_plane import ControlPlane
from tests.integration.operator_fixtures import (
    TOKEN,
    Stage,
    condition,
    own_stage,
    stage,
    status,
    wait_for,
)

pytestmark = pytest.mark.integration
__all__ = ["own_stage", "stage"]

SLOW = {"stepSeconds": "0.3"}
ENDLESS = 100_000


# ------------------------------------------------------------------------------ bad manifests


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"engineRef": {"name": "nobody"}}, "EngineNotFound", "there is no LoRAEngine nobody"),
        ({"lora": {"rank": 64}}, "RankTooHigh", "LoRAEngine main: spec.lora.rank 64 is above its maxRank 32"),
        (
            {"data": {"configMap": {"name": "d", "key": "k"}}},
            "DataNotFound",
            "spec.data.configMap: there is no ConfigMap d",
        ),
        (
            {"arguments": {"invalidField": "environment.arguments"}},
            "InvalidSpec",
            "spec.environment.arguments: this cannot",
        ),
        ({"initFrom": {"experiment": {"name": "one"}}}, "InitFromFailed", "an experiment cannot start from itself"),
    ],
)
def test_a_bad_manifest_is_a_condition(stage: Stage, spec: dict[str, Any], reason: str, words: str) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    uid = stage.cluster.experiment("one", **spec)
    refused = stage.cluster.wait_reason("one", "Accepted", reason)
    assert condition(refused, "Accepted")["status"] == "False"
    assert words in condition(refused, "Accepted")["message"]
    assert status(refused)["state"] == "Pending"
    assert uid not in engine.uids()
    stage.cluster.delete("one")
    stage.cluster.wait_gone("one")


def test_a_bad_manifest_heals(stage: Stage) -> None:
    """An engine that appears, data that appears."""
    stage.start_operator()
    cluster = stage.cluster
    cluster.experiment("one")
    cluster.wait_reason("one", "Accepted", "EngineNotFound")
    stage.start_engine()
    cluster.wait_state("one", "Succeeded")
    cluster.experiment("two", data={"configMap": {"name": "prompts", "key": "train.jsonl"}})
    cluster.wait_reason("two", "Accepted", "DataNotFound")
    data = {"metadata": {"name": "prompts"}, "data": {"train.jsonl": '{"question": "1+1"}\n'}}
    cluster.core.create_namespaced_config_map(cluster.namespace, data)
    cluster.wait_state("two", "Succeeded")


def test_a_refused_spec_is_taken_once_it_is_changed(stage: Stage) -> None:
    stage.start_engine(max_rank=8)
    operator = stage.start_operator()
    cluster = stage.cluster
    cluster.experiment("one")
    cluster.wait_reason("one", "Accepted", "RankTooHigh")
    cluster.experiment("two", lora={"rank": 8}, arguments={"invalidField": "x"})
    refused = cluster.wait_reason("two", "Accepted", "InvalidSpec")
    operator.kill()
    operator.start()
    cluster.experiment("three", lora={"rank": 8})
    cluster.wait_state("three", "Succeeded")
    again = condition(cluster.get("two"), "Accepted")
    assert again["lastTransitionTime"] == condition(refused, "Accepted")["lastTransitionTime"]
    assert again["reason"] == "InvalidSpec"


# ------------------------------------------------------------------------------ engines


def test_a_new_epoch_resumes_from_the_last_commit(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=12, arguments=SLOW)
    cluster.wait("one", lambda o: status(o).get("progress", {}).get("step", 0) >= 2, "two steps")
    engine.kill()
    engine.start()
    again = cluster.wait("one", lambda o: status(o)["engine"]["epoch"] == 2, "the new epoch")
    done = cluster.wait_state("one", "Succeeded")
    first, second = engine.events("attach", uid)
    assert (first["epoch"], second["epoch"]) == (1, 2)
    assert second["step"] >= 2
    assert status(done)["restarts"] == 0  # no failure of its own
    assert status(done)["startTime"] == status(again)["startTime"]


def test_an_engine_that_falls_silent(stage: Stage) -> None:
    """Unknown after the grace, once; attached again when it is back; younger ones don't slip in between."""
    engine = stage.start_engine(max_experiments=1)
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    cluster.experiment("two")
    cluster.wait_state("two", "Queued")
    engine.kill()
    killed = time.monotonic()
    unknown = cluster.wait_state("one", "Unknown")
    assert time.monotonic() - killed >= 1.5  # the grace of these tests is 2 s
    assert condition(unknown, "Attached")["status"] == "Unknown"
    assert condition(unknown, "Attached")["reason"] == "EngineUnreachable"
    assert (
        condition(cluster.wait_reason("main", "Ready", "Unreachable", plural="loraengines"), "Ready")["status"]
        == "False"
    )
    engine.start()
    cluster.wait_reason("one", "Attached", "EngineConfirmed")
    assert len(engine.events("attach", uid)) == 2
    assert status(cluster.get("two"))["state"] in ("Queued", "Pending")
    assert cluster.wait_events("one", "EngineUnreachable").count("EngineUnreachable") == 1


def test_a_wrong_token(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    cluster.wait_reason("main", "Ready", "Serving", plural="loraengines")
    secret = {"stringData": {"token": "wrong"}}
    cluster.core.patch_namespaced_secret("main-token", cluster.namespace, secret)
    engine.kill()
    engine.start()
    cluster.experiment("one")
    unauthorized = cluster.wait_reason("main", "Ready", "Unauthorized", plural="loraengines")
    assert "main-token" in condition(unauthorized, "Ready")["message"]
    cluster.core.patch_namespaced_secret("main-token", cluster.namespace, {"stringData": {"token": TOKEN}})
    cluster.wait_state("one", "Succeeded")


def test_a_missing_token(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.cluster.core.delete_namespaced_secret("main-token", stage.cluster.namespace)
    stage.start_operator()
    missing = stage.cluster.wait_reason("main", "Accepted", "TokenNotFound", plural="loraengines")
    assert "Secret main-token with key token" in condition(missing, "Accepted")["message"]
    assert engine.uids() == set()


def test_one_endpoint_has_one_engine(stage: Stage) -> None:
    engine = stage.start_engine("main")
    cluster = stage.cluster
    cluster.wait("main", lambda o: True, "the first engine", plural="loraengines")
    wait_for_the_next_second()  # ages have that resolution
    cluster.engine(engine.endpoint.upper().replace("HTTP", "http"), "second")
    stage.start_operator()
    refused = cluster.wait_reason("second", "Accepted", "EndpointInUse", plural="loraengines")
    assert "LoRAEngine main" in condition(refused, "Accepted")["message"]
    cluster.wait_reason("main", "Ready", "Serving", plural="loraengines")
    cluster.delete("main", "loraengines")
    cluster.wait_reason("second", "Ready", "Serving", plural="loraengines")


def wait_for_the_next_second() -> None:
    now = datetime.now().second
    wait_for(lambda: datetime.now().second != now, "the next second")


# ------------------------------------------------------------------------------ the operator


def test_a_killed_operator_attaches_nothing_twice(stage: Stage) -> None:
    engine = stage.start_engine(max_experiments=2)
    operator = stage.start_operator()
    cluster = stage.cluster
    uids = [cluster.experiment(name, max_steps=15, arguments=SLOW) for name in ("one", "two", "three")]
    cluster.wait_state("one", "Running")
    for _ in range(3):
        operator.kill()
        operator.start()
    cluster.experiment("four")  # made while it may be away
    for name in ("one", "two", "three", "four"):
        cluster.wait_state(name, "Succeeded", seconds=120)
    assert [len(engine.events("attach", uid)) for uid in uids] == [1, 1, 1]


def test_the_operator_ends_cleanly(stage: Stage) -> None:
    engine = stage.start_engine()
    operator = stage.start_operator()
    uid = stage.cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    stage.cluster.wait_state("one", "Running")
    assert operator.stop() == 0
    assert uid in engine.uids()  # its end is nobody's end
    assert TOKEN not in operator.log.read_text()


def test_the_api_server_comes_back(own_stage: Stage, fresh_control_plane: ControlPlane) -> None:
    """Nothing is lost, nothing happens twice, and the operator needs no restart."""
    engine = own_stage.start_engine()
    operator = own_stage.start_operator()
    cluster = own_stage.cluster
    uid = cluster.experiment("one", max_steps=10, arguments=SLOW)
    cluster.wait_state("one", "Running")
    fresh_control_plane.restart("apiserver")
    done = cluster.wait_state("one", "Succeeded")
    assert status(done)["progress"]["step"] == 10
    cluster.experiment("two")
    cluster.wait_state("two", "Succeeded")
    assert len(engine.events("attach", uid)) == 1
    assert operator.stop() == 0


# ------------------------------------------------------------------------------ deletion


def test_deletion_when_the_engine_is_gone_for_good(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.start_operator(RELEASE_DEADLINE_SECONDS="3")
    cluster = stage.cluster
    cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    engine.kill()
    cluster.delete("one")
    cluster.wait_gone("one")
    cluster.wait_events("one", "ReleasedWithoutEngine")


def test_deletion_when_the_engines_resource_is_gone_too(stage: Stage) -> None:
    """The engine still answers: it is asked, although its LoRAEngine and Secret are gone."""
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    cluster.delete("main", "loraengines")
    cluster.core.delete_namespaced_secret("main-token", cluster.namespace)
    cluster.delete("one")
    cluster.wait_gone("one")
    assert uid not in engine.uids()


@pytest.mark.parametrize("its_engine", ["up", "down", "gone"])
def test_a_namespace_can_go(stage: Stage, kube: client.ApiClient, its_engine: str) -> None:
    """With all that is in it, at once, without a crash over the events that it refuses."""
    engine = stage.start_engine()
    operator = stage.start_operator(RELEASE_DEADLINE_SECONDS="3")
    cluster = stage.cluster
    cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    cluster.experiment("two", engineRef={"name": "nobody"})
    cluster.wait_reason("two", "Accepted", "EngineNotFound")
    # the operator's own rights are in this namespace and would go first
    rbac = client.RbacAuthorizationV1Api(kube)
    rbac.create_cluster_role_binding(
        {
            "metadata": {"name": cluster.namespace},
            "subjects": [{"kind": "ServiceAccount", "name": "clora-operator", "namespace": cluster.namespace}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        }
    )
    try:
        if its_engine != "up":
            engine.kill()
        if its_engine == "gone":
            cluster.delete("main", "loraengines")
            cluster.wait_gone("main", plural="loraengines")
        cluster.core.delete_namespace(cluster.namespace)
        wait_for(lambda: not cluster.exists("one") and not cluster.exists("two"), "the experiments to be gone")
        if its_engine == "up":
            assert engine.uids() == set()
        assert "Traceback" not in operator.log.read_text()
    finally:
        rbac.delete_cluster_role_binding(cluster.namespace)


def test_an_adapter_whose_resource_is_gone_is_detached(stage: Stage) -> None:
    engine = stage.start_engine()
    operator = stage.start_operator(RESYNC_SECONDS="2")
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    keeps = cluster.experiment("two", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    cluster.wait_state("two", "Running")
    operator.kill()
    cluster.patch("one", {"metadata": {"finalizers": None}})
    cluster.delete("one")
    foreign = dict(engine.get(f"/v1/experiments/{keeps}"))
    assert foreign["namespace"] == cluster.namespace
    put_stranger(engine.endpoint, "elsewhere")
    operator.start()
    wait_for(lambda: uid not in engine.uids(), "the orphan to be detached")
    assert {keeps, "stranger"} <= engine.uids()
    assert engine.has_files(uid)


def put_stranger(endpoint: str, namespace: str) -> None:
    """An experiment that another operator has put there."""
    body = {
        "uid": "stranger",
        "namespace": namespace,
        "name": "stranger",
        "spec": {
            "engineRef": {"name": "main"},
            "environment": {"name": "WordProblems", "arguments": SLOW},
            "data": {"builtin": "Generated"},
            "maxSteps": ENDLESS,
        },
    }
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = f"{endpoint}/v1/experiments/stranger"
    httpx.put(url, json=body, headers=headers, trust_env=False).raise_for_status()
