"""The least time that this machine needs for a sampling run: the roofline (Williams, Waterman and Patterson, 2009).

Each forward pass takes the longer of reading its weights, adapters and KV cache at the memory's bandwidth, and of its
multiply-adds at the rate of the best matrix product. Both rates are measured here, as the best of several tries, with
the very products that vLLM uses. Element-wise work, sampling and Python count as nothing, so the bound cannot be met.

A second bound asks less: the base model's products as fast as that library does them for so many rows (a product of few
rows reaches neither rate), and the adapters read at the memory's bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from clora_engine.adapter_files import BaseShapes

TRIES = 7


@dataclass(frozen=True, slots=True)
class Rates:
    """bytes_per_second of reading; flops_per_second of products in the model's dtype (a multiply-add is two)."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Per forward pass or row, of a dense decoder with LoRA of one rank on all its linear layers.

    weights         parameters of the linear layers
    head            parameters of the output head, computed for sampled rows alone
    adapter         parameters of one adapter
    kv_per_token    values of the KV cache for one token
    bytes_per_value of all of them
    """

    weights: int
    head: int
    adapter: int
    kv_per_token: int
    bytes_per_value: int

    @classmethod
    def of(cls, base: BaseShapes, rank: int, hidden: int, kv_per_token: int, dtype: torch.dtype) -> Sizes:
        linear = base.linear.values()
        return cls(
            weights=sum(i * o for i, o in linear),
            head=base.vocabulary * hidden,
            adapter=sum(rank * (i + o) for i, o in linear),
            kv_per_token=kv_per_token,
            bytes_per_value=dtype.itemsize,
        )


def run_seconds(
    sizes: Sizes, rates: Rates, *, adapters: int, rows: int, prompt: int, tokens: int, prefill_budget: int
) -> float:
    """Of `rows` requests at once, each with a prompt and as many tokens, over so many adapters (0: the base model).
    Prompts are prefilled `prefill_budget` tokens at a time."""
    per_row = sizes.weights + (sizes.adapter if adapters else 0)
    read = sizes.weights + sizes.head + adapters * sizes.adapter
    passes = -(-rows * prompt // prefill_budget)
    prefill_flops = 2 * (rows * prompt * per_row + rows * sizes.head)
    seconds = max(
        prefill_flops / rates.flops_per_second, passes * read * sizes.bytes_per_value / rates.bytes_per_second
    )
    for position in range(1, tokens):  # the first token comes with the prompt
        cache = rows * (prompt + position) * sizes.kv_per_token
        flops = 2 * rows * (per_row + sizes.head)
        seconds += max(flops / rates.flops_per_second, (read + cache) * sizes.bytes_per_value / rates.bytes_per_second)
    return seconds


class Products:
    """The base model's matrix products of a forward pass, as vLLM does them on a CPU, each with weights of its own, so
    that they come from memory as they do in a model."""

    def __init__(self, base: BaseShapes, hidden: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._layers = [
            (inputs, product(torch.randn(outputs, inputs, dtype=dtype))) for inputs, outputs in _packed(base)
        ]
        self._seconds: dict[tuple[int, int], float] = {}
        self._head = (hidden, product(torch.randn(base.vocabulary, hidden, dtype=dtype)))

    def seconds(self, rows: int, sampled: int) -> float:
        """Of one pass over `rows` rows, of which `sampled` go on to the output head."""
        if (rows, sampled) not in self._seconds:
            self._seconds[rows, sampled] = self._measure(rows, sampled)
        return self._seconds[rows, sampled]

    def _measure(self, rows: int, sampled: int) -> float:
        widths = {inputs for inputs, _ in self._layers}
        x = {inputs: torch.randn(rows, inputs, dtype=self._dtype) for inputs in widths}
        last = torch.randn(sampled, self._head[0], dtype=self._dtype)

        def one_pass() -> None:
            for inputs, layer in self._layers:
                layer(x[inputs])
            self._head[1](last)

        return _best(one_pass, tries=3)


def _packed(base: BaseShapes) -> list[tuple[int, int]]:
    """The products that vLLM makes: q, k and v as one, gate and up as one."""
    packs = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
    outputs: dict[tuple[str, str], tuple[int, int]] = {}
    for name, (i, o) in base.linear.items():
        parent, _, suffix = name.rpartition(".")
        key = (parent, packs.get(suffix, suffix))
        outputs[key] = (i, outputs.get(key, (i, 0))[1] + o)
    return list(outputs.values())


def products_seconds(
    sizes: Sizes,
    rates: Rates,
    products: Products,
    *,
    adapters: int,
    rows: int,
    prompt: int,
    tokens: int,
    prefill_budget: int,
) -> float:
    """The second bound of the same run; arguments as for `run_seconds`."""
    passes = -(-rows * prompt // prefill_budget)
    read = adapters * sizes.adapter * sizes.bytes_per_value / rates.bytes_per_second
    prefill = passes * (products.seconds(rows * prompt // passes, max(1, rows // passes)) + read)
    return prefill + (tokens - 1) * (products.seconds(rows, rows) + read)


def measure(dtype: torch.dtype, threads: int) -> Rates:
    """On a CPU, with vLLM's own matrix product; a second or two."""
    torch.set_num_threads(threads)
    inputs, outputs = 4096, 16384
    weight = torch.randn(outputs, inputs, dtype=dtype)
    multiply = product(weight)
    row, many = torch.randn(1, inputs, dtype=dtype), torch.randn(512, inputs, dtype=dtype)
    one = _best(lambda: multiply(row))
    all_rows = _best(lambda: multiply(many))
    read = weight.numel() * dtype.itemsize
    summed = _best(lambda: weight.view(torch.int32).sum()) if dtype.itemsize == 4 else one
    return Rates(read / min(one, summed), 2 * 512 * inputs * outputs / all_rows)


def product(weight_OI: Tensor) -> Callable[[Tensor], Tensor]:
    """[T, I] -> [T, O], as a linear layer of vLLM's does it on this CPU; by which library depends on CPU and dtype."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # those of this CPU: others end in an illegal instruction
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight_OI, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return lambda x_TI: cast(Tensor, layer.cpu_linear(x_TI, layer.weight, None))


def _best(work: Callable[[], object], tries: int = TRIES) -> float:
    seconds = []
    for _ in range(tries):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
