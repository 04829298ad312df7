"""A LoRA adapter's files as PEFT writes them, read without trust: the rules that sampler and trainer share.

Only JSON and safetensors are read, nothing is unpickled. Features of PEFT that change what an adapter computes in a way
that clora does not follow are refused by name, those of a later PEFT too. Names and shapes are compared before a tensor
is read, and values must be finite.

Left out: which tensors an adapter must have. The sampler asks the base model (adapter_files.py), the trainer the
adapter's layout (peft_io.py). Both turn an AdapterFault into the error of whoever has to act.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clora_engine.types import LoraConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
PREFIX, HALVES = "base_model.model.", ("lora_A", "lora_B")
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READABLE_DTYPES = tuple(_TORCH_DTYPES)

# Fields of adapter_config.json that do not change what a trained adapter computes, whatever their value.
_INERT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "lora_alpha", "lora_dropout", "loftq_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
# Initialisations that only choose the start; others (PiSSA, OLoRA, CorDA, LoftQ) change the base model too.
_PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


class AdapterFault(Exception):
    """One sentence on what is wrong, which begins with the file's name. damaged: the file is torn or no adapter's;
    otherwise it is one that clora does not take."""

    def __init__(self, sentence: str, *, damaged: bool = True) -> None:
        super().__init__(sentence)
        self.damaged = damaged


def weight_key(module: str, half: str) -> str:
    """PEFT's name of a module's A or B matrix."""
    return f"{PREFIX}{module}.{half}.weight"


# --------------------------------------------------------------------------------------------- configuration


def read_config(directory: Path) -> LoraConfig:
    """The LoraConfig of a PEFT directory (seed 0: PEFT keeps none). lora_dropout is dropped: it plays no part in what
    an adapter computes, and clora trains without. Raises AdapterFault."""
    content = _read_json(directory / CONFIG_FILE)
    if content.get("peft_type") != "LORA":
        raise _refused(f"peft_type is {content.get('peft_type')!r}; only LORA is taken")
    if content.get("bias", "none") != "none":
        raise _refused(f"bias is {content['bias']!r}; only none is taken")
    initialisation = content.get("init_lora_weights", True)
    if initialisation not in _PLAIN_INITIALISATIONS:
        raise _refused(
            f"init_lora_weights {initialisation!r} changes the base model; convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion first"
        )
    for name, value in sorted(content.items()):
        if name not in _INERT and name != "bias" and value:
            raise _refused(f"{name} is set, which is not supported here; train without it")
    return _lora_config(content)


def _lora_config(content: dict[str, Any]) -> LoraConfig:
    rank, alpha, targets = content.get("r"), content.get("lora_alpha"), content.get("target_modules")
    if not (isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1):
        raise AdapterFault(f"{CONFIG_FILE}: r is {rank!r}; it must be an integer of at least 1")
    if isinstance(alpha, float) and alpha.is_integer():
        alpha = int(alpha)
    if not (isinstance(alpha, int) and not isinstance(alpha, bool) and alpha >= 1):
        raise _refused(f"lora_alpha is {alpha!r}; it must be an integer of at least 1")
    if isinstance(targets, list) and targets and all(isinstance(target, str) for target in targets):
        return LoraConfig(rank=rank, alpha=alpha, target_modules=tuple(targets))
    if isinstance(targets, str) and targets:
        return LoraConfig(rank=rank, alpha=alpha, target_modules=targets)
    raise AdapterFault(f"{CONFIG_FILE}: target_modules is {targets!r}; it must be a list of names or one pattern")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with _open_regular(path) as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise AdapterFault(f"{path.name} is larger than {MAX_CONFIG_BYTES} bytes: not a PEFT configuration")
        content = json.loads(data)
    except OSError as error:
        raise AdapterFault(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterFault(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise AdapterFault(f"{path.name} is not a JSON object")
    return content


def _open_regular(path: Path) -> BinaryIO:
    """A plain file, and not what a link leads to: the directory may be a tenant's to write to, and a link could lead to
    another's adapter, a pipe to waiting for ever. Raises AdapterFault."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except FileNotFoundError as error:
        raise AdapterFault(f"{path.name} is missing") from error
    except OSError as error:
        what = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise AdapterFault(f"{path.name} {what}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise AdapterFault(f"{path.name} is not a file")
    return file


def _refused(problem: str) -> AdapterFault:
    return AdapterFault(f"{CONFIG_FILE}: {problem}", damaged=False)


# --------------------------------------------------------------------------------------------- tensors


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file, open for as long as the context. Raises AdapterFault when it is missing or torn, also for
    what comes to light only within the context."""
    try:
        with _open_regular(path) as opened, safe_open(f"/proc/self/fd/{opened.fileno()}", framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise AdapterFault(f"{path.name} is not a readable safetensors file, or truncated: {error}") from error


def check_header(
    file: Any, path: Path, key: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = READABLE_DTYPES
) -> str:
    """The dtype of one tensor of a file that is open, in safetensors' names. Raises AdapterFault unless it is one of
    these, and the shape is this one."""
    header = file.get_slice(key)
    found, dtype = tuple(header.get_shape()), str(header.get_dtype())
    if found != shape:
        raise AdapterFault(f"{path.name}: tensor {key} has shape {found}; {shape} is needed")
    if dtype not in dtypes:
        raise AdapterFault(f"{path.name}: tensor {key} has dtype {dtype}")
    return dtype


def read_tensor(
    file: Any, path: Path, key: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = READABLE_DTYPES
) -> Tensor:
    """One tensor of a file that is open. Raises AdapterFault as `check_header`, and unless all its values are
    finite."""
    check_header(file, path, key, shape, dtypes)
    tensor: Tensor = file.get_tensor(key)
    # a sum is finite only if all of it is, and takes a tenth of the time; one of finite values may yet overflow
    if not isfinite(float(tensor.sum())) and not torch.isfinite(tensor).all():
        raise AdapterFault(f"{path.name}: tensor {key} is not finite")
    return tensor


def largest_magnitude(path: Path, dtype: str) -> float:
    """Of all values of a file whose tensors are all of this dtype; NaN when one is NaN. One pass over the file takes a
    fraction of the time of reading hundreds of small tensors; safetensors has seen to it that they fill all that is
    behind the header. Raises AdapterFault when the file cannot be opened."""
    with _open_regular(path) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        data = np.memmap(file, dtype=np.uint8, mode="c", offset=start)
    low, high = torch.frombuffer(data, dtype=_TORCH_DTYPES[dtype]).aminmax()
    return float(torch.maximum(-low, high))
