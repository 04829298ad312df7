"""The real loop of an experiment, with the real trainer over a tiny model and a sampler whose answers are written down.

What is sampled depends on the history alone, not on the weights: two runs, whatever happened to one of them, train on
the same tokens, and have to end with the same bits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from clora_api.control import DesiredExperiment
from clora_engine.config import EngineConfig
from clora_engine.experiment import Experiment
from clora_engine.trainer import Trainer
from clora_engine.trainer_base import BaseModel
from clora_engine.training import Services
from clora_engine.types import (
    AdamParams,
    AdapterInfo,
    ForwardBackwardResult,
    LoraConfig,
    Loss,
    OptimResult,
    Row,
    Sample,
    SamplingParams,
    Version,
)
from tests.engine_fixtures import rl_spec
from tests.unit.engine.chat_fixtures import CHATML, tiny_tokenizer

UID = "0b6f2f6e-5d0c-4c58-9a36-3f0a51c1a001"
END = "<|im_end|>"
TURNS = ('{"calculator": "100-7*4"}', '{"final_answer": 72}', '{"final_answer": 5}')
ROWS = "\n".join(json.dumps({"question": f"How many, {i}?", "answer": "72"}) for i in range(40))


@cache
def tokenizer() -> Any:
    return tiny_tokenizer(CHATML)


@cache
def base() -> BaseModel:
    config = Qwen3Config(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.15,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return BaseModel.wrap(Qwen3ForCausalLM(config).eval())


class LocalTrainer:
    """The real trainer in this process, with the client's methods."""

    def __init__(self) -> None:
        self._trainer = Trainer(
            base(), model_name="tiny", max_rank=8, tokens_per_microbatch=2048, host_limit_bytes=1 << 28
        )
        self.calls: list[str] = []
        self.before_update: Callable[[], Awaitable[None]] | None = None
        torch.set_num_threads(1)

    async def create(self, adapter: str, config: LoraConfig) -> AdapterInfo:
        return self._trainer.create(adapter, config)

    async def load(
        self,
        adapter: str,
        directory: Path,
        *,
        optimizer: bool,
        config: LoraConfig | None = None,
        frozen: bool = False,
    ) -> AdapterInfo:
        return self._trainer.load(adapter, directory, optimizer=optimizer, config=config, frozen=frozen)

    async def forward(self, adapter: str, rows: list[Row], *, temperature: float = 1.0) -> list[list[list[float]]]:
        self.calls.append(f"forward {adapter.removeprefix(UID) or 'itself'}")
        return self._trainer.forward(adapter, rows, temperature=temperature)

    async def forward_backward(self, adapter: str, rows: list[Row], loss: Loss) -> ForwardBackwardResult:
        self.calls.append("forward_backward")
        if self.before_update is not None:
            await self.before_update()
        return self._trainer.forward_backward(adapter, rows, loss)

    async def optim_step(self, adapter: str, adam: AdamParams) -> OptimResult:
        self.calls.append("optim_step")
        return self._trainer.optim_step(adapter, adam)

    async def save(self, adapter: str, directory: Path, *, optimizer: bool) -> None:
        self._trainer.save(adapter, directory, optimizer=optimizer)

    async def export(self, adapter: str, directory: Path) -> None:
        self._trainer.export(adapter, directory)

    async def delete(self, adapter: str) -> None:
        self._trainer.delete(adapter)

    def register(self, experiment: str, weight: int, remaining_tokens: int | None) -> None:
        return None

    def remove(self, experiment: str) -> None:
        return None

    @property
    def adapters(self) -> list[str]:
        return sorted(self._trainer.store._states)


class Lease:
    def __init__(self, version: Version) -> None:
        self.version = version

    def held(self) -> SimpleNamespace:
        return SimpleNamespace(name=str(self.version))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


@dataclass
class WrittenSampler:
    """Writes a turn that the history decides, and keeps of versions their numbers alone."""

    folder: Path
    published: list[int] = field(default_factory=list)
    sampled: int = 0

    def new_directory(self) -> Path:
        return self.folder / f"v{len(self.published)}"

    async def publish(self, version: Version, directory: Path) -> None:
        assert (directory / "adapter_model.safetensors").is_file()
        shutil.rmtree(directory)
        self.published.append(version.step)

    def lease(self, experiment: str, *, serving: bool = False) -> Lease:
        return Lease(Version(experiment, self.published[-1]))

    async def sample(self, lease: Lease, prompt_ids: Sequence[int], n: int, params: SamplingParams) -> list[Sample]:
        await asyncio.sleep(0)
        self.sampled += n
        return [self._turn(prompt_ids, i, params) for i in range(n)]

    def _turn(self, history: Sequence[int], i: int, params: SamplingParams) -> Sample:
        at = hashlib.sha256(json.dumps([list(history), i, params.temperature]).encode()).digest()
        text = TURNS[at[0] % len(TURNS)]
        cut = at[1] < 40
        ids = tuple(tokenizer().encode(text + END, add_special_tokens=False))
        ids = ids[: len(ids) // 2] if cut else ids
        logprobs = tuple(-3.0 - at[2 + k % 20] / 128 for k in range(len(ids)))
        return Sample(ids=ids, logprobs=logprobs, truncated=cut)

    def register(self, experiment: str, weight: int, remaining_tokens: int) -> None:
        return None

    def prompt_tokens(self, experiment: str) -> tuple[int, int]:
        return 10 * self.sampled, 9 * self.sampled

    def seconds_waited(self, experiment: str) -> float:
        return 0.0

    def drop(self, experiment: str) -> None:
        return None


def desired(*, mode: str = "Run", **changes: Any) -> DesiredExperiment:
    """An RL experiment of three steps that learns in each of them."""
    algorithm = {"promptsPerStep": 3, "groupSize": 4, "learningRate": "1e-2"} | changes.pop("algorithm", {})
    spec = rl_spec(
        **{
            "maxSteps": 3,
            "lora": {"rank": 4, "alpha": 8},
            "environment": {"name": "WordProblems"},
            "data": {"configMap": {"name": "c", "key": "k"}},
            "sampling": {"maxTokens": 40},
            "algorithm": algorithm,
        }
        | changes
    )
    return DesiredExperiment.model_validate(
        {"uid": UID, "namespace": "n", "name": "e", "spec": spec, "dataText": ROWS, "mode": mode}
    )


@dataclass
class Life:
    """One life of an engine with one experiment."""

    storage: Path
    wanted: DesiredExperiment
    epoch: int = 1

    def __post_init__(self) -> None:
        self.trainer, self.sampler = LocalTrainer(), WrittenSampler(self.storage / "versions")
        self.sampler.folder.mkdir(parents=True, exist_ok=True)
        config = EngineConfig(
            model="tiny", storage=self.storage, token_file=self.storage / "token", max_rank=8, max_model_len=512
        )
        services = Services(config, cast(Any, self.trainer), cast(Any, self.sampler), tokenizer())
        self.experiment = Experiment(self.wanted, services, self.epoch, lambda: None)

    async def run(self) -> Experiment:
        self.experiment.starting()
        await self.experiment.run()
        return self.experiment

    @property
    def folder(self) -> Path:
        return self.storage / "experiments" / UID

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def weights(self, step: int) -> bytes:
        """All trainable state of a step, as bytes."""
        folder = self.folder / "steps" / f"{step:05d}"
        return (folder / "adapter_model.safetensors").read_bytes() + (folder / "optimizer.safetensors").read_bytes()
