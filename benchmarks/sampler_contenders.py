"""What is compared: clora's sampler, vLLM's stock LoRA on a CPU, and vLLM without LoRA; each a process of its own.

All have the same model, dtype, threads, KV cache and batch limits; only one of them works at a time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

import torch
from vllm.v1.engine.async_llm import AsyncLLM

from clora_engine.adapter_files import BaseShapes
from clora_engine.sampler import Sampler
from clora_engine.sampler_config import SamplerConfig, engine_args, process_environment
from clora_engine.sampler_core import Adapter, SamplerCore
from clora_engine.types import SamplingParams, Version
from tests.sampler_fixtures import write_adapter

RANK = 16
TENANTS = 8


class Contender(Protocol):
    async def ask(self, tenant: int, prompt: list[int], params: SamplingParams) -> None:
        """One request of the tenant to its end."""
        ...


@dataclass(frozen=True, slots=True)
class Clora:
    """The whole sampler: gate, leases and versions included."""

    sampler: Sampler

    async def ask(self, tenant: int, prompt: list[int], params: SamplingParams) -> None:
        with self.sampler.lease(str(tenant)) as lease:
            await self.sampler.sample(lease, prompt, 1, params)


@dataclass(frozen=True, slots=True)
class Plain:
    """vLLM alone; without adapters it has no LoRA at all."""

    core: SamplerCore
    adapters: Sequence[Adapter] = ()

    async def ask(self, tenant: int, prompt: list[int], params: SamplingParams) -> None:
        await self.core.generate(prompt, params, self.adapters[tenant] if self.adapters else None, 0, None)


@asynccontextmanager
async def clora(config: SamplerConfig) -> AsyncIterator[Clora]:
    async with Sampler(config) as sampler:
        for tenant in range(TENANTS):
            directory = write_adapter(sampler.new_directory(), config.model, seed=tenant, rank=RANK)
            await sampler.publish(Version(str(tenant), 0), directory)
        yield Clora(sampler)


@asynccontextmanager
async def stock(config: SamplerConfig, adapters: Path) -> AsyncIterator[Plain]:
    """vLLM with its own LoRA kernel. Its self-test would refuse it: it is wrong for base rows when slots are full."""
    os.environ["VLLM_PLUGINS"] = "none"
    try:
        core = await SamplerCore.start(config, BaseShapes.of_model(config.model).suffixes)
    finally:
        del os.environ["VLLM_PLUGINS"]
    try:
        loaded = []
        for tenant in range(TENANTS):
            directory = write_adapter(adapters / str(tenant), config.model, seed=tenant, rank=RANK)
            loaded.append(Adapter(f"stock{tenant}", 1000 + tenant, directory))
            await core.load(loaded[-1])
        yield Plain(core, loaded)
    finally:
        await core.close()


@asynccontextmanager
async def without_lora(config: SamplerConfig) -> AsyncIterator[Plain]:
    args = engine_args(config, BaseShapes.of_model(config.model).suffixes)
    args.enable_lora = False

    def build() -> AsyncLLM:
        with process_environment(config):
            return AsyncLLM.from_engine_args(args)

    core = SamplerCore(await asyncio.to_thread(build), 1, [])
    try:
        yield Plain(core)
    finally:
        await core.close()


class Prompts:
    """Random prompts of one length; none is ever repeated, so that no prefix cache helps."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self._vocabulary, self._length, self._seeds = vocabulary, length, count()

    def next(self) -> list[int]:
        generator = torch.Generator().manual_seed(next(self._seeds))
        ids: list[int] = torch.randint(self._vocabulary, (self._length,), generator=generator).tolist()
        return ids


async def seconds(
    contender: Contender, tenants: Sequence[int], requests: int, prompts: Prompts, params: SamplingParams
) -> float:
    """Wall time until all requests of all tenants, started at once, are done."""
    asked = [(tenant, prompts.next()) for tenant in tenants for _ in range(requests)]
    began = time.perf_counter()
    await asyncio.gather(*(contender.ask(tenant, prompt, params) for tenant, prompt in asked))
    return time.perf_counter() - began


async def seconds_serial(
    contender: Contender, tenants: Sequence[int], requests: int, prompts: Prompts, params: SamplingParams
) -> float:
    """The same work, tenant after tenant."""
    return sum([await seconds(contender, [tenant], requests, prompts, params) for tenant in tenants])
