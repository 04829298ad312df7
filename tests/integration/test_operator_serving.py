"""Serving, through the API server: the Secret, the slot after the end, and what outlives restarts."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from tests.integration.loop_engine import LoopEngine
from tests.integration.operator_fixtures import TOKEN, Cluster, EngineProcess, Stage, condition, stage, status, wait_for
from tests.unit.engine.loop import ROWS
from tests.unit.engine.loop import desired as of_the_loop

pytestmark = pytest.mark.integration
__all__ = ["stage"]

ON = {"enabled": True}


def offer(stage: Stage, engine: EngineProcess) -> None:
    """The engine's port for tenants, which this one simulates."""
    stage.cluster.patch("main", {"spec": {"serving": {**ON, "endpoint": f"{engine.endpoint}/tenants"}}}, "loraengines")


def token(cluster: Cluster, name: str) -> str:
    secret = cluster.core.read_namespaced_secret(f"{name}-serving", cluster.namespace)
    return base64.b64decode(secret.data["token"]).decode()


def told(engine: EngineProcess, uid: str) -> str:
    path = engine.storage / "serving-token" / uid
    return path.read_text() if path.exists() else ""


def served(cluster: Cluster, name: str, value: str = "True", reason: str = "") -> dict[str, Any]:
    def as_wanted(of: dict[str, Any]) -> bool:
        found = condition(of, "Served")
        return found.get("status") == value and reason in ("", found.get("reason"))

    return cluster.wait(name, as_wanted, f"Served {value} {reason}")


def holds(engine: EngineProcess) -> int:
    return int(engine.get("/v1/engine")["experiments"])


def test_it_is_served_after_its_end_through_restarts_until_it_is_turned_off(stage: Stage) -> None:
    engine, cluster = stage.start_engine(max_experiments=1), stage.cluster
    offer(stage, engine)
    operator = stage.start_operator()
    uid = cluster.experiment("one", serving=ON)
    cluster.wait_state("one", "Succeeded")
    found = served(cluster, "one")
    assert status(found)["serving"] == {
        "endpoint": f"{engine.endpoint}/tenants",
        "secretName": "one-serving",
        "version": "one@3",
    }
    first = token(cluster, "one")
    assert told(engine, uid) == first
    secret = cluster.core.read_namespaced_secret("one-serving", cluster.namespace)
    assert secret.metadata.owner_references[0].uid == uid
    assert holds(engine) == 1
    cluster.experiment("waits")
    cluster.wait_state("waits", "Queued")

    operator.kill()
    stage.start_operator()
    engine.kill()
    engine.start()
    wait_for(lambda: holds(engine) == 1 and told(engine, uid) == first, "the served one to have its slot again")
    served(cluster, "one")
    assert token(cluster, "one") == first
    assert engine.events("attach", uid) == engine.events("attach", uid)[:1]  # it has never trained again

    cluster.patch("one", {"spec": {"serving": {"enabled": False}}})
    off = served(cluster, "one", "False", "NotServed")
    assert "serving" not in status(off)
    assert status(off)["state"] == "Succeeded"
    cluster.wait_state("waits", "Succeeded")
    assert first not in operator.log.read_text()


def test_turned_on_after_the_end_and_deleted(stage: Stage) -> None:
    engine, cluster = stage.start_engine(), stage.cluster
    stage.start_operator()
    uid = cluster.experiment("one", max_steps=1, serving=ON)
    cluster.wait_state("one", "Succeeded")
    served(cluster, "one", "False", "ServingNotOffered")
    with pytest.raises(ApiException):
        token(cluster, "one")
    assert holds(engine) == 0
    offer(stage, engine)
    served(cluster, "one")
    assert holds(engine) == 1
    cluster.delete("one")
    cluster.wait_gone("one")
    assert uid not in engine.uids()


def test_a_secret_of_somebody_elses_is_left_alone(stage: Stage) -> None:
    engine, cluster = stage.start_engine(), stage.cluster
    offer(stage, engine)
    body = {"metadata": {"name": "one-serving"}, "stringData": {"token": "the-token-of-something-else"}}
    cluster.core.create_namespaced_secret(cluster.namespace, body)
    stage.start_operator()
    uid = cluster.experiment("one", serving=ON)
    served(cluster, "one", "False", "SecretInUse")
    cluster.wait_state("one", "Succeeded")
    assert told(engine, uid) == ""
    assert token(cluster, "one") == "the-token-of-something-else"
    cluster.core.delete_namespaced_secret("one-serving", cluster.namespace)
    served(cluster, "one")
    assert told(engine, uid) == token(cluster, "one") != "the-token-of-something-else"


def test_a_higher_priority_takes_the_slot_and_it_comes_back(stage: Stage, kube: Any) -> None:
    from kubernetes import client

    engine, cluster = stage.start_engine(max_experiments=1), stage.cluster
    offer(stage, engine)
    stage.start_operator()
    cluster.experiment("low", max_steps=1, serving=ON)
    served(cluster, "low")
    scheduling, name = client.SchedulingV1Api(kube), f"{cluster.namespace}-high"
    scheduling.create_priority_class({"metadata": {"name": name}, "value": 10})
    try:
        cluster.experiment("high", arguments={"stepSeconds": "0.5"}, priorityClassName=name)
        served(cluster, "low", "False")
        cluster.wait_state("high", "Running", "Succeeded")
        assert "Succeeded" in status(cluster.get("low"))["state"]
        cluster.wait_state("high", "Succeeded")
        served(cluster, "low")
    finally:
        scheduling.delete_priority_class(name)


# ------------------------------------------------------------------------------ on the engine's own HTTP servers


@pytest.fixture
def loop_engine(tmp_path: Path) -> Iterator[LoopEngine]:
    engine = LoopEngine(tmp_path / "loop-engine", TOKEN)
    engine.start()
    yield engine
    engine.close()


def rotated(cluster: Cluster, before: str) -> str:
    """The token that takes the place of a Secret that somebody deletes."""
    cluster.core.delete_namespaced_secret("one-serving", cluster.namespace)

    def made() -> bool:
        try:
            return token(cluster, "one") != before
        except ApiException as error:
            if error.status != 404:
                raise
            return False

    wait_for(made, "another Secret")
    return token(cluster, "one")


def test_a_token_is_revoked_whatever_stands_in_the_way_of_everything_else(
    stage: Stage, loop_engine: LoopEngine
) -> None:
    """Its data are gone and the operator has forgotten them; then its spec is one that the engine refuses, too."""
    cluster = stage.cluster
    cluster.engine(loop_engine.endpoint)
    cluster.patch("main", {"spec": {"serving": {**ON, "endpoint": loop_engine.tenants}}}, "loraengines")
    rows = {"metadata": {"name": "rows"}, "data": {"k": ROWS}}
    cluster.core.create_namespaced_config_map(cluster.namespace, rows)
    spec = of_the_loop(maxSteps=100_000, data={"configMap": {"name": "rows", "key": "k"}}).spec.to_api()
    cluster.create("loraexperiments", "one", spec | {"engineRef": {"name": "main"}, "serving": ON})
    operator = stage.start_operator()
    served(cluster, "one")
    first = token(cluster, "one")
    assert loop_engine.accepts(first)

    cluster.core.delete_namespaced_config_map("rows", cluster.namespace)
    operator.kill()
    operator.start()
    second = rotated(cluster, first)
    wait_for(lambda: loop_engine.accepts(second), "the new token to be valid")
    assert not loop_engine.accepts(first)
    cluster.patch("one", {"spec": {"serving": {"enabled": False}}})
    wait_for(lambda: not loop_engine.accepts(second), "nobody to be let in")
    assert "serving" not in status(served(cluster, "one", "False", "NotServed"))

    cluster.core.create_namespaced_config_map(cluster.namespace, rows)
    operator.kill()
    operator.start()
    cluster.patch("one", {"spec": {"serving": ON, "sampling": {"maxTokens": 4096}}})
    cluster.wait_reason("one", "Accepted", "InvalidSpec")
    wait_for(lambda: loop_engine.accepts(second), "its Secret's token to be valid again")
    third = rotated(cluster, second)
    wait_for(lambda: loop_engine.accepts(third), "the newest token to be valid")
    assert not loop_engine.accepts(second)
    found = cluster.wait_state("one", "Running")
    assert status(found)["progress"]["step"] > 0
    assert not {first, second, third} & set(operator.log.read_text().split())
