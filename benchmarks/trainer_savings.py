"""What shared prompts and merged twins save, on groups that the model really sampled.

Prompts are word problems with the chat template and tools of an experiment; each is answered several times at
temperature 1. The model is not trained for the task: a trained one repeats itself more often, and saves more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.trainer_contenders import TOKENS_PER_MICROBATCH
from clora_engine.chat import Renderer, load_tokenizer
from clora_engine.environments.word_problems import WordProblems
from clora_engine.trainer import Trainer
from clora_engine.trainer_base import BaseModel
from clora_engine.types import Completion, ForwardBackwardResult, LoraConfig, Loss, Row

LONGEST_ANSWER = 40


def sampled_groups(path: Path, *, prompts: int, group: int) -> list[Row]:
    """GRPO's groups: a row for each prompt, its sampled answers, advantages of both signs."""
    tokenizer = load_tokenizer(path)
    factory = WordProblems()
    renderer = Renderer(tokenizer, factory.tools)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    torch.manual_seed(0)
    made = []
    for index in range(prompts):
        question = factory.demonstration(factory.generate(0, "train", index))[:1]
        made.append(_group(model, renderer.prompt(question), renderer.stop_token_ids, group))
    return made


@torch.no_grad()
def _group(model: Any, prompt: list[int], stops: tuple[int, ...], group: int) -> Row:
    sampled = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=group,
        max_new_tokens=LONGEST_ANSWER,
        eos_token_id=list(stops),
        pad_token_id=stops[0],
    )
    completions = []
    for number, ids in enumerate(sampled[:, len(prompt) :].tolist()):
        end = next((place + 1 for place, token in enumerate(ids) if token in stops), len(ids))
        advantage = 1.0 if number % 2 else -1.0
        completions.append(
            Completion(ids=ids[:end], weights=[1.0] * end, logprobs=[-1.0] * end, advantages=[advantage] * end)
        )
    return Row(prompt=prompt, completions=completions)


def measure(model: Any, batch: Sequence[Row], *, share: bool) -> ForwardBackwardResult:
    """One forward_backward of a fresh adapter, after one that does not count."""
    trainer = Trainer(
        model if isinstance(model, BaseModel) else BaseModel.wrap(model),
        model_name="benchmark",
        max_rank=16,
        tokens_per_microbatch=TOKENS_PER_MICROBATCH,
        host_limit_bytes=1 << 40,
        share=share,
    )
    trainer.create("a", LoraConfig(rank=16, alpha=32))
    loss = Loss(name="CISPO", denominator=float(sum(len(one.ids) for row in batch for one in row.completions)))
    trainer.forward_backward("a", batch[:1], loss)
    return trainer.forward_backward("a", batch, loss)
