"""What a publish costs: the other tenants in longer gaps between tokens, the publishing one in time until it is live.

Gaps: seven tenants with four requests each decode without pause; every token's arrival is noted. Windows in which an
eighth tenant publishes version after version take turns with windows in which nobody does. Latency: a real trainer's
`optim_step` has returned, its weights are saved, published, and a request under the new lease gives its first token.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from vllm import SamplingParams as VllmParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from benchmarks.report import Spread
from benchmarks.sampler_contenders import RANK, Clora, Prompts
from clora_engine.sampler import Sampler
from clora_engine.trainer_client import TrainerClient
from clora_engine.types import AdamParams, Completion, LoraConfig, Loss, Row, SamplingParams, Version
from tests.sampler_fixtures import write_adapter

OTHERS, REQUESTS, TOKENS = 7, 4, 128
INTERVAL_SECONDS = 1.0
PUBLISHER = "7"
_ids = count()


@dataclass(frozen=True, slots=True)
class PublishResult:
    """Times in milliseconds. gap_growth_p99_steps: by how much the 99th percentile of the others' token gaps grows
    while versions are published, in units of the median decode step, window against window."""

    step: Spread
    gap_p50: Spread
    gap_p50_publishing: Spread
    gap_p99: Spread
    gap_p99_publishing: Spread
    gap_growth_p50_steps: Spread
    gap_growth_p99_steps: Spread
    publishes: int
    publish_idle: Spread
    publish_busy: Spread
    optim_step_to_first_token_idle: Spread
    optim_step_to_first_token_busy: Spread


async def measure(clora: Clora, model: Path, prompts: Prompts, windows: int) -> PublishResult:
    sampler = clora.sampler
    template = write_adapter(Path(mkdtemp()) / "adapter", model, seed=99, rank=RANK, alpha=RANK)  # as exported
    try:
        quiet, noisy, busy = [], [], []
        await _window(sampler, prompts)  # warm
        for _ in range(windows):
            quiet.append(await _window(sampler, prompts))
            decoding = asyncio.create_task(_window(sampler, prompts))
            busy += await _publish_until_done(sampler, template, decoding)
            noisy.append(await decoding)
        idle = [await _publish(sampler, template) for _ in range(10)]
    finally:
        shutil.rmtree(template.parent)
    live_idle, live_busy = await _live(sampler, model, prompts)
    step = [float(np.median(gaps)) for gaps in quiet]
    grown = [
        [(np.percentile(n, q) - np.percentile(a, q)) / s for n, a, s in zip(noisy, quiet, step, strict=True)]
        for q in (50, 99)
    ]

    def spread(windows_gaps: Sequence[Sequence[float]], q: float) -> Spread:
        return Spread.of([float(np.percentile(gaps, q)) for gaps in windows_gaps])

    return PublishResult(
        Spread.of(step),
        spread(quiet, 50),
        spread(noisy, 50),
        spread(quiet, 99),
        spread(noisy, 99),
        Spread.of([float(g) for g in grown[0]]),
        Spread.of([float(g) for g in grown[1]]),
        len(busy),
        Spread.of(idle),
        Spread.of(busy),
        Spread.of(live_idle),
        Spread.of(live_busy),
    )


async def _window(sampler: Sampler, prompts: Prompts) -> list[float]:
    """The gaps between tokens of all others' requests, in milliseconds, once all are decoding and until one ends."""
    arrivals = await asyncio.gather(
        *(_arrivals(sampler, str(tenant), prompts.next()) for tenant in range(OTHERS) for _ in range(REQUESTS))
    )
    begun, ended = max(a[0] for a in arrivals), min(a[-1] for a in arrivals)
    return [1e3 * (b - a) for times in arrivals for a, b in pairwise(times) if a >= begun and b <= ended]


async def _arrivals(sampler: Sampler, tenant: str, prompt: list[int]) -> list[float]:
    """When each token of one request arrived. The sampler gives whole samples, so this asks vLLM for a stream."""
    core = sampler._supervisor.core
    assert core is not None
    with sampler.lease(tenant) as lease:
        adapter = sampler._versions.adapter(lease.held())
        assert adapter is not None
        stream = core._llm.generate(
            tokens_input(prompt),
            VllmParams(
                temperature=1.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
            f"stream{next(_ids)}",
            lora_request=adapter.request(),
        )  # fmt: skip
        return [time.perf_counter() async for _ in stream]


async def _publish(sampler: Sampler, template: Path) -> float:
    """Milliseconds from a written version until new leases get it."""
    directory = sampler.new_directory()
    await asyncio.to_thread(shutil.copytree, template, directory)
    began = time.perf_counter()
    await sampler.publish(Version(PUBLISHER, next(_ids)), directory)
    return 1e3 * (time.perf_counter() - began)


async def _publish_until_done(sampler: Sampler, template: Path, decoding: asyncio.Task[list[float]]) -> list[float]:
    taken = []
    while not decoding.done():
        taken.append(await _publish(sampler, template))
        await asyncio.wait({decoding}, timeout=INTERVAL_SECONDS)
    return taken


async def _live(sampler: Sampler, model: Path, prompts: Prompts) -> tuple[list[float], list[float]]:
    """Milliseconds from a returned optim_step to the new version's first token; alone, and beside the others."""
    trainer = await TrainerClient.start(
        str(model), model_name="base", dtype="float32", device="cpu", threads=2, max_rank=RANK,
        tokens_per_microbatch=4096, host_limit_bytes=1 << 32,
    )  # fmt: skip
    try:
        await trainer.create("t", LoraConfig(rank=RANK, alpha=2 * RANK))

        async def once() -> float:
            ids = prompts.next()
            count = len(ids)
            completion = Completion(ids=ids, weights=[1.0] * count, logprobs=[0.0] * count, advantages=[0.0] * count)
            row = Row(prompt=prompts.next(), completions=[completion])
            await trainer.forward_backward("t", [row], Loss(name="CrossEntropy", denominator=float(count)))
            await trainer.optim_step("t", AdamParams(learning_rate=1e-3))
            began = time.perf_counter()
            directory = sampler.new_directory()
            await trainer.export("t", directory)
            await sampler.publish(Version(PUBLISHER, next(_ids)), directory)
            with sampler.lease(PUBLISHER) as lease:
                await sampler.sample(lease, prompts.next(), 1, SamplingParams(1.0, 1, ()))
            return 1e3 * (time.perf_counter() - began)

        await once()
        idle = [await once() for _ in range(10)]
        decoding = asyncio.create_task(_window(sampler, prompts))
        busy = []
        while not decoding.done():
            busy.append(await once())
        return idle, busy
    finally:
        await trainer.close()
