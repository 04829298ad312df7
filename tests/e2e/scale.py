"""Many experiments on a few engines, and what that costs the operator and the API server.

The engines are the control API's real HTTP servers with training simulated (simulated_supervisor.py); the operator is
the real process, with the settings that users get.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from local.control_plane import ControlPlane
from tests.cluster_fixtures import audit_events
from tests.integration.operator_fixtures import Cluster, OperatorProcess, Stage, staged, status, wait_for

NAMESPACE = "scale"
STEP_SECONDS = 2.0
ENDLESS = 100_000
SETTLE_SECONDS = 300.0
PATIENCE = {"PROGRESS_WRITE_SECONDS": "5", "RESYNC_SECONDS": "60"}


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of the operator's life: calls of the API server and status writes a minute, CPU in per cent of one
    core."""

    seconds: float
    calls_per_minute: float
    status_writes_per_minute: float
    cpu_percent: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds from the first creation until all are attached, from the request to end until all have succeeded, and
    from their deletion until all are gone; the operator's memory at its highest, in MiB."""

    experiments: int
    engines: int
    attach_seconds: float
    finish_seconds: float
    delete_seconds: float
    running: Window
    idle: Window
    memory_mib: float
    attached_twice: int
    left: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    control_plane: ControlPlane, folder: Path, *, experiments: int = 200, engines: int = 5, window_seconds: float = 60.0
) -> Figures:
    """Attaches all, lets them run, lets them finish, leaves them alone, deletes all, and the namespace with them."""
    with config.new_client_from_config(str(control_plane.kubeconfig)) as kube:
        core = client.CoreV1Api(kube)
        core.create_namespace({"metadata": {"name": NAMESPACE}})
        with staged(control_plane, kube, NAMESPACE, folder) as stage:
            figures = _measure(control_plane, stage, experiments, engines, window_seconds)
            core.delete_namespace(NAMESPACE)
            wait_for(lambda: _gone(core), "the namespace to go", SETTLE_SECONDS)
        return figures


def _measure(
    control_plane: ControlPlane, stage: Stage, experiments: int, engines: int, window_seconds: float
) -> Figures:
    cluster = stage.cluster
    room = -(-experiments // engines)
    with ThreadPoolExecutor() as pool:  # each loads what an engine loads
        starting = [
            pool.submit(stage.start_engine, f"engine-{number}", max_experiments=room, real_server=True)
            for number in range(engines)
        ]
    held = [engine.result() for engine in starting]
    operator = stage.start_operator(**PATIENCE)
    began = time.monotonic()
    names = [f"run-{number:03d}" for number in range(experiments)]
    uids = [
        cluster.experiment(
            name,
            max_steps=ENDLESS,
            arguments={"stepSeconds": f"{STEP_SECONDS}"},
            engineRef=None,
            engineSelector={"matchLabels": {"pool": "tests"}},
        )
        for name in names
    ]
    _wait_for_all(cluster, "Running", experiments)
    attached = time.monotonic() - began
    with _watched(control_plane, operator) as running:
        time.sleep(window_seconds)

    began = time.monotonic()
    for name in names:
        cluster.patch(name, {"spec": {"maxSteps": 1}})
    _wait_for_all(cluster, "Succeeded", experiments)
    finished = time.monotonic() - began
    _wait_for_engines(cluster)
    with _watched(control_plane, operator) as idle:
        time.sleep(window_seconds)

    began = time.monotonic()
    for name in names:
        cluster.delete(name)
    wait_for(lambda: not cluster.items(), "all to be deleted", SETTLE_SECONDS)
    deleted = time.monotonic() - began
    attaches = Counter((engine.endpoint, uid) for engine in held for uid in uids for _ in engine.events("attach", uid))
    return Figures(
        experiments=experiments,
        engines=engines,
        attach_seconds=round(attached, 1),
        finish_seconds=round(finished, 1),
        delete_seconds=round(deleted, 1),
        running=running[0],
        idle=idle[0],
        memory_mib=round(operator.peak_memory_bytes() / 2**20, 1),
        attached_twice=sum(attaches.values()) - experiments,
        left=sum(len(engine.uids()) for engine in held),
    )


@contextmanager
def _watched(control_plane: ControlPlane, operator: OperatorProcess) -> Iterator[list[Window]]:
    """Fills the list with what the operator did meanwhile."""
    found: list[Window] = []
    seen = len(audit_events(control_plane))
    process = psutil.Process(operator.pid)
    cpu, began = sum(process.cpu_times()[:2]), time.monotonic()
    yield found
    seconds = time.monotonic() - began
    cpu = sum(process.cpu_times()[:2]) - cpu
    calls = [event for event in audit_events(control_plane)[seen:] if event["user"]["username"].endswith("operator")]
    writes = [event for event in calls if event.get("objectRef", {}).get("subresource") == "status"]
    minutes = seconds / 60
    found.append(
        Window(
            round(seconds, 1), round(len(calls) / minutes, 1), round(len(writes) / minutes, 1),
            round(100 * cpu / seconds, 1),
        )
    )  # fmt: skip


def _wait_for_all(cluster: Cluster, state: str, number: int) -> None:
    def all_there() -> bool:
        found = Counter(status(item).get("state") for item in cluster.items())
        return found[state] == number

    wait_for(all_there, f"all {number} to be {state}", SETTLE_SECONDS)


def _wait_for_engines(cluster: Cluster) -> None:
    """Until their statuses, which are written less often, know that nobody is left."""

    def all_empty() -> bool:
        return all(status(item).get("experiments") == 0 for item in cluster.items("loraengines"))

    wait_for(all_empty, "the engines' statuses to say that they are empty", SETTLE_SECONDS)


def _gone(core: client.CoreV1Api) -> bool:
    try:
        core.read_namespace(NAMESPACE)
    except ApiException as error:
        return bool(error.status == 404)
    return False
