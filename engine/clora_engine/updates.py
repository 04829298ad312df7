"""The optimizer steps of one training step: a batch in, a changed adapter and its metrics out.

    log-probs of the trainer and of the start, where the algorithm asks for them -> batch
    for each epoch, for each minibatch: forward_backward -> optim_step

The policy as it started is step 0's commit, which is never pruned: it is loaded into the trainer as an adapter of its
own that is never trained, so that its log-probs are exact whatever the experiment started from.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from clora_api.v1alpha1.base import number
from clora_engine.advantages import Batch
from clora_engine.batches import (
    minibatches,
    row_sizes,
    with_entropy_bonus,
    with_importance_weights,
    with_kl_penalty,
)
from clora_engine.journal import Journal
from clora_engine.plan import Plan
from clora_engine.trainer_client import TrainerClient
from clora_engine.types import ForwardBackwardResult, Loss, OptimResult


class Updates:
    """Trains the adapter `uid`, which must be in the trainer."""

    def __init__(self, trainer: TrainerClient, journal: Journal, uid: str) -> None:
        self._trainer = trainer
        self._journal = journal
        self._uid = uid
        self._start = f"{uid}/start"
        self._start_loaded = False

    async def apply(self, plan: Plan, step: int, batch: Batch, temperature: float) -> dict[str, Any]:
        """Trains on a batch that was drawn at `temperature`.

        Returns:
            loss, grad_norm, what the loss measures, each a mean over the optimizer steps; sampler_kl: KL(sampler ‖
            trainer) before the first of them; learning_rate; updates and update_skipped: numbers of optimizer steps
            made and of those whose gradient was not finite; trained_tokens: positions computed; prepare_seconds: the
            forward passes before; wait_trainer_seconds: those after them in which the trainer did not work for this
            experiment.
        """
        adam = plan.adam(step)
        values: dict[str, Any] = {"learning_rate": adam.learning_rate, "trained_tokens": 0.0, "updates": 0.0}
        if not batch.rows:
            return values
        started = time.monotonic()
        sizes = await asyncio.to_thread(row_sizes, batch.rows)
        batch, prepared = await self._prepare(plan, batch, temperature)
        ready = time.monotonic()
        algorithm = plan.spec.algorithm
        results: list[ForwardBackwardResult] = []
        steps: list[OptimResult] = []
        for epoch in range(algorithm.epochs_per_batch):
            seed = f"{plan.spec.data.shuffle_seed}/{step}/{epoch}"
            for part in minibatches(batch, algorithm.minibatches, seed, sizes):
                loss = _loss(plan, part.denominator, temperature)
                results.append(await self._trainer.forward_backward(self._uid, part.rows, loss))
                steps.append(await self._trainer.optim_step(self._uid, adam))
        busy = sum(done.seconds for done in results) + sum(done.seconds for done in steps)
        values |= {
            "prepare_seconds": ready - started,
            "wait_trainer_seconds": max(0.0, time.monotonic() - ready - busy),
        }
        # with importance weights, the loss knows no sampler: its KL is measured before
        return values | _measured(results, steps) | prepared

    async def _prepare(self, plan: Plan, batch: Batch, temperature: float) -> tuple[Batch, dict[str, float]]:
        """The arithmetic takes seconds for a large step, in which all other experiments go on: it has a thread."""
        algorithm = plan.spec.algorithm
        values: dict[str, float] = {}
        if algorithm.max_importance_weight is not None:
            now = await self._trainer.forward(self._uid, batch.rows, temperature=temperature)
            cap = number(algorithm.max_importance_weight)
            batch, values = await asyncio.to_thread(with_importance_weights, batch, now, cap)
        if kl := number(algorithm.kl_coefficient):
            await self._load_start(plan)
            start = await self._trainer.forward(self._start, batch.rows, temperature=temperature)
            batch, values["kl_to_start"] = await asyncio.to_thread(with_kl_penalty, batch, start, kl)
        if entropy := number(algorithm.entropy_coefficient):
            batch = await asyncio.to_thread(with_entropy_bonus, batch, entropy)
        return batch, values

    async def _load_start(self, plan: Plan) -> None:
        if self._start_loaded:
            return
        commit = await asyncio.to_thread(self._journal.read_commit, 0)
        assert commit is not None, "step 0 is committed before any other and never pruned"
        self._start_loaded = True
        await self._trainer.load(self._start, commit.folder, optimizer=False, config=plan.lora, frozen=True)

    async def close(self) -> None:
        """Takes the policy as it started out of the trainer."""
        if self._start_loaded:
            self._start_loaded = False
            await self._trainer.delete(self._start)


def _loss(plan: Plan, denominator: float, temperature: float) -> Loss:
    algorithm = plan.spec.algorithm
    return Loss(
        name=algorithm.loss.value,
        denominator=denominator,
        temperature=temperature,
        clip_low=number(algorithm.clip_low),
        clip_high=number(algorithm.clip_high),
    )


def _measured(results: list[ForwardBackwardResult], steps: list[OptimResult]) -> dict[str, float]:
    if not results:
        return {}
    names = results[0].metrics
    means = {name: statistics.fmean(result.metrics[name] for result in results) for name in names}
    if "kl_k3" in names:
        means["sampler_kl"] = results[0].metrics["kl_k3"]  # before the first optimizer step has changed anything
    made = [step for step in steps if not step.skipped]
    return means | {
        "loss": statistics.fmean(result.loss for result in results),
        "trained_tokens": float(sum(result.tokens for result in results)),
        "grad_norm": statistics.fmean(step.grad_norm for step in made) if made else 0.0,
        "updates": float(len(made)),
        "update_skipped": float(len(steps) - len(made)),
    }
