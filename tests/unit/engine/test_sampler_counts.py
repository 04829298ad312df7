"""What is counted of sampling, and for whom: a stand-in for vLLM's core answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from clora_engine.adapter_files import BaseShapes
from clora_engine.config import EngineConfig
from clora_engine.sampler import Counts, Sampler, SamplerConfig
from clora_engine.sampler_core import Output
from clora_engine.server.metrics import EngineCollector
from clora_engine.serving import ServedAdapters
from clora_engine.supervisor import Supervisor
from clora_engine.training import Services
from clora_engine.types import Sample, SamplingParams, Version
from tests.unit.engine.loop import LocalTrainer, tokenizer

PARAMS = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(0,))
PROMPT = [1, 2, 3]


class Core:
    """Every sample has two tokens; of each prompt's three, one was in the cache."""

    alive, running, waiting = True, 0, 0

    async def generate(self, *_: Any) -> Output:
        return Output(Sample(ids=(1, 0), logprobs=(0.0, 0.0), truncated=False), prompt_tokens=3, cached_tokens=1)


@pytest.fixture
def sampler(tmp_path: Path) -> Sampler:
    """With a version of "e", and one of "f"."""
    sampler = Sampler(SamplerConfig(model=tmp_path, versions_root=tmp_path, max_model_len=64, max_lora_rank=8, slots=4))
    sampler._base = BaseShapes({}, vocabulary=10, parameters=1)
    sampler._supervisor.core = cast(Any, Core())
    for experiment in "ef":
        entry = sampler._versions._table.announce(Version(experiment, 1), tmp_path / experiment)
        assert sampler._versions._table.reserve(entry)
        sampler._versions._table.commit(entry)
    return sampler


async def test_tenants_requests_are_counted_apart_from_what_an_experiment_samples(sampler: Sampler) -> None:
    with sampler.lease("e") as lease:
        await sampler.sample(lease, PROMPT, 2, PARAMS)
    before = sampler.prompt_tokens("e")
    assert before == (6, 2)
    served = ServedAdapters(versions=2)
    served.admit("e", "name", "token")
    found = served.find("token")
    assert found is not None
    for n in (3, 1):
        await found.sample(sampler, PROMPT, n, PARAMS)
    assert sampler.prompt_tokens("e") == before
    assert sampler.prompt_tokens("f") == (0, 0)
    stats = sampler.stats()
    assert stats.served == Counts(requests=2, generated_tokens=8, prompt_tokens=12, cached_tokens=4)
    assert (stats.generated_tokens, stats.prompt_tokens, stats.cached_tokens) == (12, 18, 6), "of both together"
    assert not sampler._gate._waiting
    assert not sampler._gate._running


async def test_they_have_metrics_of_their_own(sampler: Sampler, tmp_path: Path) -> None:
    served = ServedAdapters(versions=2)
    served.admit("e", "name", "token")
    found = served.find("token")
    assert found is not None
    await found.sample(sampler, PROMPT, 2, PARAMS)
    with sampler.lease("f") as lease:
        await sampler.sample(lease, PROMPT, 1, PARAMS)
    config = EngineConfig(model="m", storage=tmp_path, token_file=tmp_path / "token")
    supervisor = Supervisor(config, 1, "0")
    trainer: Any = LocalTrainer()
    trainer.busy = type("Busy", (), {"seconds": 0.0})
    supervisor.open(Services(config, trainer, sampler, tokenizer()))
    registry = CollectorRegistry()
    registry.register(EngineCollector(supervisor))
    lines = dict(line.split() for line in generate_latest(registry).decode().splitlines() if line[0] != "#")
    found_counts = {
        name.removeprefix("clora_engine_").removesuffix("_total"): float(value)
        for name, value in lines.items()
        if name.startswith(("clora_engine_serving", "clora_engine_sampler"))
        and name.endswith(("tokens_total", "requests_total"))
    }
    assert {name: count for name, count in found_counts.items() if "granted" not in name} == {
        "serving_requests": 1,
        "serving_generated_tokens": 4,
        "serving_prompt_tokens": 6,
        "serving_cached_prompt_tokens": 2,
        "sampler_generated_tokens": 6,
        "sampler_prompt_tokens": 9,
        "sampler_cached_prompt_tokens": 3,
    }
