"""Random kills and random wishes for minutes; then everything is as it was asked for, and nothing ever was as it must
not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from local.control_plane import ControlPlane
from tests.cluster_fixtures import audit_events
from tests.e2e.chaos import PRIORITIES, Chaos
from tests.e2e.history import Commit, commits, engine_events, status_writes, violations
from tests.integration.operator_fixtures import Stage, own_stage, status, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]
__all__ = ["own_stage"]

SETTLE_SECONDS = 240.0


@pytest.mark.timeout(3600)
def test_chaos(
    own_stage: Stage, fresh_control_plane: ControlPlane, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """--chaos-seconds and --chaos-seed say how long and which."""
    seconds, seed = request.config.getoption("--chaos-seconds"), request.config.getoption("--chaos-seed")
    cluster = own_stage.cluster
    for name, value in PRIORITIES.items():
        scheduling = client.SchedulingV1Api(cluster.core.api_client)
        scheduling.create_priority_class({"metadata": {"name": name}, "value": value})
    engines = {name: own_stage.start_engine(name, max_experiments=2) for name in ("one", "two", "three")}
    operator = own_stage.start_operator(RELEASE_DEADLINE_SECONDS="30")
    chaos = Chaos(seed, fresh_control_plane, cluster, engines, operator)
    chaos.run(seconds)
    print(f"seed {seed}: {dict(chaos.done)}")

    for name in engines:
        cluster.patch(name, {"spec": {"drain": False}}, "loraengines")
    for item in cluster.items():
        if item["spec"].get("suspend") and not item["metadata"].get("deletionTimestamp"):
            cluster.patch(item["metadata"]["name"], {"spec": {"suspend": False}})
    wait_for(lambda: all(ended(item) for item in cluster.items()), "all to end", SETTLE_SECONDS)
    kept = {commit for name in engines for commit in commits(name, tmp_path / name)}
    for item in cluster.items():
        check_end(item, kept)
        forgive_missing(cluster.delete, item["metadata"]["name"])
    wait_for(lambda: not cluster.items(), "all to be deleted", SETTLE_SECONDS)
    assert {name: engine.uids() for name, engine in engines.items()} == {name: set() for name in engines}

    events = [event for name in engines for event in engine_events(name, tmp_path / name)]
    kept |= {commit for name in engines for commit in commits(name, tmp_path / name)}
    writes = list(status_writes(audit_events(fresh_control_plane), cluster.namespace))
    found = (f"{len(events)} events of engines", f"{len(kept)} commits", f"{len(writes)} status writes")
    print(f"{', '.join(found)}, {len({e.uid for e in events})} uids")
    assert violations(events, list(kept), writes) == []
    assert any(write.attached and write.committed for write in writes)
    assert {commit.uid for commit in kept} & {write.uid for write in writes}


def ended(item: dict[str, Any]) -> bool:
    return status(item).get("state") in ("Succeeded", "Failed")


def check_end(item: dict[str, Any], kept: set[Commit]) -> None:
    """Succeeded with all its steps committed; or failed as often as it was made to."""
    uid, said = item["metadata"]["uid"], status(item)
    if said["state"] == "Succeeded":
        steps = [commit.step for commit in kept if (commit.uid, commit.engine) == (uid, said["engine"]["name"])]
        assert sorted(steps) == list(range(item["spec"]["maxSteps"] + 1)), item
    else:
        assert item["spec"]["environment"]["arguments"].get("failAtStep"), item
        assert said["restarts"] == item["spec"]["backoffLimit"], item


def forgive_missing(call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except ApiException as error:
        if error.status != 404:
            raise
