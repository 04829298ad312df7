"""A run's metrics file that grows step by step, its real trackers, and what is in their files afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clora_api.control import DesiredExperiment, ReportedTracker
from clora_engine.config import EngineConfig
from clora_engine.tracker import wandb_file
from clora_engine.tracking import Tracking, all_ended
from tests.unit.engine.loop import UID, desired
from tests.unit.engine.tracking import trackio_server

SECONDS = 120.0  # a deadline for two cores that others use too
KEY = "the-key-of-a-tenant-0123456789abcdef0123"  # as long as one of W&B's
WANDB = {"kind": "WandB", "mode": "Offline", "project": "p"}
MLFLOW = {"kind": "MLflow", "mode": "Offline", "project": "p"}
TRACKIO = {"kind": "Trackio", "mode": "Offline", "project": "p"}


def tracked(*trackers: dict[str, Any], keys: dict[str, str] | None = None, **changes: Any) -> DesiredExperiment:
    made = desired(tracking=list(trackers), **changes)
    return made.model_copy(update={"tracking_keys": keys})


def online(folder: Path, tracker: dict[str, Any], port: int, key: str, *, loopback: bool = True) -> Run:
    """One whose tracker is a server on a port of the loopback."""
    wanted = tracked(tracker, keys={tracker["kind"]: key})
    return Run(folder, wanted, tracking_hosts=(f"127.0.0.1:{port}",), loopback_environments=loopback)


class Run:
    """What a commit leaves of an experiment, as its trackers see it."""

    def __init__(self, folder: Path, wanted: DesiredExperiment, **config: Any) -> None:
        self.folder, self.wanted = folder / "experiments" / UID, wanted
        self.folder.mkdir(parents=True)
        self._metrics = self.folder / "metrics.jsonl"
        self._metrics.touch()
        self._changed = asyncio.Event()
        settings = EngineConfig(model="tiny", storage=folder, token_file=folder / "token", **config)
        self.tracking = Tracking(settings, self.folder, self._changed.set)

    def begin(self) -> None:
        self.tracking.begin(self.wanted, self._metrics.stat().st_size)

    def step(self, step: int) -> None:
        """Makes and commits a step."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(line(step)) + "\n")
        self.tracking.committed(self._metrics.stat().st_size)

    async def until(self, wanted: Callable[[ReportedTracker], bool]) -> None:
        """Until all trackers are as wanted."""
        async with asyncio.timeout(SECONDS):
            while not all(map(wanted, self.tracking.report())):
                self._changed.clear()
                await self._changed.wait()

    async def sent(self, step: int) -> None:
        await self.until(lambda tracker: tracker.step == step and not tracker.problem)

    async def sent_in_part(self, stored: Callable[[], int], least: int, last: int) -> None:
        """Until the tracker's own files have `least` steps, or everything."""
        while stored() < least and self.tracking.report()[0].step != last:  # noqa: ASYNC110 - its files have no event
            await asyncio.sleep(0.01)

    async def killed(self) -> None:
        """Kills its one tracker's process, and waits for the next."""
        (tracker,) = self.tracking._trackers.values()
        dead = tracker.process
        assert dead is not None
        os.killpg(dead.pid, signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            while tracker.process is dead:  # noqa: ASYNC110 - nobody else wants to know
                await asyncio.sleep(0.01)

    async def end(self, succeeded: bool | None = True) -> None:
        self.tracking.end(succeeded)
        await all_ended(SECONDS)


def line(step: int) -> dict[str, Any]:
    """A step's line of metrics, as training writes it; not every step has every number."""
    numbers = {"reward_mean": step / 8, "loss": -step / 4, "updates": 1} if step else {"wait_sampler_seconds": 0.5}
    return {"step": step, "time": f"2026-01-01T00:{step // 60:02d}:{step % 60:02d}.250Z"} | numbers


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in ("step", "time")}


def expected(steps: int) -> list[tuple[int, dict[str, float]]]:
    return [(step, numbers(line(step))) for step in range(steps)]


def in_wandb(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Every row of the history in the files of W&B, in order."""
    files = sorted((folder / "tracking" / "wandb").glob("offline-run-*/*.wandb"))
    return [row for path in files for row in wandb_file.history(path)]


def in_mlflow(folder: Path, run: str = UID) -> list[tuple[int, dict[str, float]]]:
    """Every value that MLflow's own client finds, by step."""
    found: dict[int, dict[str, float]] = {}
    client, info = mlflow_run(folder, run)
    for name in info.data.metrics:
        for metric in client.get_metric_history(info.info.run_id, name):
            assert name not in found.setdefault(metric.step, {}), f"{name} of step {metric.step} is there twice"
            found[metric.step][name] = metric.value
    return sorted(found.items())


async def in_trackio(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Every step that Trackio's own command line finds, in order."""
    return await trackio_server.steps(folder / "tracking" / "trackio")


def trackio_steps(folder: Path) -> int:
    """How many Trackio's file has; 0 while it is written. Trackio's own reader would change its mode of journal."""
    database = folder / "tracking" / "trackio" / "p.db"
    if not database.exists():
        return 0
    with contextlib.closing(sqlite3.connect(database, timeout=0.1)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM metrics").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def mlflow_run(folder: Path, run: str = UID) -> tuple[Any, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient((folder / "tracking" / "mlruns").as_uri())
    project = client.get_experiment_by_name("p")
    (found,) = client.search_runs([project.experiment_id], f"tags.`clora.uid` = '{run}'")
    return client, found


def anywhere(folder: Path, secret: str) -> list[Path]:
    """Files that hold it."""
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def workspace(pid: int) -> Path:
    """Where a process works."""
    return Path(f"/proc/{pid}/cwd").resolve()


def seen_by_others(pid: int) -> str:
    """Arguments and environments, of a process and of those that it has started."""
    processes = [str(pid), *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    files = [Path(f"/proc/{process}/{name}") for process in processes for name in ("cmdline", "environ")]
    return "".join(file.read_bytes().decode(errors="replace") for file in files)


def mlflow_step(folder: Path) -> int:
    """The last step that MLflow's files have whole."""
    (tag,) = (folder / "tracking" / "mlruns").glob("*/*/tags/clora.step")
    return int(tag.read_text() or 0)


def children(name: str = "clora_engine.tracker") -> list[int]:
    """Pids of this process's children whose command line holds `name`."""
    tasks = Path("/proc/self/task").iterdir()
    pids = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return [pid for pid in pids if name in command(pid)]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
