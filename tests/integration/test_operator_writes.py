"""What the operator writes, counted in the API server's audit log: seldom, nothing in vain, and beside others."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from local.control_plane import ControlPlane
from tests.cluster_fixtures import writes
from tests.integration.operator_fixtures import Cluster, Stage, stage, status, wait_for

pytestmark = pytest.mark.integration
__all__ = ["stage"]

STILL = {"stepSeconds": "3600"}  # it runs, and nothing moves
ENDLESS = 100_000


def test_somebody_writes_all_the_time(stage: Stage, control_plane: ControlPlane) -> None:
    """Some of the operator's writes come too late and are refused: nothing is lost, said twice, or an error."""
    engine = stage.start_engine()
    operator = stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=30, arguments={"stepSeconds": "0.1"})
    with labelled_all_the_time(cluster, "one"):
        done = cluster.wait_state("one", "Succeeded")
    of_one = [w for w in operators_writes(control_plane, cluster) if w["objectRef"].get("name") == "one"]
    answers = [event["responseStatus"]["code"] for event in of_one]
    assert 409 in answers
    assert set(answers) <= {200, 409}
    assert status(done)["progress"]["step"] == 30
    assert len(engine.events("attach", uid)) == 1
    told = cluster.wait_events("one", "Attaching", "EngineConfirmed", "Completed")
    assert len(told) == len(set(told)), "nothing is told twice"
    log = operator.log.read_text()
    assert "Traceback" not in log
    assert "; again in" not in log, "a conflict is no failure and waits for no back-off"


@contextmanager
def labelled_all_the_time(cluster: Cluster, name: str) -> Iterator[None]:
    """As a tool of somebody's does, as fast as the API server takes it, until the end of the block."""
    ends = threading.Event()

    def label() -> None:
        for number in itertools.count():
            if ends.is_set():
                return
            cluster.patch(name, {"metadata": {"labels": {"seen": str(number)}}})

    with ThreadPoolExecutor(1) as pool:
        labelling = pool.submit(label)
        try:
            yield
        finally:
            ends.set()
            labelling.result()


def test_the_rate_of_status_writes(stage: Stage, control_plane: ControlPlane) -> None:
    """At most one in 5 s while only progress changes; every transition at once."""
    stage.start_engine()
    stage.start_operator(PROGRESS_WRITE_SECONDS="5")
    cluster = stage.cluster
    cluster.experiment("one", max_steps=60, arguments={"stepSeconds": "0.2"})
    cluster.wait_state("one", "Running")
    done = cluster.wait_state("one", "Succeeded")
    assert status(done)["progress"]["step"] == 60
    of_one = [
        event
        for event in operators_writes(control_plane, cluster)
        if event["objectRef"].get("subresource") == "status"
        and event["objectRef"].get("name") == "one"
        and event.get("responseStatus", {}).get("code") == 200
    ]
    lasted = (at(of_one[-1]) - at(of_one[0])).total_seconds()
    transitions = 3  # attaching, attached, succeeded
    assert len(of_one) <= transitions + lasted // 5 + 1
    assert len(of_one) >= transitions


def at(event: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(event["requestReceivedTimestamp"])


def test_nothing_is_written_when_nothing_changes(stage: Stage, control_plane: ControlPlane) -> None:
    """Whatever state they are in, however often the resync looks at them."""
    stage.start_engine("main", max_experiments=1)
    lost = stage.start_engine("lost")
    stage.start_operator(RESYNC_SECONDS="1")
    cluster = stage.cluster
    cluster.experiment("unknown", engineRef={"name": "lost"}, max_steps=ENDLESS, arguments=STILL)
    cluster.experiment("suspended", max_steps=ENDLESS, arguments={"stepSeconds": "0.3"})  # it finishes its step
    for name in ("unknown", "suspended"):
        cluster.wait_state(name, "Running")
    cluster.patch("suspended", {"spec": {"suspend": True}})
    lost.kill()
    cluster.experiment("running", max_steps=ENDLESS, arguments=STILL)
    cluster.wait_state("running", "Running")
    cluster.experiment("queued")
    cluster.experiment("refused", lora={"rank": 64})
    states = {"queued": "Queued", "suspended": "Suspended", "unknown": "Unknown", "refused": "Pending"}
    for name, state in states.items():
        cluster.wait_state(name, state)
    wait_for(lambda: seconds_since_the_last(operators_writes(control_plane, cluster)) > 2, "the operator to be done")
    before = operators_writes(control_plane, cluster)
    time.sleep(8)  # there is nothing to wait for: that is the point
    assert operators_writes(control_plane, cluster)[len(before) :] == []
    assert {name: status(cluster.get(name))["state"] for name in states} == states
    assert status(cluster.get("running"))["state"] == "Running"


def operators_writes(control_plane: ControlPlane, cluster: Cluster) -> list[dict[str, Any]]:
    """Of any kind, also those that were refused or changed nothing."""
    every = writes(control_plane, cluster.namespace)
    return [event for event in every if event["user"]["username"].endswith(":clora-operator")]


def seconds_since_the_last(events: list[dict[str, Any]]) -> float:
    return (datetime.now(UTC) - at(events[-1])).total_seconds()
