"""Adapters on disk: a directory that PEFT and vLLM load, and beside it the optimizer state that only clora reads.

    adapter_config.json          what PEFT needs to rebuild the adapter
    adapter_model.safetensors    A (R x I) and B (O x R) of every module, FP32
    optimizer.safetensors        the same keys behind exp_avg. and exp_avg_sq. (and grad., if a gradient was pending),
                                 and step; per matrix and unpadded, so that it does not depend on the flat layout

Reading trusts nothing (peft_files.py); names and shapes must be exactly those of the adapter's layout.

Left out: atomic replacement of a directory. The journal writes a new directory for every step and commits it by a
rename of its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from clora_engine import peft_files
from clora_engine.adapter_state import EXP_AVG, EXP_AVG_SQ, GRAD, MASTER, AdapterState
from clora_engine.errors import CheckpointError, UserError
from clora_engine.lora import ModuleShape, target_names
from clora_engine.peft_files import (
    CONFIG_FILE,
    READABLE_DTYPES,
    WEIGHTS_FILE,
    AdapterFault,
    open_tensors,
    read_tensor,
    weight_key,
)
from clora_engine.types import LoraConfig

OPTIMIZER_FILE = "optimizer.safetensors"
STEP = "step"


def _keys(state: AdapterState, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
    """PEFT's key and the view of `vector` (true rank, unpadded) for every matrix."""
    for name, (a, b) in state.layout.matrices(vector, state.config.rank).items():
        yield weight_key(name, "lora_A"), a
        yield weight_key(name, "lora_B"), b


# --------------------------------------------------------------------------------------------- writing


def write(
    directory: Path, state: AdapterState, *, model_name: str, available: tuple[ModuleShape, ...], optimizer: bool
) -> None:
    """Writes a host state that is current (see AdapterStore.sync). Makes `directory` if it is absent (not its parents);
    every file and the directory itself are fsynced. An OSError passes through.

    available: every Linear of the base model. The targets are written as names, not as they were configured: PEFT fails
    on a pattern that also matches modules which are no Linear, and vLLM wants a list.
    """
    directory.mkdir(exist_ok=True)
    tensors = dict(_keys(state, state.vectors[MASTER]))
    _save(directory / WEIGHTS_FILE, tensors)
    if optimizer:
        moments = [EXP_AVG, EXP_AVG_SQ] if state.grad_is_zero else [EXP_AVG, EXP_AVG_SQ, GRAD]
        tensors = {f"{v}.{key}": matrix for v in moments for key, matrix in _keys(state, state.vectors[v])}
        _save(directory / OPTIMIZER_FILE, tensors | {STEP: torch.tensor(state.step)})
    config = json.dumps(_config(state, model_name, available), indent=2, sort_keys=True)
    (directory / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
    _fsync(directory / CONFIG_FILE)
    _fsync(directory)


def write_version(directory: Path, state: AdapterState, *, model_name: str, available: tuple[ModuleShape, ...]) -> None:
    """Writes what the sampler serves: as `write`, but with alpha / rank multiplied into B, and alpha equal to rank:
    vLLM would do so when it loads the adapter, while all tenants wait. Nothing is fsynced: no version
    outlives its engine."""
    directory.mkdir(exist_ok=True)
    alpha, rank = state.config.alpha, state.config.rank
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in state.layout.matrices(state.vectors[MASTER], rank).items():
        tensors |= {weight_key(name, "lora_A"): a, weight_key(name, "lora_B"): b * (alpha / rank)}
    _write_tensors(directory / WEIGHTS_FILE, tensors)
    config = _config(state, model_name, available) | {"lora_alpha": rank}
    (directory / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    _write_tensors(path, tensors)
    _fsync(path)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if found := re.search(r"os error (\d+)", str(error)):  # it has the number in its text alone
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _config(state: AdapterState, model_name: str, available: tuple[ModuleShape, ...]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_name,
        "r": state.config.rank,
        "lora_alpha": state.config.alpha,
        "target_modules": target_names(state.layout.modules, available),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


# --------------------------------------------------------------------------------------------- reading


def read_config(directory: Path) -> LoraConfig:
    """As peft_files.read_config. Raises CheckpointError when the file is missing or not PEFT's, UserError when it asks
    for a feature that is refused."""
    with _faults_of(directory):
        return peft_files.read_config(directory)


def read_adapter(directory: Path, state: AdapterState) -> None:
    """Fills the master vector of a fresh `state` (zeros), whose layout and rank are those of the directory's config.

    Raises CheckpointError that names the file, and the tensor where one is wrong.
    """
    with _faults_of(directory):
        _read_tensors(directory / WEIGHTS_FILE, dict(_keys(state, state.vectors[MASTER])))


def read_optimizer(directory: Path, state: AdapterState) -> None:
    """Fills the moments and step of a fresh state, and the gradient if one was pending when it was saved.

    Raises CheckpointError as `read_adapter`.
    """
    path = directory / OPTIMIZER_FILE
    with _faults_of(directory):
        with open_tensors(path) as file:
            pending = any(key.startswith(f"{GRAD}.") for key in file.keys())  # noqa: SIM118 (not a dict)
        vectors = [EXP_AVG, EXP_AVG_SQ, GRAD] if pending else [EXP_AVG, EXP_AVG_SQ]
        wanted = {f"{v}.{key}": matrix for v in vectors for key, matrix in _keys(state, state.vectors[v])}
        step = torch.zeros((), dtype=torch.int64)
        _read_tensors(path, wanted | {STEP: step})
        if int(step) < 0:
            raise AdapterFault(f"{path.name}: tensor {STEP} is negative")
    state.step = int(step)
    state.grad_is_zero = not pending


def _read_tensors(path: Path, wanted: dict[str, Tensor]) -> None:
    """Copies each tensor of the file into its place in `wanted`; names and shapes must be exactly these."""
    with open_tensors(path) as file:
        names = set(file.keys())
        for key in sorted(wanted.keys() - names):
            raise AdapterFault(f"{path.name}: tensor {key} is missing")
        for key in sorted(names - wanted.keys()):
            raise AdapterFault(f"{path.name}: tensor {key} belongs to no target module of this base model")
        for key, place in wanted.items():
            dtypes = READABLE_DTYPES if place.is_floating_point() else ("I64",)
            place.copy_(read_tensor(file, path, key, tuple(place.shape), dtypes))


@contextmanager
def _faults_of(directory: Path) -> Iterator[None]:
    try:
        yield
    except AdapterFault as fault:
        if fault.damaged:
            raise CheckpointError(f"{directory}/{fault}") from fault
        raise UserError(f"{directory}/{fault}", field="initFrom") from fault
