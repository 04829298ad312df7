"""The real libraries, each in its real process, offline: what they keep of a run, whatever becomes of the process."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clora_api.control import Phase
from clora_engine import tracking
from clora_engine.tracking import all_ended
from tests.unit.engine.loop import Life
from tests.unit.engine.tracking.fixtures import (
    MLFLOW,
    SECONDS,
    TRACKIO,
    WANDB,
    Run,
    children,
    expected,
    in_mlflow,
    in_trackio,
    in_wandb,
    mlflow_run,
    mlflow_step,
    numbers,
    tracked,
    trackio_steps,
)

ALL = pytest.mark.parametrize("tracker", [WANDB, MLFLOW, TRACKIO], ids=["WandB", "MLflow", "Trackio"])
STORED: dict[str, Callable[[Path], int]] = {
    "WandB": lambda folder: len(in_wandb(folder)),
    "MLflow": mlflow_step,
    "Trackio": trackio_steps,
}


async def read(tracker: dict[str, Any], folder: Path) -> list[tuple[int, dict[str, float]]]:
    if tracker is TRACKIO:
        return await in_trackio(folder)
    return in_wandb(folder) if tracker is WANDB else in_mlflow(folder)


async def test_a_run_is_there_number_by_number(tmp_path: Path) -> None:
    life = Life(tmp_path, tracked(WANDB, MLFLOW, TRACKIO))
    experiment = await life.run()
    assert experiment.phase is Phase.SUCCEEDED
    await all_ended(SECONDS)
    reported = [(t.kind, t.step, t.problem) for t in experiment.report(0).tracking]
    assert reported == [("WandB", 3, ""), ("MLflow", 3, ""), ("Trackio", 3, "")]
    lines = [(line["step"], numbers(line)) for line in life.metrics()]
    assert in_wandb(life.folder) == lines
    assert in_mlflow(life.folder) == lines
    assert await in_trackio(life.folder) == lines
    _, run = mlflow_run(life.folder)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "e"
    assert run.data.params["spec.algorithm.learningRate"] == "1e-2"
    assert not any("tracking" in name for name in run.data.params)


@ALL
async def test_killed_at_any_time_a_step_is_there_once(
    tmp_path: Path, tracker: dict[str, Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(tracking, "PAUSES", (0.0,))
    run = Run(tmp_path, tracked(tracker))
    stored = functools.partial(STORED[tracker["kind"]], run.folder)
    run.begin()
    run.step(0)
    await run.sent(0)
    for first in (1, 101):  # killed in the midst of so many, and right after them
        for step in range(first, first + 100):
            run.step(step)
        await run.sent_in_part(stored, first + 20, first + 99)
        await run.killed()
        await run.sent(first + 99)
        await run.killed()
    await run.sent(200)
    await run.end()
    assert await read(tracker, run.folder) == expected(201)


async def test_a_step_that_was_sent_in_part_is_completed(tmp_path: Path) -> None:
    """As MLflow's store is after a kill between two of a step's metrics."""
    run = Run(tmp_path, tracked(MLFLOW))
    run.begin()
    run.step(0)
    run.step(1)
    await run.sent(1)
    await run.end(None)
    client, found = mlflow_run(run.folder)
    client.log_metric(found.info.run_id, "loss", -0.5, timestamp=1, step=2)
    run.begin()
    run.step(2)
    await run.sent(2)
    await run.end()
    assert in_mlflow(run.folder) == expected(3)


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_last_step_that_a_kill_left_unsaid_is_found(tmp_path: Path, steps: int) -> None:
    """MLflow empties a tag's file before it writes it anew."""
    run = Run(tmp_path, tracked(MLFLOW))
    run.begin()
    for step in range(steps):
        run.step(step)
    await run.sent(steps - 1)
    await run.end(None)
    (tag,) = (run.folder / "tracking" / "mlruns").glob("*/*/tags/clora.step")
    tag.write_text("")
    run.begin()
    run.step(steps)
    await run.sent(steps)
    await run.end()
    assert in_mlflow(run.folder) == expected(steps + 1)


@ALL
async def test_a_paused_run_goes_on(tmp_path: Path, tracker: dict[str, Any]) -> None:
    run = Run(tmp_path, tracked(tracker))
    for step in (0, 1):
        run.begin()
        run.step(step)
        run.tracking.end(None)  # and the next begins while it ends
    run.begin()
    await run.sent(1)
    await run.end(False)
    assert await read(tracker, run.folder) == expected(2)
    if tracker is MLFLOW:
        assert mlflow_run(run.folder)[1].info.status == "FAILED"


async def test_one_that_hangs_is_killed_and_tried_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tracking, "PAUSES", (0.0,))
    run = Run(tmp_path, tracked(MLFLOW))
    run.begin()
    run.step(0)
    await run.sent(0)
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(tracking, "ANSWER_SECONDS", 0.2)
        run.step(1)
        await run.until(lambda report: "did not answer" in report.problem)
    assert pid not in children()
    await run.sent(1)
    await run.end()
    assert in_mlflow(run.folder) == expected(2)


async def test_one_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: Any) -> None:
    """The experiment ends; what was not taken by then is given up."""
    monkeypatch.setattr(tracking, "END_SECONDS", 0.5)
    life = Life(tmp_path, tracked(MLFLOW))

    async def stop_it() -> None:
        for pid in children():
            os.kill(pid, signal.SIGSTOP)

    life.trainer.before_update = stop_it
    assert (await life.run()).phase is Phase.SUCCEEDED
    assert [line["step"] for line in life.metrics()] == [0, 1, 2, 3]
    await all_ended(SECONDS)
    (report,) = life.experiment.report(0).tracking
    assert "had not taken everything" in report.problem
    assert children() == []


async def test_a_store_that_cannot_be_written_is_said_and_tried_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tracking, "PAUSES", (0.05,))
    run = Run(tmp_path, tracked(MLFLOW))
    (run.folder / "tracking").write_text("in the way")
    run.begin()
    run.step(0)
    await run.until(lambda report: "FileExistsError" in report.problem)
    (run.folder / "tracking").unlink()
    await run.sent(0)
    await run.end()
    assert in_mlflow(run.folder) == expected(1)


async def test_what_is_not_committed_is_not_sent(tmp_path: Path) -> None:
    """A step that is taken back was never told to anybody."""
    run = Run(tmp_path, tracked(MLFLOW))
    run.begin()
    run.step(0)
    await run.sent(0)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "time": "2026-01-01T00:00:00Z", "loss": 9}) + "\n")
    await run.end()
    assert in_mlflow(run.folder) == expected(1)


async def test_trackers_come_and_go_with_the_spec(tmp_path: Path) -> None:
    run = Run(tmp_path, tracked())
    run.begin()
    run.step(0)
    assert run.tracking.report() == []
    run.tracking.update(tracked(MLFLOW))
    await run.sent(0)
    (pid,) = children()
    run.tracking.update(tracked(MLFLOW, weight=7))
    assert children() == [pid]  # nothing of a tracker has changed
    run.tracking.update(tracked())
    await all_ended(SECONDS)
    assert run.tracking.report() == []
    assert in_mlflow(run.folder) == expected(1)


async def test_the_process_is_small_and_knows_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CLORA_TOKEN_OF_THE_ENGINE", "secret")
    run = Run(tmp_path, tracked(WANDB))
    run.begin()
    run.step(0)
    await run.sent(0)
    (pid,) = children()
    process = Path(f"/proc/{pid}")
    assert b"CLORA_TOKEN" not in (process / "environ").read_bytes()
    assert (process / "oom_score_adj").read_text().strip() == "1000"
    limits = {row[:25].strip(): row[25:].split()[0] for row in (process / "limits").read_text().splitlines()[1:]}
    assert limits["Max data size"] == str(2 << 30)
    assert limits["Max core file size"] == "0"
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    await run.end()
    assert children() == []


async def test_it_ends_by_itself_when_the_engine_is_gone(tmp_path: Path) -> None:
    """And leaves what it had whole."""
    run = Run(tmp_path, tracked(WANDB))
    run.begin()
    run.step(0)
    await run.sent(0)
    process = next(iter(run.tracking._trackers.values())).process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    async with asyncio.timeout(60):
        await process.wait()
    await run.tracking.kill()
    assert in_wandb(run.folder) == expected(1)
