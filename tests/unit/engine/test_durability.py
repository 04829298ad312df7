"""Killed at any point of a step, an experiment goes on to the very bits of a run that nobody disturbed."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine import full_disk
from tests.unit.engine.durable_run import POINTS, live
from tests.unit.engine.loop import UID

pytestmark = pytest.mark.slow

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.unit.engine.durable_run", "tests.unit.engine.full_disk"])

Ending = dict[str, Any]
OFF_POLICY = {"algorithm": {"epochsPerBatch": 2, "klCoefficient": "0.05", "maxOffPolicySteps": 2}}


def run(storage: Path, epoch: int, point: str | None = None, changes: dict[str, Any] | None = None) -> int | None:
    return finish(FORKS.Process(target=live, args=(str(storage), epoch, point, changes or {})))


def finish(process: Any) -> int | None:
    process.start()
    process.join(120)
    code: int | None = process.exitcode
    assert code is not None, "it hangs"
    return code


def ending(storage: Path) -> Ending:
    """All that a run leaves, but for times and what this life drew of it."""
    folder = storage / "experiments" / UID
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "time", "per_second", "policy_lag", "prompt_tokens")
    files = {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in (folder / "steps").glob("*/*")
        if path.suffix == ".safetensors"
    }
    return files | {
        "lines": [{k: v for k, v in line.items() if not any(word in k for word in timed)} for line in lines],
        "result": json.loads((folder / "result.json").read_text())["phase"],
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Ending]:
    storage = tmp_path_factory.mktemp("undisturbed")
    assert run(storage, 1) == 0
    return lambda: ending(storage)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_costs_nothing_but_time(
    tmp_path: Path, point: str, undisturbed: Callable[[], Ending]
) -> None:
    assert run(tmp_path, 1, point) == -signal.SIGKILL
    assert run(tmp_path, 2) == 0
    assert ending(tmp_path) == undisturbed()


@pytest.mark.parametrize("point", ["some groups are logged", "the gradient is there", "the step is committed"])
def test_steps_drawn_ahead_are_not_drawn_again(tmp_path: Path, point: str, undisturbed: Callable[[], Ending]) -> None:
    """What is written down here does not depend on the version, so that off-policy steps train on the same tokens. As
    many commits as steps are drawn ahead are kept, one more than without."""
    assert run(tmp_path, 1, point, OFF_POLICY) == -signal.SIGKILL
    assert run(tmp_path, 2, None, OFF_POLICY) == 0
    left, wanted = ending(tmp_path), undisturbed()
    assert {name.partition("/")[0] for name in left.keys() - wanted.keys()} == {"00002"}
    assert {name: left.get(name) for name in wanted} == wanted


def test_killed_again_and_again(tmp_path: Path, undisturbed: Callable[[], Ending]) -> None:
    for epoch, point in enumerate(("all groups are logged", "the gradient is there", "the step is saved"), start=1):
        assert run(tmp_path, epoch, point) == -signal.SIGKILL
    assert run(tmp_path, 9) == 0
    assert ending(tmp_path) == undisturbed()


@pytest.mark.parametrize("moment", full_disk.MOMENTS)
def test_a_full_disk_is_waited_for_and_nothing_is_lost(
    tmp_path: Path, moment: str, undisturbed: Callable[[], Ending]
) -> None:
    storage, outside = tmp_path / "small", tmp_path / "outside"
    storage.mkdir()
    assert finish(FORKS.Process(target=full_disk.live, args=(str(storage), str(outside), moment))) == 0
    said = (outside / "said").read_text()
    assert said.startswith("Running the engine's storage is full: no room for") or "No space left" in said
    assert ending(outside) == undisturbed()
