"""The least time that a run of experiments needs on this machine, from measured rates: what a result is held against.

Sampler and trainer share the cores, so the work of both adds up: every sampled token costs its share of the base
model's matrix products at the largest batch that the run allows, every prompt token that no cache saved and every
trained position its share of the products of a large batch, forward and, when trained, once more for the gradient (the
base model is frozen: its weights need none). LoRA, attention, element-wise work, sampling, the environment's and
Python's time count as nothing, so the limit cannot be met. Where tools take their time, the run is no shorter than all
their seconds, spread over the episodes that may be in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks import roofline
from clora_engine.adapter_files import BaseShapes

MANY = 512  # rows at which a product is as fast as it gets
SEATS = 128  # sequences that the engines of the benchmarks decode at once


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of the base model's products: of a decode step by its rows, and for one row of many."""

    step: Mapping[int, float]
    many: float

    @classmethod
    def measure(cls, model: Path, rows: list[int], threads: int) -> Rates:
        """On a CPU, with vLLM's own products, in float32; a few seconds."""
        torch.set_num_threads(threads)
        base, config = BaseShapes.of_model(model), AutoConfig.from_pretrained(model)
        products = roofline.Products(base, config.hidden_size, torch.float32)
        return cls({n: products.seconds(n, n) for n in rows}, products.seconds(MANY, 1) / MANY)

    def compute_seconds(self, rows: int, sampled: float, prompt: float, trained: float) -> float:
        """Of so many sampled tokens, `rows` at a time, uncached prompt tokens and trained positions."""
        return sampled * self.step[rows] / rows + (prompt + 2 * trained) * self.many


def limit_seconds(rates: Rates, record: Mapping[str, Any], in_flight: int) -> float:
    """Of a record of throughput_report."""
    abreast: int = in_flight * record["at_once"]
    compute = rates.compute_seconds(
        min(abreast, SEATS), record["sampled_tokens"], record["prompt_tokens"], record["trained_tokens"]
    )
    return max(compute, float(record["tool_seconds"]) / abreast)
