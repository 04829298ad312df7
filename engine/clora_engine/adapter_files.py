"""Is this directory a LoRA adapter that fits the base model? Asked before vLLM sees it.

vLLM checks some of this itself, but late (in the middle of a batch), for every tenant at once, and it would read a
pickle. Only safetensors are read here, nothing is unpickled. Left out, because the trainer makes none: DoRA, biases,
`modules_to_save`, per-module ranks, LoRA on embeddings, on the output head or on fused experts.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from clora_engine.errors import UserError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
LARGEST_WEIGHT = 65504.0
"""Half precision's largest number: whatever the base model's dtype is, no weight may become infinite in it, not even
when it is scaled by alpha / rank. An infinity in one tenant's slot could turn another's row into NaN."""


class AdapterConfig(BaseModel):
    """The part of PEFT's adapter_config.json that decides what an adapter computes. Values other than these would
    change its meaning in a way that the sampler or the trainer does not follow."""

    model_config = ConfigDict(extra="ignore", strict=True)

    peft_type: Literal["LORA"]
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    use_dora: Literal[False] = False
    use_rslora: Literal[False] = False
    fan_in_fan_out: Literal[False] = False
    lora_bias: Literal[False] = False
    bias: Literal["none"] = "none"
    modules_to_save: None = None
    layers_to_transform: None = None
    trainable_token_indices: None = None
    alora_invocation_tokens: None = None
    rank_pattern: dict[str, int] | None = Field(default=None, max_length=0)
    alpha_pattern: dict[str, float] | None = Field(default=None, max_length=0)


@dataclass(frozen=True, slots=True)
class BaseShapes:
    """The linear layers of the base model that can carry LoRA.

    linear      module name in the Hugging Face model -> (input features, output features)
    vocabulary  number of token ids
    """

    linear: dict[str, tuple[int, int]]
    vocabulary: int

    @property
    def suffixes(self) -> tuple[str, ...]:
        return tuple(sorted({name.rpartition(".")[2] for name in self.linear}))

    @classmethod
    def of_model(cls, path: Path) -> BaseShapes:
        """Read from the model's config alone, without its weights. Raises UserError when there is none at `path`."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError) as error:
            raise UserError(f"no usable model at {path}: {error}", field="model") from error
        head = model.get_output_embeddings()
        linear = {
            name: (module.in_features, module.out_features)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        }
        return cls(linear, int(config.get_text_config().vocab_size))


def check_adapter(directory: Path, base: BaseShapes, max_rank: int) -> AdapterConfig:
    """Check a PEFT LoRA directory whole: files, config, names, shapes, and that every weight is finite.

    Raises UserError (reason InvalidAdapter) that names what is wrong.
    """
    _check_files(directory)
    config = _read_config(directory / CONFIG_FILE)
    if config.r > max_rank:
        raise _invalid(directory, f"rank {config.r} is above the engine's maximum of {max_rank}")
    try:
        _check_weights(directory, config, base)
    except (SafetensorError, OSError) as error:
        raise _invalid(directory, f"{WEIGHTS_FILE} is unreadable or truncated ({error})") from error
    return config


def _check_files(directory: Path) -> None:
    if directory.is_symlink() or not directory.is_dir():
        raise _invalid(directory, "not a directory")
    files = {entry.name: entry for entry in directory.iterdir()}
    for name, entry in files.items():
        if not stat.S_ISREG(entry.lstat().st_mode):
            raise _invalid(directory, f"{name} is not a plain file")
        if entry.suffix not in (".json", ".safetensors", ".md"):
            raise _invalid(directory, f"{name}: only safetensors are read, never pickles or other formats")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in files:
            raise _invalid(directory, f"{name} is missing")


def _read_config(path: Path) -> AdapterConfig:
    try:
        return AdapterConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise _invalid(path.parent, f"{CONFIG_FILE}: {where}: {first['msg']}") from error


def _check_weights(directory: Path, config: AdapterConfig, base: BaseShapes) -> None:
    rank, scale = config.r, max(1.0, config.lora_alpha / config.r)
    with safe_open(directory / WEIGHTS_FILE, framework="pt") as file:
        names = set(file.keys())
        if not names:
            raise _invalid(directory, f"{WEIGHTS_FILE} holds no tensors")
        for name in sorted(names):
            module, expected = _expected_shape(directory, name, rank, base)
            shape = tuple(file.get_slice(name).get_shape())
            if shape != expected:
                raise _invalid(directory, f"{name} has shape {shape}, the base model and rank {rank} need {expected}")
            for half in ("lora_A", "lora_B"):
                if f"{PREFIX}{module}.{half}.weight" not in names:
                    raise _invalid(directory, f"{module} has no {half}")
            tensor = file.get_tensor(name)
            if not tensor.is_floating_point() or not float(tensor.float().abs().max()) * scale <= LARGEST_WEIGHT:
                raise _invalid(directory, f"{name} holds a value that is not finite, or too large")


def _expected_shape(directory: Path, name: str, rank: int, base: BaseShapes) -> tuple[str, tuple[int, int]]:
    for half in ("lora_A", "lora_B"):
        suffix = f".{half}.weight"
        if name.startswith(PREFIX) and name.endswith(suffix):
            module = name[len(PREFIX) : -len(suffix)]
            if module not in base.linear:
                raise _invalid(directory, f"{name}: the base model has no linear layer {module} that can carry LoRA")
            inputs, outputs = base.linear[module]
            return module, (rank, inputs) if half == "lora_A" else (outputs, rank)
    raise _invalid(directory, f"{name} is not a LoRA weight in PEFT's naming")


def _invalid(directory: Path, problem: str) -> UserError:
    return UserError(f"adapter {directory.name}: {problem}", reason="InvalidAdapter")
