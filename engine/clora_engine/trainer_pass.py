"""One forward and backward pass per micro-batch, for the calls of one or several adapters together.

All rows share the base model's products and the output head's; each call has its own loss, denominator, temperature and
metrics over its own tokens, and its gradient arrives in its own slot. Losses are never added up: a call whose loss is
not a number spoils itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from clora_engine.losses import TrainedTokens, loss_sum, metric_sums
from clora_engine.trainer_base import BaseModel
from clora_engine.trainer_packing import MicroBatch, plain_tokens, trained_selection
from clora_engine.types import ForwardBackwardResult, Loss, Row


@dataclass(frozen=True, slots=True)
class Request:
    """One forward_backward call."""

    adapter: str
    rows: Sequence[Row]
    loss: Loss


@dataclass(slots=True)
class Totals:
    """One call's sums of loss and metrics over `trained` tokens; `tokens` positions were computed, padding included."""

    sums: dict[str, float] = field(default_factory=dict)
    trained: int = 0
    tokens: int = 0

    def add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def result(self, request: Request, *, seconds: float, adapters: int) -> ForwardBackwardResult:
        return ForwardBackwardResult(
            loss=self.sums["loss"],
            metrics={name: value / self.trained for name, value in self.sums.items() if name != "loss"},
            tokens=self.tokens,
            plain_tokens=plain_tokens(request.rows),
            adapters=adapters,
            seconds=seconds,
        )


def accumulate(base: BaseModel, batches: Sequence[MicroBatch], requests: Sequence[Request]) -> list[Totals]:
    """Backward through every micro-batch; `batches` were cut from the rows of `requests` (trained ones only), and their
    adapters are bound to `base` in the same order."""
    totals = [Totals() for _ in requests]
    for batch in batches:
        if not batch.parts:
            base.keep_step(batch)
            continue
        for call, sums, trained in _backward(base, batch, requests):
            for name, value in sums.items():
                totals[call].add(name, value)
            totals[call].trained += trained
        for part in batch.parts:
            totals[part.call].tokens += (part.row_stop - part.row_start) * batch.ids_BL.shape[1]
    return totals


def add_up(ranks: Sequence[Sequence[Totals]]) -> list[Totals]:
    """The calls' totals over all ranks."""
    totals = [Totals() for _ in ranks[0]]
    for share in ranks:
        for total, part in zip(totals, share, strict=True):
            for name, value in part.sums.items():
                total.add(name, value)
            total.trained += part.trained
            total.tokens += part.tokens
    return totals


def _backward(
    base: BaseModel, batch: MicroBatch, requests: Sequence[Request]
) -> list[tuple[int, dict[str, float], int]]:
    """One pass: for each call in it, its sums over the batch's trained tokens, and how many these are."""
    chosen = []
    for part in batch.parts:
        selection = trained_selection(part, requests[part.call].rows)
        assert selection is not None, "a completion without any weight was computed"
        chosen.append((part.call, selection))
    temperature_H = torch.cat(
        [s.columns_3N.new_full(s.head_H.shape, requests[call].loss.temperature) for call, s in chosen]
    )
    logprobs_H, entropies_H = base.logprobs(batch, torch.cat([s.head_H for _, s in chosen]), temperature_H)
    values, sums, first = [], [], 0
    for call, selection in chosen:
        loss = requests[call].loss
        index_N = (selection.index_N + first).to(logprobs_H.device)
        first += len(selection.head_H)
        tokens = TrainedTokens(*selection.columns_3N.to(logprobs_H))
        logprobs_N = logprobs_H[index_N]
        value = loss_sum(loss, logprobs_N, tokens)
        values.append(value)
        sums.append({"loss": value.detach().double()} | metric_sums(loss, logprobs_N, entropies_H[index_N], tokens))
    torch.autograd.backward(values)
    # One transfer for all numbers of the pass.
    numbers = iter(torch.stack([number for each in sums for number in each.values()]).tolist())
    return [
        (call, {name: next(numbers) for name in each}, len(selection.index_N))
        for (call, selection), each in zip(chosen, sums, strict=True)
    ]
