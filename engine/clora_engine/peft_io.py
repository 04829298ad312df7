"""Adapters on disk: a directory that PEFT and vLLM load, and beside it the optimizer state that only clora reads.

    adapter_config.json          what PEFT needs to rebuild the adapter
    adapter_model.safetensors    A (R x I) and B (O x R) of every module, FP32
    optimizer.safetensors        the same keys behind exp_avg. and exp_avg_sq. (and grad., if a gradient was pending),
                                 and step; per matrix and unpadded, so that it does not depend on the flat layout

Reading trusts nothing: only JSON and safetensors, names and shapes compared with what the base model demands before
a tensor is read, values checked to be finite. Features of PEFT that this trainer does not compute are refused by name,
those of a later PEFT too.

Left out: atomic replacement of a directory. The journal writes a new directory for every step and commits it by a
rename of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from clora_engine.errors import CheckpointError, UserError
from clora_engine.lora import ModuleShape, target_names
from clora_engine.store import EXP_AVG, EXP_AVG_SQ, GRAD, MASTER, AdapterState
from clora_engine.types import LoraConfig

CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MAX_CONFIG_BYTES = 1 << 20
READABLE_DTYPES = ("F32", "F16", "BF16")
STEP = "step"

# Fields of adapter_config.json that do not change what a trained adapter computes, whatever their value.
_INERT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "lora_alpha", "lora_dropout", "loftq_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
# Initialisations that only choose the start; others (PiSSA, OLoRA, CorDA, LoftQ) change the base model too.
_PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def _keys(state: AdapterState, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
    """PEFT's key and the view of `vector` (true rank, unpadded) for every matrix."""
    for name, (a, b) in state.layout.matrices(vector, state.config.rank).items():
        yield f"base_model.model.{name}.lora_A.weight", a
        yield f"base_model.model.{name}.lora_B.weight", b


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
    _save(directory / ADAPTER_FILE, tensors)
    if optimizer:
        moments = [EXP_AVG, EXP_AVG_SQ] if state.grad_is_zero else [EXP_AVG, EXP_AVG_SQ, GRAD]
        tensors = {f"{v}.{key}": matrix for v in moments for key, matrix in _keys(state, state.vectors[v])}
        _save(directory / OPTIMIZER_FILE, tensors | {STEP: torch.tensor(state.step)})
    config = json.dumps(_config(state, model_name, available), indent=2, sort_keys=True)
    (directory / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
    _fsync(directory / CONFIG_FILE)
    _fsync(directory)


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata={"format": "pt"})
    _fsync(path)


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
    """The LoraConfig of a PEFT directory (seed 0: PEFT keeps none). lora_dropout is dropped: it plays no part in what
    an adapter computes, and this trainer uses none.

    Raises CheckpointError when the file is missing or not PEFT's, UserError when it asks for a feature that is refused.
    """
    path = directory / CONFIG_FILE
    content = _read_json(path)
    if content.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {content.get('peft_type')!r}; only LORA is taken", field="initFrom")
    if content.get("bias", "none") != "none":
        raise UserError(f"{path}: bias is {content['bias']!r}; only none is taken", field="initFrom")
    initialisation = content.get("init_lora_weights", True)
    if initialisation not in _PLAIN_INITIALISATIONS:
        raise UserError(
            f"{path}: init_lora_weights {initialisation!r} changes the base model; convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion first",
            field="initFrom",
        )
    for name, value in sorted(content.items()):
        if name not in _INERT and name != "bias" and value:
            raise UserError(f"{path}: {name} is set, which is not supported here; train without it", field="initFrom")
    return _lora_config(path, content)


def _lora_config(path: Path, content: dict[str, Any]) -> LoraConfig:
    rank, alpha, targets = content.get("r"), content.get("lora_alpha"), content.get("target_modules")
    if not (isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1):
        raise CheckpointError(f"{path}: r is {rank!r}; it must be an integer of at least 1")
    if isinstance(alpha, float) and alpha.is_integer():
        alpha = int(alpha)
    if not (isinstance(alpha, int) and not isinstance(alpha, bool) and alpha >= 1):
        raise UserError(f"{path}: lora_alpha is {alpha!r}; it must be an integer of at least 1", field="initFrom")
    if isinstance(targets, list) and targets and all(isinstance(target, str) for target in targets):
        return LoraConfig(rank=rank, alpha=alpha, target_modules=tuple(targets))
    if isinstance(targets, str) and targets:
        return LoraConfig(rank=rank, alpha=alpha, target_modules=targets)
    raise CheckpointError(f"{path}: target_modules is {targets!r}; it must be a list of names or one pattern")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes: not a PEFT configuration")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def read_adapter(directory: Path, state: AdapterState) -> None:
    """Fills the master vector of a fresh `state` (zeros), whose layout and rank are those of the directory's config.

    Raises CheckpointError that names the file, and the tensor where one is wrong.
    """
    _read_tensors(directory / ADAPTER_FILE, dict(_keys(state, state.vectors[MASTER])))


def read_optimizer(directory: Path, state: AdapterState) -> None:
    """Fills the moments and step of a fresh state, and the gradient if one was pending when it was saved.

    Raises CheckpointError as `read_adapter`.
    """
    path = directory / OPTIMIZER_FILE
    with _open(path) as file:
        pending = any(key.startswith(f"{GRAD}.") for key in file.keys())  # noqa: SIM118 (not a dict)
    vectors = [EXP_AVG, EXP_AVG_SQ, GRAD] if pending else [EXP_AVG, EXP_AVG_SQ]
    wanted = {f"{v}.{key}": matrix for v in vectors for key, matrix in _keys(state, state.vectors[v])}
    step = torch.zeros((), dtype=torch.int64)
    _read_tensors(path, wanted | {STEP: step})
    if int(step) < 0:
        raise CheckpointError(f"{path}: tensor {STEP} is negative")
    state.step = int(step)
    state.grad_is_zero = not pending


def _read_tensors(path: Path, wanted: dict[str, Tensor]) -> None:
    """Copies each tensor of the file into its place in `wanted`; names and shapes must be exactly these."""
    with _open(path) as file:
        names = set(file.keys())
        for key in sorted(wanted.keys() - names):
            raise CheckpointError(f"{path}: tensor {key} is missing")
        for key in sorted(names - wanted.keys()):
            raise CheckpointError(f"{path}: tensor {key} belongs to no target module of this base model")
        for key, place in wanted.items():
            header = file.get_slice(key)
            shape, dtype = tuple(header.get_shape()), header.get_dtype()
            if shape != tuple(place.shape):
                raise CheckpointError(f"{path}: tensor {key} has shape {shape}; {tuple(place.shape)} is needed")
            if dtype not in (READABLE_DTYPES if place.is_floating_point() else ("I64",)):
                raise CheckpointError(f"{path}: tensor {key} has dtype {dtype}")
            tensor = file.get_tensor(key)
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"{path}: tensor {key} is not finite")
            place.copy_(tensor)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
