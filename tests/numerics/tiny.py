"""Tiny random models and batches for the trainer's tests: real architectures, seconds on one core."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from clora_engine.trainer import Trainer
from clora_engine.trainer_base import BaseModel
from clora_engine.types import Completion, Row

VOCABULARY = 128
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large enough that log-probs and gradients are far from those of a uniform model
    "attn_implementation": "sdpa",
}


def tiny_model(family: str = "qwen3", *, dtype: torch.dtype = torch.float32) -> Any:
    """A random causal LM, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if family == "llama":
            model = LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=True))
        elif family == "qwen2-moe":
            shape = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape, **experts, shared_expert_intermediate_size=32))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=False))
    return model.to(dtype).eval()


def tiny_trainer(family: str = "qwen3", *, budget: int = 256, **settings: Any) -> Trainer:
    """A trainer over a fresh tiny model."""
    options: dict[str, Any] = {"model_name": "clora/tiny", "max_rank": 32, "host_limit_bytes": 1 << 28} | settings
    model = tiny_model(family, dtype=options.pop("dtype", torch.float32)).to(options.pop("device", "cpu"))
    base = BaseModel.wrap(model, gradient_checkpointing=options.pop("gradient_checkpointing", False))
    return Trainer(base, tokens_per_microbatch=budget, **options)


def completion(rng: random.Random, length: int, *, masked: float = 0.2) -> Completion:
    """Random tokens; about a share `masked` of them has no weight."""
    weights = [0.0 if rng.random() < masked else 1.0 for _ in range(length)]
    weights[-1] = 1.0
    advantage = rng.choice([-1.5, -0.5, 0.7, 1.3])
    return Completion(
        ids=[rng.randrange(VOCABULARY) for _ in range(length)],
        weights=weights,
        logprobs=[rng.uniform(-5.5, -3.5) for _ in range(length)],
        advantages=[advantage] * length,
    )


def batch(seed: int, *, rows: int = 4, completions: int = 3) -> list[Row]:
    """Random rows of different lengths. In every second row two completions have the same tokens but weights, sampler
    log-probs and advantages of their own."""
    rng = random.Random(seed)
    result = []
    for r in range(rows):
        several = [completion(rng, rng.randint(3, 12)) for _ in range(completions)]
        if r % 2 and completions > 1:
            twin = completion(rng, len(several[0].ids))
            several[1] = Completion(
                ids=several[0].ids, weights=twin.weights, logprobs=twin.logprobs, advantages=twin.advantages
            )
        result.append(Row(prompt=[rng.randrange(VOCABULARY) for _ in range(rng.randint(4, 16))], completions=several))
    return result


def plain(rows: list[Row]) -> list[Row]:
    """The same completions, each in a row of its own."""
    return [Row(prompt=row.prompt, completions=[one]) for row in rows for one in row.completions]


def trained_tokens(rows: list[Row]) -> int:
    return sum(weight != 0 for row in rows for one in row.completions for weight in one.weights)
