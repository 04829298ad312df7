"""A run of Weights & Biases: on a server, or in folders that `wandb sync` sends later.

The run's id is the experiment's uid, so that every process goes on with the same run. What it has already is asked of
the server, or read from its own files: what a killed process had not written yet comes again, and nothing twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clora_engine.tracker import wandb_file
from clora_engine.tracker.protocol import Start


class WandbSink:
    """See sink.Sink.

    Args:
        workspace: a folder for what the library wants to keep besides the run.
        proxy: URL of the proxy; None offline.
    """

    def __init__(self, start: Start, workspace: Path, proxy: str | None) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # to its makers; read when it is imported
        import wandb

        folder = Path(start.folder) / "tracking"
        self.last = None if start.online else max(_recorded(folder / "wandb"), default=None)
        settings = _settings(start, workspace, proxy)
        _in_a_second_of_its_own(folder / "wandb")
        self._run: Any = wandb.init(
            project=start.project,
            entity=start.entity,
            name=start.run_name,
            id=start.uid,
            resume="allow",
            config={"clora": start.config},
            dir=str(workspace if start.online else folder),
            settings=wandb.Settings(**settings),
        )
        if start.online and self._run.resumed:
            self.last = self._run.starting_step - 1

    def add(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "_timestamp": seconds}, step=step, commit=True)
        self.last = step

    def end(self, succeeded: bool | None) -> None:
        self._run.finish(exit_code=1 if succeeded is False else 0)


def _in_a_second_of_its_own(folder: Path) -> None:
    """Folders of offline runs are named by the second: a run that goes on at once would write into that of before."""
    while any(folder.glob(f"offline-run-{time.strftime('%Y%m%d_%H%M%S')}-*")):
        time.sleep(0.05)


def _recorded(folder: Path) -> Iterator[int]:
    """Steps in the files of a folder's offline runs."""
    for path in folder.glob("offline-run-*/*.wandb"):
        yield from (step for step, _ in wandb_file.history(path))


def _settings(start: Start, workspace: Path, proxy: str | None) -> dict[str, Any]:
    """Nothing of the engine's machine, code or packages is recorded: they are no business of the tenant's. No file is
    uploaded: they go to other hosts (the server's storage), and hold nothing that the server does not get anyway."""
    return {
        "mode": "online" if start.online else "offline",
        "api_key": start.key,
        **({"base_url": start.url, "http_proxy": proxy, "https_proxy": proxy} if start.online else {}),
        "console": "off",
        "silent": True,
        "disable_git": True,
        "disable_code": True,
        "disable_job_creation": True,
        "x_disable_stats": True,
        "x_disable_meta": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "ignore_globs": ("*",),
    }
