"""Who trains in the trainer's benchmark: clora with a slot for everybody, clora with one slot, and PEFT with AdamW.

A tenant's step is one batch forward and backward and one AdamW step on an adapter of its own. Batches are rows of ROW
tokens, a quarter of them prompt, with nothing to share and nothing to merge: savings are measured apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model

from clora_engine.trainer import TOGETHER, Trainer
from clora_engine.trainer_base import BaseModel
from clora_engine.trainer_pass import Request
from clora_engine.types import AdamParams, Completion, LoraConfig, Loss, Row

ROW, PROMPT = 64, 16
TENANTS = 8
TOKENS_PER_MICROBATCH = 4096
ADAM = AdamParams(learning_rate=1e-5)


def tenant(number: int) -> str:
    return f"tenant-{number}"


def rows(tokens: int, seed: int) -> list[Row]:
    """A batch of so many tokens (a multiple of ROW), the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(tokens // ROW):
        ids = torch.randint(100, 1000, (ROW,), generator=generator).tolist()
        count = ROW - PROMPT
        zeros = [0.0] * count
        one = Completion(ids=ids[PROMPT:], weights=[1.0] * count, logprobs=zeros, advantages=zeros)
        made.append(Row(prompt=ids[:PROMPT], completions=[one]))
    return made


def request(number: int, tokens: int) -> Request:
    made = rows(tokens, number)
    return Request(tenant(number), made, Loss(name="CrossEntropy", denominator=float(len(made) * (ROW - PROMPT))))


@dataclass(frozen=True, slots=True)
class Clora:
    """`slots` 1: tenants take turns in it."""

    trainer: Trainer

    @classmethod
    def of(cls, model: Any, *, rank: int, slots: int, tokens_per_microbatch: int = TOKENS_PER_MICROBATCH) -> Clora:
        trainer = Trainer(
            BaseModel.wrap(model),
            model_name="benchmark",
            max_rank=rank,
            tokens_per_microbatch=tokens_per_microbatch,
            host_limit_bytes=1 << 40,
            slots=slots,
        )
        for number in range(TENANTS):
            trainer.create(tenant(number), LoraConfig(rank=rank, alpha=2 * rank, seed=number))
        return cls(trainer)

    def together(self, tenants: int, tokens: int) -> None:
        """A step of each: one pass for all gradients."""
        outcomes = self.trainer.forward_backward_joined([request(n, tokens) for n in range(tenants)])
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        for number in range(tenants):
            self.trainer.optim_step(tenant(number), ADAM)

    def in_turn(self, tenants: int, tokens: int) -> None:
        """A step of each, one tenant after the other."""
        for number in range(tenants):
            one = request(number, tokens)
            self.trainer.forward_backward(one.adapter, one.rows, one.loss)
            self.trainer.optim_step(one.adapter, ADAM)


@dataclass(frozen=True, slots=True)
class Peft:
    """transformers, PEFT and torch.optim.AdamW, as their users write it: one tenant."""

    model: Any
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, model: Any, *, rank: int) -> Peft:
        config = PeftConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        peft = get_peft_model(model, config)
        parameters = [p for p in peft.parameters() if p.requires_grad]
        return cls(peft, torch.optim.AdamW(parameters, lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2)))

    def step(self, tokens: int) -> None:
        ids = torch.tensor([row.prompt + row.completions[0].ids for row in rows(tokens, 0)], device=self.model.device)
        most = max(1, TOGETHER.get(self.model.device.type, TOKENS_PER_MICROBATCH) // ROW)
        for part in torch.split(ids, most):
            logits = self.model(input_ids=part).logits[:, PROMPT - 1 : -1].float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, PROMPT:].flatten(), reduction="sum")
            (loss / (len(ids) * (ROW - PROMPT))).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], ADAM.grad_clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def seconds(work: Callable[..., None], *arguments: int, device: torch.device) -> float:
    """Of the work, to the end of what it asked of the device."""
    _wait(device)
    started = time.perf_counter()
    work(*arguments)
    _wait(device)
    return time.perf_counter() - started


def swap_seconds(trainer: Trainer, repeats: int) -> tuple[list[float], int]:
    """Times of one swap in a trainer with one slot, of an adapter that was trained for another; and the bytes of it."""
    names, vectors = (tenant(0), tenant(1)), ("master", "exp_avg", "exp_avg_sq")
    taken = []
    trainer.store.swap_in(names[:1])
    for repeat in range(repeats):
        (slot,) = trainer.store.swap_in([names[repeat % 2]])
        slot.dirty.update(vectors)  # what an optimizer step leaves
        _wait(trainer.store.device)
        started = time.perf_counter()
        trainer.store.swap_in([names[(repeat + 1) % 2]])
        _wait(trainer.store.device)
        taken.append(time.perf_counter() - started)
    one = trainer.store.state(names[0])
    return taken, 2 * len(vectors) * one.layout.numel * 4


def products_seconds(shapes: Sequence[tuple[int, int]], tokens: int, dtype: torch.dtype, device: torch.device) -> float:
    """The frozen layers' matrix products alone, forward and for the gradient of their inputs; the best of three."""
    best = float("inf")
    inputs = {size: torch.randn(tokens, size, dtype=dtype, device=device) for pair in shapes for size in pair}
    weights = {pair: torch.randn(pair[1], pair[0], dtype=dtype, device=device) for pair in set(shapes)}

    def work() -> None:
        for pair in shapes:
            inputs[pair[0]] @ weights[pair].t()
            inputs[pair[1]] @ weights[pair]

    for _ in range(3):
        best = min(best, seconds(work, device=device))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
