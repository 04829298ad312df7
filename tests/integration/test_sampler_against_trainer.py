"""What the sampler says of the tokens it drew under a new version, against the trainer's forward of that version."""

from __future__ import annotations

from pathlib import Path

import pytest

from clora_engine.sampler import Sampler, SamplerConfig
from clora_engine.trainer_client import TrainerClient
from clora_engine.types import AdamParams, Completion, LoraConfig, Loss, Row, SamplingParams, Version

pytestmark = pytest.mark.integration

EXPERIMENT = "experiment"
TEMPERATURE = 0.8


def row(prompt: list[int], *completions: list[int]) -> Row:
    return Row(
        prompt=prompt,
        completions=[
            Completion(ids=ids, weights=[1.0] * len(ids), logprobs=[0.0] * len(ids), advantages=[0.0] * len(ids))
            for ids in completions
        ],
    )


async def differences(model: Path, root: Path, dtype: str) -> list[float]:
    """|sampler - trainer| of every sampled token's log-prob, after three large updates and as many publishes."""
    trainer = await TrainerClient.start(
        str(model),
        model_name="tiny",
        dtype=dtype,
        device="cpu",
        threads=1,
        max_rank=8,
        tokens_per_microbatch=512,
        host_limit_bytes=1 << 30,
    )
    config = SamplerConfig(
        model=model,
        versions_root=root,
        max_model_len=256,
        max_lora_rank=8,
        slots=2,
        dtype=dtype,
        max_num_seqs=16,
        kv_cache_bytes=64 << 20,
        threads=1,
    )
    try:
        async with Sampler(config) as sampler:
            await trainer.create(EXPERIMENT, LoraConfig(rank=8, alpha=16, seed=1))
            found: list[float] = []
            for step in range(1, 4):
                target = row([5, 6, 7], [20 + step, 30 + step, 40 + step, 50 + step])
                await trainer.forward_backward(EXPERIMENT, [target], Loss(name="CrossEntropy", denominator=4.0))
                await trainer.optim_step(EXPERIMENT, AdamParams(learning_rate=2e-2))
                directory = sampler.new_directory()
                await trainer.export(EXPERIMENT, directory)
                await sampler.publish(Version(EXPERIMENT, step), directory)
                params = SamplingParams(temperature=TEMPERATURE, max_tokens=24, stop_token_ids=())
                with sampler.lease(EXPERIMENT) as lease:
                    samples = await sampler.sample(lease, [5, 6, 7, 8], 8, params)
                drawn = row([5, 6, 7, 8], *(list(sample.ids) for sample in samples))
                (again,) = await trainer.forward(EXPERIMENT, [drawn], temperature=TEMPERATURE)
                for sample, logprobs in zip(samples, again, strict=True):
                    found += [abs(a - b) for a, b in zip(sample.logprobs, logprobs, strict=True)]
            return found
    finally:
        await trainer.close()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.5)])
async def test_a_published_version_is_the_trainers(tiny_model: Path, tmp_path: Path, dtype: str, bound: float) -> None:
    found = await differences(tiny_model, tmp_path / "versions", dtype)
    print(f"{dtype}: {len(found)} tokens, mean {sum(found) / len(found):.2e}, max {max(found):.2e}")
    assert len(found) == 3 * 8 * 24
    assert max(found) <= bound
