"""A process of the durability tests: the real loop, killed where it is told to, or on a storage that fills up.

It is started from a server that has imported everything once (`forkserver`), so that a life takes a second.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from clora_engine import journal
from clora_engine.journal import Journal
from clora_engine.rollout import Rollouts
from tests.unit.engine.loop import Life, LocalTrainer, WrittenSampler, desired

# point -> (class or module, name, before or after it, on which call)
POINTS: dict[str, tuple[Any, str, str, int]] = {
    "the adapter is made": (LocalTrainer, "create", "after", 1),
    "the first version is exported": (LocalTrainer, "export", "after", 1),
    "step 0 is saved": (LocalTrainer, "save", "after", 1),
    "step 0 is committed": (Journal, "commit", "after", 1),
    "a group is played": (Rollouts, "_group", "after", 8),
    "some groups are logged": (Journal, "append_group", "after", 5),
    "all groups are logged": (Journal, "append_group", "after", 6),
    "the gradient is there": (LocalTrainer, "forward_backward", "after", 2),
    "an optimizer step of several is made": (LocalTrainer, "optim_step", "after", 3),
    "all optimizer steps are made": (LocalTrainer, "optim_step", "after", 4),
    "the version is exported": (LocalTrainer, "export", "after", 3),
    "the version is published": (WrittenSampler, "publish", "after", 3),
    "the metrics are written": (Journal, "append_metrics", "after", 3),
    "the step's folder is ready": (Journal, "step_folder", "after", 3),
    "the step is saved": (LocalTrainer, "save", "after", 3),
    "the manifest is about to be renamed": (journal, "write_atomic", "manifest", 3),
    "the step is committed": (Journal, "commit", "after", 3),
    "a manifest is removed": (shutil, "rmtree", "prune", 1),
    "old steps are removed": (Journal, "prune", "after", 3),
    "the result is written": (Journal, "write_json", "after", 1),
}

SPEC: dict[str, Any] = {
    "maxSteps": 4,
    "algorithm": {"epochsPerBatch": 2, "klCoefficient": "0.05"},
    "evaluation": {"examples": 4, "everySteps": 1},
    "checkpoint": {"keep": 1},
}


def live(storage: str, epoch: int, point: str | None, changes: dict[str, Any]) -> None:
    """One life, to the experiment's end or the point's. Exits with 0 when the experiment has succeeded."""
    life = Life(Path(storage), desired(**SPEC | changes), epoch)
    if point is not None:
        _arm(*POINTS[point])
    experiment = asyncio.run(life.run())
    if experiment.phase.value != "Succeeded":
        raise SystemExit(f"{experiment.phase}: {experiment.report(0).message}")


def _arm(owner: Any, name: str, when: str, call: int) -> None:
    """Kills this process, as by SIGKILL, at the given call."""
    original = getattr(owner, name)
    calls = 0

    def due(*args: Any) -> bool:
        nonlocal calls
        if when == "manifest" and args[0].name != "manifest.json":
            return False
        if when == "prune" and not (args[0].name.isdecimal() and args[0].exists()):
            return False
        calls += 1
        return calls == call

    if asyncio.iscoroutinefunction(original):

        async def wrapped(*args: Any, **options: Any) -> Any:
            done = await original(*args, **options)
            if due():
                _kill()
            return done

    else:

        def wrapped(*args: Any, **options: Any) -> Any:  # type: ignore[misc]
            if when in ("manifest", "prune") and due(*args):
                _kill()
            done = original(*args, **options)
            if when == "after" and due():
                _kill()
            return done

    setattr(owner, name, wrapped)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
