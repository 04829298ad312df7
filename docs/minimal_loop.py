"""Reinforcement learning with clora's own parts, in one file: what an experiment does on an engine, without the engine.

    python docs/minimal_loop.py --model FOLDER [--steps 10]

One sampler (vLLM with multi-LoRA), one trainer process, one environment; no HTTP, no files that outlive the run, one
adapter. First the adapter learns the form of the answers from a few demonstrations, then the loop of reinforcement
learning begins:

    problems -> groups of episodes under one version -> advantages -> forward_backward -> optim_step -> publish

On two CPU cores with SmolLM2-135M-Instruct ten steps take a few minutes. What a real experiment adds: commits after
each step, a log of episodes so that none is drawn twice, many tenants at once, evaluation, metrics
(clora_engine/training.py, experiment.py, supervisor.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clora_engine import advantages
from clora_engine.chat import Renderer, load_tokenizer
from clora_engine.environments.word_problems import WordProblems
from clora_engine.rollout import Rollouts
from clora_engine.rollout_config import Prompt, RolloutConfig
from clora_engine.sampler import Lease, Sampler, SamplerConfig
from clora_engine.trainer_client import TrainerClient
from clora_engine.types import AdamParams, Group, LoraConfig, Loss, Version

NAME = "minimal"  # of the adapter
CONTEXT = 512  # tokens of prompt and episode together
RANK = 16
TEMPERATURE = 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`demonstrations` are seen `epochs` times, 8 at once; a step plays `prompts` problems `group_size` times each."""

    demonstrations: int = 48
    epochs: int = 1
    steps: int = 10
    prompts: int = 8
    group_size: int = 8
    learning_rate: float = 5e-4
    threads: int = 2


async def learn(model: Path, settings: Settings, versions_root: Path) -> list[float]:
    """Runs the whole loop and returns the mean reward of each step of reinforcement learning."""
    warm_up = WordProblems(("errands",))  # the demonstrations are of other problems than those that are practised
    practice = WordProblems(("kitchen",))
    renderer = Renderer(load_tokenizer(model), practice.tools)
    renderer.check_appends()
    trainer = await start_trainer(model, settings.threads)
    try:
        async with Sampler(sampler_config(model, settings.threads, versions_root)) as sampler:
            await trainer.create(NAME, LoraConfig(rank=RANK, alpha=2 * RANK))
            await imitate(trainer, warm_up, renderer, settings)
            await publish(trainer, sampler, step=0)
            playing = RolloutConfig(
                experiment=NAME,
                group_size=settings.group_size,
                temperature=TEMPERATURE,
                max_tokens=40,
                max_turns=3,
                max_context=CONTEXT,
            )
            rollouts = Rollouts(sampler, renderer, practice, playing)
            rewards = []
            for step in range(1, settings.steps + 1):
                groups = await play(rollouts, practice, step, settings)
                rewards.append(statistics.fmean(t.reward for group in groups for t in group.trajectories))
                done = await improve(trainer, groups, settings)
                if done:
                    await publish(trainer, sampler, step)
                print(f"step {step}: reward {rewards[-1]:.2f}, {'updated' if done else 'nothing to learn'}", flush=True)
            return rewards
    finally:
        await trainer.close()


async def imitate(trainer: TrainerClient, problems: WordProblems, renderer: Renderer, settings: Settings) -> None:
    """Supervised: cross entropy on demonstrations, so that the model writes tool calls at all."""
    shown = [
        renderer.demonstration(problems.demonstration(problems.generate(0, "train", index)))
        for index in range(settings.demonstrations)
    ]
    batches = [shown[start : start + 8] for start in range(0, len(shown), 8)] * settings.epochs
    for number, demonstrations in enumerate(batches):
        batch = advantages.sft(demonstrations)
        rate = 2e-3 * min(1.0, (number + 1) / 3) * (1.0 - number / len(batches))
        loss = Loss(name="CrossEntropy", denominator=batch.denominator)
        result = await trainer.forward_backward(NAME, batch.rows, loss)
        await trainer.optim_step(NAME, AdamParams(learning_rate=rate))
        print(f"demonstrations {number + 1}/{len(batches)}: loss {result.loss:.2f}", flush=True)


async def play(rollouts: Rollouts[Lease], problems: WordProblems, step: int, settings: Settings) -> list[Group]:
    """A group of episodes for each of the step's problems, all under the version that is published now."""
    first = (step - 1) * settings.prompts
    prompts = [
        Prompt(index, first + index, problems.generate(1, "train", first + index)) for index in range(settings.prompts)
    ]
    return await rollouts.step(prompts)


async def improve(trainer: TrainerClient, groups: Sequence[Group], settings: Settings) -> bool:
    """One update by GRPO and PPO's clipped loss. False: no group tells good from bad, or the gradient is not finite."""
    batch = advantages.grpo(groups)
    if not batch.rows:
        return False
    loss = Loss(name="PPO", denominator=batch.denominator, temperature=TEMPERATURE)
    await trainer.forward_backward(NAME, batch.rows, loss)
    done = await trainer.optim_step(NAME, AdamParams(learning_rate=settings.learning_rate))
    return not done.skipped


async def publish(trainer: TrainerClient, sampler: Sampler, step: int) -> None:
    """The trained adapter as a new version; groups that still play with the old one keep it to their end."""
    directory = sampler.new_directory()
    await trainer.export(NAME, directory)
    await sampler.publish(Version(NAME, step), directory)


async def start_trainer(model: Path, threads: int) -> TrainerClient:
    return await TrainerClient.start(
        str(model),
        model_name=model.name,
        dtype="float32",
        device="cpu",
        threads=threads,
        max_rank=RANK,
        tokens_per_microbatch=2048,
        host_limit_bytes=4 << 30,
    )


def sampler_config(model: Path, threads: int, versions_root: Path) -> SamplerConfig:
    return SamplerConfig(
        model=model,
        versions_root=versions_root,
        max_model_len=CONTEXT,
        max_lora_rank=RANK,
        slots=2,  # the version that is played, and the one that is published meanwhile
        dtype="float32",
        max_num_seqs=64,
        kv_cache_bytes=1 << 30,
        threads=threads,
        shares_cores=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Reinforcement learning on clora's own classes, on a CPU.")
    parser.add_argument("--model", type=Path, required=True, help="folder of a small instruction-tuned model")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    settings = Settings(steps=arguments.steps, threads=os.cpu_count() or 2)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as versions:  # they are read once and removed
        rewards = asyncio.run(learn(arguments.model, settings, Path(versions) / "versions"))
    print(f"reward: first 3 steps {statistics.fmean(rewards[:3]):.2f}, last 3 {statistics.fmean(rewards[-3:]):.2f}")


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
