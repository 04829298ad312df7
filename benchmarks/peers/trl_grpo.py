"""The same experiment by TRL: GRPOTrainer with PEFT, the environment by `rollout_func`. Runs in TRL's environment.

    python -m benchmarks.peers.trl_grpo WORK.json

Optimizer, learning rates, clip, group size and the denominator of the loss (`dapo`: all tokens that the model wrote in
the step) are the spec's. What cannot be made the same: TRL divides by the sample's standard deviation of a group, clora
by the population's, which scales all advantages alike.

Settings: `dtype` (float32, bfloat16), `micro_batch` (rows of a forward and backward pass), `generation` (`static`:
transformers' generate on one padded batch; `continuous`: its continuous batching).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}  # read at import

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.work import Episodes, Events, Work, read_work, step_tokens
from clora_engine.chat import load_tokenizer
from clora_engine.plan import Plan

# Of continuous batching, with pages of 256 tokens: more than a step needs. Its default is half of a GPU's memory, for
# which it takes the machine's where there is none.
CACHE = {"num_blocks": 128, "max_batch_tokens": 4096}


class Rollout:
    """TRL's rollout_func: plays a generation batch, which is one step's groups, turn by turn."""

    def __init__(self, plan: Plan, work: Work, events: Events) -> None:
        self._plan, self._work, self._events = plan, work, events

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """`prompts` are data positions, each as often as a group is large."""
        begun = time.monotonic()
        group_size = self._plan.spec.algorithm.group_size
        episodes = Episodes(self._plan, int(prompts[0]), self._work.max_context)
        assert [int(p) for p in prompts] == [int(prompts[0]) + i // group_size for i in range(len(prompts))]
        while waiting := episodes.open:
            histories = [list(episode.history) for episode in waiting]
            sampled, _ = trainer._generate_single_turn(histories, None, {}, group_size)
            for episode, ids in zip(waiting, sampled, strict=True):
                episodes.answer(episode, ids, [0.0] * len(ids))
        groups = episodes.finished()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        self._events.write("rollout", seconds=time.monotonic() - begun, **step_tokens(groups).to_dict())
        return {
            "prompt_ids": [group.prompt for group in groups for _ in group.trajectories],
            "completion_ids": [trajectory.ids for trajectory in trajectories],
            "logprobs": None,  # on-policy: TRL takes the ratio to the policy itself
            "env_mask": [trajectory.mask for trajectory in trajectories],
            "env_reward": [trajectory.reward for trajectory in trajectories],
        }


class Clock(TrainerCallback):  # type: ignore[misc]
    """Writes when training begins and when a step has ended."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._events.write("begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._events.write("step", step=state.global_step)


def environment_reward(prompts: list[str], env_reward: list[float], **_: Any) -> list[float]:
    return env_reward


def config(plan: Plan, settings: dict[str, Any], scratch: Path) -> GRPOConfig:
    """The spec as TRL's settings."""
    algorithm, adam = plan.spec.algorithm, plan.adam(1)
    rows = algorithm.prompts_per_step * algorithm.group_size
    low, high = 1.0 - float(algorithm.clip_low), float(algorithm.clip_high) - 1.0
    return GRPOConfig(
        output_dir=str(scratch),
        use_cpu=True,
        bf16=settings["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=rows // settings["micro_batch"],
        num_generations=algorithm.group_size,
        max_completion_length=plan.spec.sampling.max_tokens,  # of one generation: a turn
        temperature=plan.temperature,
        use_transformers_continuous_batching=settings["generation"] == "continuous",
        transformers_continuous_batching_config=CACHE,
        loss_type="dapo",
        scale_rewards="group" if algorithm.normalize_by_std else "none",
        beta=0.0,
        epsilon=low,
        epsilon_high=high,
        max_grad_norm=adam.grad_clip_norm,
        max_steps=plan.spec.max_steps,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


def optimizer(plan: Plan, model: Any) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW with the spec's numbers, at the spec's learning rate in each step."""
    adam = plan.adam(1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.optim.AdamW(
        trained, lr=1.0, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay, fused=True
    )
    return found, torch.optim.lr_scheduler.LambdaLR(found, lambda done: plan.adam(done + 1).learning_rate)


def main() -> None:
    work = read_work(Path(sys.argv[1]))
    plan, tokenizer = work.plan(), load_tokenizer(Path(work.model))
    assert {tokenizer.eos_token_id} == set(plan.renderer.stop_token_ids), "TRL stops at this token alone"
    base = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.settings["dtype"]))
    model = PeftModel.from_pretrained(base, work.adapter, is_trainable=True)
    algorithm = plan.spec.algorithm
    positions = range(algorithm.prompts_per_step * plan.spec.max_steps)
    with Path(work.out).open("w") as out:
        events = Events(out)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=environment_reward,
            args=config(plan, work.settings, Path(work.out).with_suffix(".trl")),
            train_dataset=Dataset.from_list([{"prompt": str(position)} for position in positions]),
            processing_class=tokenizer,
            callbacks=[Clock(events)],
            optimizers=optimizer(plan, model),
            rollout_func=Rollout(plan, work, events),
        )
        trainer.train()


if __name__ == "__main__":
    main()
