"""What a vLLM must get right before clora serves with it, tried on the real thing at every start of an engine.

Adapters of different strength are made for the model at hand, one for each slot, each strong enough that a mix-up
shows. Then: with all slots full, base-model rows and adapter rows in one batch must answer as they do alone; and when a
slot is given to another adapter while requests are in flight, those must not notice, and the newcomer must answer as
itself. vLLM versions exist that fail either.

Left out: whether an adapter's answers are those of PEFT; that depends on the code and not on the machine, and is
tested with clora's own tests.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from functools import partial
from itertools import combinations, count
from pathlib import Path

import torch
from safetensors.torch import save_file

from clora_engine.adapter_files import BaseShapes
from clora_engine.errors import EngineError
from clora_engine.peft_files import CONFIG_FILE, WEIGHTS_FILE, weight_key
from clora_engine.sampler_config import SamplerConfig
from clora_engine.sampler_core import Adapter, SamplerCore
from clora_engine.types import Sample, SamplingParams

FOLDER = "v0-selftest"
"""Named as a version's is, so that what an engine leaves behind that is killed meanwhile goes with the next start."""
FIRST_ID = 5_001
PROMPTS, PROMPT_TOKENS = 4, 16
TOKENS, LONG_TOKENS = 4, 16
MIXED_ADAPTERS = 7
STRENGTHS = (4.0, 16.0)
LOGPROB_TOLERANCE = 2e-3

Answers = list[Sample]


@dataclass(frozen=True, slots=True)
class _Bench:
    core: SamplerCore
    prompts: list[list[int]]
    required: int
    """Of PROMPTS, how many must agree: all in float32; in lower precision ties break differently in other batches."""

    async def ask(self, adapter: Adapter | None, tokens: int = TOKENS) -> Answers:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, stop_token_ids=())
        calls = (self.core.generate(prompt, params, adapter, rank=0, seed=None) for prompt in self.prompts)
        return [output.sample for output in await asyncio.gather(*calls)]

    def agree(self, one: Answers, other: Answers) -> bool:
        return sum(_same(a, b, self.required == PROMPTS) for a, b in zip(one, other, strict=True)) >= self.required

    def differ(self, one: Answers, other: Answers) -> bool:
        return not any(_same(a, b, strict=False) for a, b in zip(one, other, strict=True))


async def self_test(core: SamplerCore, config: SamplerConfig, base: BaseShapes) -> None:
    """Raises EngineError (SamplerSelfTest) when the vLLM behind `core` mixes adapters up; leaves no adapter behind."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(base.vocabulary, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    bench = _Bench(core, prompts, PROMPTS if config.dtype == "float32" else PROMPTS - 1)
    root = config.versions_root / FOLDER
    ids = count(FIRST_ID)
    try:
        for strength in STRENGTHS:
            tested = min(config.slots, MIXED_ADAPTERS)
            make = partial(_make_adapters, root / str(strength), tested + 1, config.max_lora_rank, base, strength)
            directories = await asyncio.to_thread(make)
            adapters = [_adapter(next(ids), directory) for directory in directories]
            filling = [_adapter(next(ids), directories[0]) for _ in range(config.slots - tested)]
            if await _passes(bench, adapters, filling):
                return
    finally:
        await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)
    raise _failed("no adapter shows an effect on the model's answers")


async def _passes(bench: _Bench, adapters: list[Adapter], filling: list[Adapter]) -> bool:
    """All tests with all slots full: `filling`, and `adapters` less the last, which replaces the one before it. False
    when the adapters are too weak to tell anything."""
    *adapters, newcomer = adapters
    alone = [await bench.ask(None)]
    loaded: list[Adapter] = []
    try:
        for adapter in [adapters[0], *filling, *adapters[1:]]:
            loaded.append(adapter)
            await bench.core.load(adapter)
        alone += [await bench.ask(adapter) for adapter in adapters]
        if not all(bench.differ(one, other) for one, other in combinations(alone, 2)):
            return False
        mixed = await asyncio.gather(*(bench.ask(adapter) for adapter in (None, *adapters)))
        for name, one, other in zip(("base model", *(a.name for a in adapters)), alone, mixed, strict=True):
            if not bench.agree(one, other):
                raise _failed(f"with all slots full, {name} answers differently beside other adapters")
        loaded.append(newcomer)
        return await _reassign(bench, adapters, newcomer, alone)
    finally:
        for adapter in loaded:
            await bench.core.unload(adapter.lora_id)


async def _reassign(bench: _Bench, adapters: list[Adapter], newcomer: Adapter, alone: list[Answers]) -> bool:
    """Give the last adapter's slot to `newcomer` while requests of the base model and of the first adapter run."""
    staying: list[Adapter | None] = [None, *adapters[:-1]][:2]
    expected = [await bench.ask(adapter, LONG_TOKENS) for adapter in staying]
    running = [asyncio.ensure_future(bench.ask(adapter, LONG_TOKENS)) for adapter in staying]
    await bench.core.unload(adapters[-1].lora_id)
    await bench.core.load(newcomer)
    new, *answers = await asyncio.gather(bench.ask(newcomer), *running)
    for adapter, one, other in zip(staying, expected, answers, strict=True):
        if not bench.agree(one, other):
            raise _failed(f"{adapter.name if adapter else 'base model'} changes when another slot is given away")
    if not bench.agree(new, await bench.ask(newcomer)):
        raise _failed("a slot's new adapter answers differently beside requests in flight")
    if bench.agree(new, alone[-1]) or bench.agree(new, alone[0]):
        raise _failed("a slot's new adapter answers as the old one did")
    return True


def _same(one: Sample, other: Sample, strict: bool) -> bool:
    """strict: log-probs too, over all tokens; otherwise the ids of the first tokens."""
    if not strict:
        return one.ids[:TOKENS] == other.ids[:TOKENS]
    gaps = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
    return one.ids == other.ids and max(gaps) <= LOGPROB_TOLERANCE


def _adapter(lora_id: int, directory: Path) -> Adapter:
    return Adapter(f"selftest#{lora_id}", lora_id, directory)


def _make_adapters(root: Path, number: int, max_rank: int, base: BaseShapes, strength: float) -> list[Path]:
    """PEFT directories of random adapters with mixed ranks, on the first and the last layer of each kind: small files
    for a model of any size."""
    ends = [name for suffix in base.suffixes for name in _ends(base, suffix)]
    directories = []
    for i in range(number):
        rank = max(1, min(max_rank, 8) >> (i % 2))
        generator = torch.Generator().manual_seed(i)
        tensors: dict[str, torch.Tensor] = {}
        for name in ends:
            inputs, outputs = base.linear[name]
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) * strength / rank**0.5
            tensors |= {weight_key(name, "lora_A"): a, weight_key(name, "lora_B"): b}
        directories.append(root / str(i))
        directories[-1].mkdir(parents=True)
        save_file(tensors, directories[-1] / WEIGHTS_FILE)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(base.suffixes)}
        (directories[-1] / CONFIG_FILE).write_text(json.dumps(config))
    return directories


def _ends(base: BaseShapes, suffix: str) -> tuple[str, ...]:
    names = [name for name in base.linear if name.rpartition(".")[2] == suffix]
    return tuple(dict.fromkeys((names[0], names[-1])))


def _failed(problem: str) -> EngineError:
    message = f"vLLM failed clora's self-test: {problem}. Nothing is served; check the vLLM version."
    return EngineError(message, reason="SamplerSelfTest")
