"""A tiny random model, adapters for it, and Hugging Face with PEFT as the judge of what both should answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clora_engine.adapter_files import BaseShapes
from clora_engine.peft_files import CONFIG_FILE, WEIGHTS_FILE
from clora_engine.sampler import Sampler, SamplerConfig
from clora_engine.types import SamplingParams, Version
from tests.torch_threads import torch_threads

VOCABULARY = 512
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=())


def make_model(directory: Path) -> Path:
    """A random Qwen3 in float32, without a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, initializer_range=0.1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(directory)
    return directory


base_shapes = lru_cache(BaseShapes.of_model)


def write_adapter(
    directory: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 8,
    alpha: int | None = None,
    modules: Sequence[str] = (),
    strength: float = 0.5,
) -> Path:
    """A random PEFT adapter, by default on all linear layers and with an alpha of twice the rank."""
    base = base_shapes(model)
    suffixes = list(modules) or list(base.suffixes)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (inputs, outputs) in base.linear.items():
        if name.rpartition(".")[2] in suffixes:
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * strength / rank**0.5
    directory.mkdir(parents=True)
    save_file(tensors, directory / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha or 2 * rank, "bias": "none"}
    (directory / CONFIG_FILE).write_text(json.dumps(config | {"target_modules": suffixes}))
    return directory


class Judge:
    """Hugging Face and PEFT. Sequences are padded on the right, which a causal model does not see."""

    def __init__(self, model: Path) -> None:
        self._path = model
        self._loaded: dict[Path | None, Any] = {}

    def _load(self, adapter: Path | None) -> Any:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        if adapter not in self._loaded:
            model = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32).eval()
            self._loaded[adapter] = model if adapter is None else PeftModel.from_pretrained(model, adapter).eval()
        return self._loaded[adapter]

    @torch.no_grad()
    def logits(self, adapter: Path | None, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Of every position of every sequence; float32 [length, vocabulary] each."""
        ids = pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)
        with torch_threads(1):
            rows: Tensor = self._load(adapter)(ids).logits
        return [row[: len(sequence)] for row, sequence in zip(rows, sequences, strict=True)]

    def greedy(self, adapter: Path | None, prompts: Sequence[list[int]], tokens: int) -> list[tuple[int, ...]]:
        sequences = [list(prompt) for prompt in prompts]
        for _ in range(tokens):
            for ids, row in zip(sequences, self.logits(adapter, sequences), strict=True):
                ids.append(int(row[-1].argmax()))
        return [tuple(ids[len(prompt) :]) for ids, prompt in zip(sequences, prompts, strict=True)]

    def logprobs(self, adapter: Path | None, prompt: list[int], ids: Sequence[int], temperature: float) -> Tensor:
        """Of each of `ids` after `prompt`, at the temperature; float32 [T]."""
        (logits,) = self.logits(adapter, [[*prompt, *ids]])
        return of_tokens(logits[len(prompt) - 1 : -1], ids, temperature)


def of_tokens(logits_TV: Tensor, ids: Sequence[int], temperature: float) -> Tensor:
    """The log-prob of each of `ids` under its row of logits; float32 [T]."""
    return torch.log_softmax(logits_TV / temperature, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def prompt(seed: int, length: int = 20) -> list[int]:
    ids: list[int] = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def sampler_config(model: Path, root: Path, **changes: Any) -> SamplerConfig:
    settings: dict[str, Any] = {
        "model": model, "versions_root": root, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 32,
        "max_lora_rank": 8, "slots": 3, "kv_cache_bytes": 1 << 26, "threads": 1, "backoff_seconds": 0.05,
    }  # fmt: skip
    return SamplerConfig(**(settings | changes))


@asynccontextmanager
async def running_sampler(config: SamplerConfig) -> AsyncIterator[Sampler]:
    async with Sampler(config) as sampler:
        yield sampler


async def publish(sampler: Sampler, version: Version, **adapter: Any) -> Path:
    directory = write_adapter(sampler.new_directory(), sampler.config.model, **adapter)
    await sampler.publish(version, directory)
    return directory


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for what no event announces (vLLM's own counters, processes), with a deadline."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def core_processes(parent: int | None = None) -> list[psutil.Process]:
    """vLLM's processes below this one, or below `parent`."""
    found = []
    for process in psutil.Process(parent or os.getpid()).children(recursive=True):
        try:
            if any(word in " ".join(process.cmdline()) for word in ("EngineCore", "Worker")):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_core(by: signal.Signals = signal.SIGKILL) -> None:
    for process in core_processes():
        process.send_signal(by)
