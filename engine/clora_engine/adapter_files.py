"""Is this directory a LoRA adapter that fits the base model? Asked before vLLM sees it.

vLLM checks some of this itself, but late (in the middle of a batch), for every tenant at once, and it would read a
pickle. What may be in the files is said in peft_files.py. Left out, because the trainer makes none: LoRA on embeddings,
on the output head or on fused experts.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

import torch

from clora_engine.errors import UserError
from clora_engine.peft_files import (
    CONFIG_FILE,
    HALVES,
    PREFIX,
    WEIGHTS_FILE,
    AdapterFault,
    check_header,
    largest_magnitude,
    open_tensors,
    read_config,
    read_tensor,
    weight_key,
)
from clora_engine.types import LoraConfig

LARGEST_WEIGHT = 65504.0
"""Half precision's largest number: whatever the base model's dtype is, no weight may become infinite in it, not even
when it is scaled by alpha / rank. An infinity in one tenant's slot could turn another's row into NaN."""


@dataclass(frozen=True, slots=True)
class BaseShapes:
    """The linear layers of the base model that can carry LoRA.

    linear      module name in the Hugging Face model -> (input features, output features)
    vocabulary  number of token ids
    parameters  scalars of the whole model
    ends        those of them that are in no decoder layer: embeddings and output head
    """

    linear: dict[str, tuple[int, int]]
    vocabulary: int
    parameters: int
    ends: int = 0

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
        parameters = sum(parameter.numel() for parameter in model.parameters())
        tables = {id(table.weight): table.weight.numel() for table in (model.get_input_embeddings(), head)}
        return cls(linear, int(config.get_text_config().vocab_size), parameters, sum(tables.values()))


def check_adapter(directory: Path, base: BaseShapes, max_rank: int) -> LoraConfig:
    """Check a PEFT LoRA directory whole: files, config, names, shapes, and that every weight is finite.

    Raises UserError (reason InvalidAdapter) that names what is wrong.
    """
    try:
        _check_files(directory)
        config = read_config(directory)
        if config.rank > max_rank:
            raise AdapterFault(f"{CONFIG_FILE}: rank {config.rank} is above the engine's maximum of {max_rank}")
        _check_weights(directory / WEIGHTS_FILE, config, base)
    except AdapterFault as fault:
        raise UserError(f"adapter {directory.name}: {fault}", reason="InvalidAdapter") from fault
    return config


def _check_files(directory: Path) -> None:
    if directory.is_symlink() or not directory.is_dir():
        raise AdapterFault("not a directory")
    for entry in directory.iterdir():
        if not stat.S_ISREG(entry.lstat().st_mode):
            raise AdapterFault(f"{entry.name} is not a plain file")
        if entry.suffix not in (".json", ".safetensors", ".md"):
            raise AdapterFault(f"{entry.name}: only safetensors are read, never pickles or other formats")


def _check_weights(path: Path, config: LoraConfig, base: BaseShapes) -> None:
    scale = max(1.0, config.alpha / config.rank)
    with open_tensors(path) as file:
        names = set(file.keys())
        if not names:
            raise AdapterFault(f"{path.name} holds no tensors")
        shapes, dtypes = {}, set()
        for name in sorted(names):
            module, shapes[name] = _expected_shape(path, name, config.rank, base)
            for half in HALVES:
                if weight_key(module, half) not in names:
                    raise AdapterFault(f"{path.name}: tensor {weight_key(module, half)} is missing")
            dtypes.add(check_header(file, path, name, shapes[name]))
        if len(dtypes) == 1 and largest_magnitude(path, dtypes.pop()) * scale <= LARGEST_WEIGHT:
            return
        for name, shape in shapes.items():
            if float(read_tensor(file, path, name, shape).abs().max()) * scale > LARGEST_WEIGHT:
                raise AdapterFault(f"{path.name}: tensor {name} holds a value that is too large")


def _expected_shape(path: Path, name: str, rank: int, base: BaseShapes) -> tuple[str, tuple[int, int]]:
    for half in HALVES:
        module = name.removeprefix(PREFIX).removesuffix(f".{half}.weight")
        if name == weight_key(module, half):
            if module not in base.linear:
                raise AdapterFault(f"{path.name}: tensor {name} belongs to no linear layer of this base model")
            inputs, outputs = base.linear[module]
            return module, (rank, inputs) if half == "lora_A" else (outputs, rank)
    raise AdapterFault(f"{path.name}: tensor {name} is not a LoRA weight in PEFT's naming")
