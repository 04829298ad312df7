"""What breaks between operator, API server and engines, and that all goes on as if it had not."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import yaml

from local.control_plane import ControlPlane
from tests.e2e.blackhole import Relay, relay
from tests.integration.operator_fixtures import (
    TOKEN,
    Cluster,
    EngineProcess,
    Stage,
    condition,
    own_stage,
    stage,
    status,
    wait_for,
)

pytestmark = pytest.mark.integration
__all__ = ["own_stage", "stage"]

SLOW = {"stepSeconds": "0.2"}
ENDLESS = 100_000
FINALIZER = "clora.dev/release"


def steps(resource: dict[str, Any]) -> int:
    return int(status(resource).get("progress", {}).get("step", 0))


# ------------------------------------------------------------------------------ the API server


def test_watches_that_fall_silent(stage: Stage, control_plane: ControlPlane) -> None:
    """The connections stay open and say nothing: no event ever comes again. The resync sees to everything."""
    engine = stage.start_engine()
    with relay(control_plane.port) as between:
        lead_through(between, stage)
        stage.start_operator(RESYNC_SECONDS="3")
        cluster = stage.cluster
        cluster.experiment("before", max_steps=ENDLESS, arguments=SLOW)
        cluster.wait_state("before", "Running")
        assert between.silence() >= 2  # its watches of both kinds

        cluster.experiment("after")
        cluster.wait_state("after", "Succeeded")
        cluster.delete("before")
        cluster.wait_gone("before")
        cluster.patch("after", {"metadata": {"labels": {"seen": "yes"}}})
        cluster.delete("after")
        cluster.wait_gone("after")
        wait_for(lambda: engine.uids() == set(), "the engine to be empty")


def test_watches_that_fall_silent_are_opened_again(stage: Stage, control_plane: ControlPlane) -> None:
    """Also without a resync: an API server says something once a minute, and a watch that does not is given up."""
    stage.start_engine()
    with relay(control_plane.port) as between:
        lead_through(between, stage)
        stage.start_operator(RESYNC_SECONDS="3600")
        cluster = stage.cluster
        cluster.experiment("before")
        cluster.wait_state("before", "Succeeded")
        assert between.silence() >= 2
        cluster.experiment("missed")
        cluster.wait_state("missed", "Succeeded", seconds=150)
        cluster.experiment("after")
        cluster.wait_state("after", "Succeeded", seconds=30)


def lead_through(between: Relay, stage: Stage) -> None:
    """The operator, started afterwards, reaches the API server through the relay alone."""
    kubeconfig = yaml.safe_load(stage.kubeconfig.read_text())
    for entry in kubeconfig["clusters"]:
        entry["cluster"]["server"] = f"https://127.0.0.1:{between.port}"
    stage.kubeconfig.write_text(yaml.safe_dump(kubeconfig))


def test_what_is_forgotten_while_the_operator_is_frozen(own_stage: Stage, fresh_control_plane: ControlPlane) -> None:
    """Frozen, it misses a deletion and a creation; etcd is compacted and the API server restarted, so that nobody can
    tell it what it has missed."""
    engine = own_stage.start_engine()
    operator = own_stage.start_operator()
    cluster = own_stage.cluster
    gone = cluster.experiment("gone", max_steps=ENDLESS, arguments=SLOW)
    kept = cluster.experiment("kept", max_steps=ENDLESS, arguments=SLOW)
    for name in ("gone", "kept"):
        cluster.wait_state(name, "Running")
    operator.signal(signal.SIGSTOP)
    cluster.delete("gone")
    cluster.patch("gone", {"metadata": {"finalizers": None}})  # by somebody impatient
    cluster.wait_gone("gone")
    cluster.experiment("new")
    compact(fresh_control_plane)
    fresh_control_plane.restart("apiserver")
    operator.signal(signal.SIGCONT)
    cluster.wait_state("new", "Succeeded")
    wait_for(lambda: gone not in engine.uids(), "the adapter that nobody owns to be detached")
    assert kept in engine.uids()
    assert len(engine.events("attach", kept)) == 1


def compact(control_plane: ControlPlane) -> None:
    """Forgets all history of etcd."""
    socket = control_plane.folder / "etcd.sock:0"
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://etcd") as etcd:
        key = base64.b64encode(b"/").decode()
        revision = etcd.post("/v3/kv/range", json={"key": key}).raise_for_status().json()["header"]["revision"]
        etcd.post("/v3/kv/compaction", json={"revision": revision, "physical": True}).raise_for_status()


# ------------------------------------------------------------------------------ tenants


def test_a_status_that_a_tenant_made_up_is_put_right(stage: Stage) -> None:
    """The engine's word counts, not what stands in the status."""
    engine = stage.start_engine(max_experiments=1)
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    cluster.experiment("two", max_steps=3)
    cluster.wait_state("two", "Queued")
    forge(cluster, "two", {"state": "Running", "progress": {"step": 3, "maxSteps": 3, "percent": 100}}, "Attached")
    cluster.wait("two", lambda o: condition(o, "Attached").get("status") == "False", "the truth about two")
    forge(cluster, "one", {"state": "Queued", "engine": None, "restarts": 3})
    cluster.wait_state("one", "Running")
    assert status(cluster.wait("one", lambda o: "engine" in status(o), "its engine"))["engine"]["name"] == "main"
    assert engine.uids() == {uid}
    assert len(engine.events("attach", uid)) == 1


def forge(cluster: Cluster, name: str, changes: dict[str, Any], true: str = "") -> None:
    conditions = status(cluster.get(name))["conditions"]
    for found in conditions:
        if found["type"] == true:
            found["status"] = "True"
    body = {"status": {**changes, "conditions": conditions}}
    cluster.custom.patch_namespaced_custom_object_status(
        "clora.dev", "v1alpha1", cluster.namespace, "loraexperiments", name, body
    )


def test_a_finalizer_that_a_tenant_removed_comes_back(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    cluster.patch("one", {"metadata": {"finalizers": None}})
    cluster.wait("one", lambda o: FINALIZER in o["metadata"].get("finalizers", ()), "the finalizer")
    cluster.delete("one")
    cluster.wait_gone("one")
    assert len(engine.events("delete", uid)) == 1


def test_the_same_name_again(stage: Stage) -> None:
    """Deleted and created at once, several times: each is its own, and the last one runs."""
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uids = []
    for turn in range(4):
        steps_wanted = ENDLESS if turn < 3 else 3
        uids.append(cluster.experiment("again", max_steps=steps_wanted, arguments=SLOW if turn < 3 else {}))
        if turn < 3:
            wait_for(lambda: uids[-1] in engine.uids(), "the engine to take it")
            cluster.delete("again")
            cluster.wait_gone("again")
    done = cluster.wait_state("again", "Succeeded")
    assert done["metadata"]["uid"] == uids[-1]
    assert steps(done) == 3
    assert [len(engine.events("delete", uid)) for uid in uids] == [1, 1, 1, 0]


# ------------------------------------------------------------------------------ engines


def test_an_engine_deleted_under_its_experiments(stage: Stage) -> None:
    """It says so, trains on where it is, and is taken up again when the resource is back; deletion still works."""
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    cluster.delete("main", "loraengines")
    cluster.wait_gone("main", plural="loraengines")
    cluster.wait_reason("one", "Accepted", "EngineNotFound")
    cluster.core.delete_namespaced_secret("main-token", cluster.namespace)
    cluster.engine(engine.endpoint)
    cluster.wait_state("one", "Running")
    assert len(engine.events("attach", uid)) == 1
    cluster.delete("one")
    cluster.wait_gone("one")
    assert engine.uids() == set()


def test_a_token_that_is_rotated(stage: Stage) -> None:
    """Nothing that runs notices; the old token is no longer used."""
    engine = stage.start_engine()
    operator = stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    engine.set_token("another-token")
    cluster.core.patch_namespaced_secret("main-token", cluster.namespace, {"stringData": {"token": "another-token"}})
    before = steps(cluster.get("one"))
    cluster.wait("one", lambda o: steps(o) > before + 5, "progress under the new token")
    cluster.experiment("two")
    cluster.wait_state("two", "Succeeded")
    assert len(engine.events("attach", uid)) == 1
    log = operator.log.read_text()
    assert TOKEN not in log
    assert "another-token" not in log


@pytest.mark.parametrize(
    "fault", [{"status": 500}, {"status": 401}, {"status": 404}, {"garbage": True}], ids=lambda fault: str(fault)
)
def test_an_engine_that_answers_nonsense(stage: Stage, fault: dict[str, Any]) -> None:
    """Unknown, not Failed; nothing is attached anew, and all goes on when it comes to its senses."""
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    with misbehaving(engine, fault):
        unknown = cluster.wait_state("one", "Unknown")
        assert condition(unknown, "Failed").get("status") != "True"
        cluster.wait("main", lambda o: condition(o, "Ready").get("status") == "False", "Ready", plural="loraengines")
    cluster.wait_state("one", "Running")
    assert status(cluster.get("one"))["restarts"] == 0
    assert len(engine.events("attach", uid)) == 1


def test_reports_of_another_epoch_confirm_nothing(stage: Stage) -> None:
    """As from a proxy that has kept an answer: neither attached anew nor called attached, and nobody fails."""
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    with misbehaving(engine, {"epoch": 7}):
        cluster.wait("one", lambda o: condition(o, "Attached").get("status") != "True", "doubt")
        cluster.experiment("two", max_steps=2)
        cluster.wait("two", lambda o: bool(status(o).get("conditions")), "a word about it")
        assert status(cluster.get("two"))["state"] != "Running"
    cluster.wait_state("one", "Running")
    cluster.wait_state("two", "Succeeded")
    assert status(cluster.get("one"))["restarts"] == 0
    assert len(engine.events("attach", uid)) == 1


def test_an_engine_that_hangs_for_one_experiment(stage: Stage) -> None:
    """The others are served as ever."""
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("one", "Running")
    with misbehaving(engine, {"hang": uid}):
        cluster.patch("one", {"spec": {"suspend": True}})
        for number in range(10):
            cluster.experiment(f"other-{number}", max_steps=2)
        for number in range(10):
            cluster.wait_state(f"other-{number}", "Succeeded")
    cluster.wait_state("one", "Suspended", seconds=90)


def test_an_engine_that_has_lost_its_storage(stage: Stage) -> None:
    """An experiment with committed steps never begins at step 0 by itself; with its files back it goes on."""
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait("one", lambda o: steps(o) >= 3, "three steps")
    cluster.wait("one", lambda o: status(o).get("checkpoint", {}).get("step", 0) >= 3, "their commits")
    engine.kill()
    folder = engine.storage / "experiments"
    aside = folder.rename(engine.storage / "aside")
    engine.start()
    lost = cluster.wait_reason("one", "Attached", "CheckpointUnreachable")
    assert "was committed, but this engine's storage has no step of it" in condition(lost, "Attached")["message"]
    assert status(lost)["restarts"] == 0
    cluster.experiment("two")
    cluster.wait_state("two", "Succeeded")  # its slot is nobody's meanwhile
    (aside / uid).rename(folder / uid)
    again = cluster.wait_state("one", "Running", seconds=90)
    assert steps(again) >= 3
    attached = engine.events("attach", uid)
    assert [event["epoch"] for event in attached] == [1, 2]
    assert attached[1]["step"] >= 3


def test_an_engine_that_has_loaded_another_model(stage: Stage) -> None:
    """What was trained on the first goes no step further on the other, new experiments do; with the first model back
    all goes on. What runs on each is told."""
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait("one", lambda o: status(o).get("checkpoint", {}).get("step", 0) >= 3, "three commits")
    engine.kill()
    kept = engine.commits(uid)
    engine.model = "other"
    engine.start()
    refused = cluster.wait_reason("one", "Attached", "CheckpointUnreachable")
    message = condition(refused, "Attached")["message"]
    assert "was trained on simulated, and this engine has loaded other" in message
    assert "begin anew with an experiment of another name" in message
    assert status(refused)["restarts"] == 0
    assert status(cluster.get("main", "loraengines"))["model"] == "other"
    cluster.experiment("two")
    cluster.wait_state("two", "Succeeded")
    assert engine.commits(uid) == kept
    engine.kill()
    engine.model = "simulated"
    engine.start()
    again = cluster.wait("one", lambda o: steps(o) > kept[-1] + 1, "a step more", seconds=90)
    assert status(again)["restarts"] == 0


@contextmanager
def misbehaving(engine: EngineProcess, fault: dict[str, Any]) -> Iterator[None]:
    path = engine.storage / "faults.json"
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(fault))
    beside.rename(path)
    yield
    path.unlink()
