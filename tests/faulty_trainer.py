"""Errors put into a real trainer's processes: what a sitecustomize.py on their path calls.

An adapter's name says what its passes raise, and on which rank: "AcceleratorError@1", say. All others are computed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

DEVICE = "AcceleratorError"
BUG = "RuntimeError"
MEMORY = "OutOfMemoryError"
TEXTS = {
    DEVICE: "CUDA error: device-side assert triggered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    BUG: "shape '[3]' is invalid for input of size 4",
    MEMORY: "CUDA out of memory. Tried to allocate 2.00 GiB.",
}


def put_into_trainers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers that are started from now on raise by their adapters' names."""
    root = Path(__file__).parents[1]
    (folder / "sitecustomize.py").write_text("from tests.faulty_trainer import install\n\ninstall()\n")
    packages = [root / "crds", root / "engine", root]
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, [folder, *packages])))


def install() -> None:
    """In a process that is none of a trainer's, nothing."""
    if "clora_engine.trainer_process" not in sys.orig_argv:
        return
    import torch

    from clora_engine import trainer, trainer_pass

    kinds: dict[str, type[Exception]] = {
        DEVICE: torch.AcceleratorError,
        BUG: RuntimeError,
        MEMORY: torch.OutOfMemoryError,
    }
    rank = sys.orig_argv[sys.orig_argv.index("--rank") + 1] if "--rank" in sys.orig_argv else "0"
    accumulate = trainer_pass.accumulate

    def failing(base: Any, batches: Any, requests: Sequence[Any]) -> Any:
        for request in requests:
            kind, _, where = request.adapter.partition("@")
            if where == rank and kind in kinds:
                raise kinds[kind](TEXTS[kind])
        return accumulate(base, batches, requests)

    vars(trainer)["accumulate"] = failing
