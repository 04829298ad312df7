"""The trainer: forward_backward accumulates a gradient, optim_step applies it, for any number of adapters.

One frozen base model, one AdapterStore. Each call names its adapter, which is swapped into a slot if it is not in one;
its gradient stays with it until its own optim_step, whatever other adapters do in between. With the same batches,
shapes and threads an adapter's numbers are the same bit for bit whether it trains alone or between others. Joined in
one pass with others they are the same up to the rounding of sums: a matrix product of more rows may add in another
order. What the others are given, and even that it is not a number, changes nothing.

A call that fails (a bad batch, memory that ran out) leaves the adapter as it was before the call, and all others too.
A device that fails (trainer_device.py) leaves nothing that could be relied on: that error is raised from any call, and
this trainer is over.

With several devices there is a trainer on each (trainer_ranks.py), and all of them are given the same calls. Each holds
the base model and every adapter; a call's micro-batches are dealt out over them, the gradient is summed in optim_step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from clora_engine.adapter_state import EXP_AVG, EXP_AVG_SQ, GRAD, MASTER, VECTORS
from clora_engine.errors import CapacityError, EngineError, UserError
from clora_engine.lora import Layout
from clora_engine.store import Slot
from clora_engine.trainer_adam import adam_step, check_adam
from clora_engine.trainer_adapters import Adapters
from clora_engine.trainer_base import BaseModel
from clora_engine.trainer_device import is_device_failure
from clora_engine.trainer_lora import Live
from clora_engine.trainer_memory import is_out_of_memory
from clora_engine.trainer_packing import MicroBatch, check_loss, check_rows, longest, micro_batches, plain_tokens
from clora_engine.trainer_pass import Request, Totals, accumulate, add_up
from clora_engine.trainer_ranks import Ranks
from clora_engine.types import AdamParams, ForwardBackwardResult, Loss, OptimResult, Row

log = logging.getLogger("clora.trainer")

T = TypeVar("T")

TOGETHER = {"cpu": 1024}
"""Positions by device type, beyond which a pass is not faster: on a CPU it is slower, for activations leave the caches.
A GPU is faster with all that fits."""


class Trainer(Adapters):
    """Serves one command at a time on one device.

    tokens_per_microbatch: positions computed in one pass, padding included; a prompt and a completion of it must fit.
    slots: adapters on the device at once, and so in one pass. share: shared prompts and merged twins; without it every
    completion is a row of its own (for comparisons: it only costs). For the others see Adapters.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        model_name: str,
        max_rank: int,
        tokens_per_microbatch: int,
        host_limit_bytes: int,
        slots: int = 1,
        spill_directory: Path | None = None,
        share: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(
            base,
            model_name=model_name,
            max_rank=max_rank,
            host_limit_bytes=host_limit_bytes,
            slots=slots,
            spill_directory=spill_directory,
            ranks=ranks,
        )
        self.tokens_per_microbatch = tokens_per_microbatch
        self._share = share
        self._together = TOGETHER.get(base.device.type)
        self._bound: list[tuple[Slot, Layout, float]] = []

    @property
    def longest_row(self) -> int:
        """The longest prompt and completion together, in tokens."""
        return min(self._base.max_positions, self.tokens_per_microbatch)

    def forward_backward(self, adapter: str, rows: Sequence[Row], loss: Loss) -> ForwardBackwardResult:
        """Adds the gradient of `loss` over `rows` to the adapter's; all or nothing.

        Raises UserError for a bad batch and CapacityError when the device's memory does not hold its longest row.
        """
        (outcome,) = self.forward_backward_joined([Request(adapter, rows, loss)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def forward_backward_joined(
        self, requests: Sequence[Request], *, then: str | None = None
    ) -> list[ForwardBackwardResult | Exception]:
        """forward_backward for several adapters in one pass, at most as many as there are slots; each adapter once.
        then: the adapter that will be asked for next, to be swapped in meanwhile.

        An answer for each: its result, or what forward_backward would raise. When the joined pass fails, nothing of it
        remains and every call is made alone, so that a call fails by its own fault only. Its seconds are those of the
        pass that made it.
        """
        assert len({request.adapter for request in requests}) == len(requests) <= self.slots
        outcomes: list[ForwardBackwardResult | Exception | None] = [self._fault(request) for request in requests]
        good = [n for n, outcome in enumerate(outcomes) if outcome is None]
        if len(good) > 1:
            try:
                results = self._run([requests[n] for n in good], self.tokens_per_microbatch, then)
            except Exception as error:
                if is_device_failure(error):
                    raise
                log.info("a pass of %d adapters failed and is made one by one: %s", len(good), error)
            else:
                for n, result in zip(good, results, strict=True):
                    outcomes[n] = result
                good = []
            # Out of the handler the failed pass's tensors are free, and may go back to the device.
            if good:
                self._free_device()
        for n in good:
            try:
                outcomes[n] = self._alone(requests[n], then)
            except Exception as error:
                if is_device_failure(error):
                    raise
                outcomes[n] = error
        return [outcome for outcome in outcomes if outcome is not None]

    def forward(self, adapter: str, rows: Sequence[Row], *, temperature: float = 1.0) -> list[list[list[float]]]:
        """Log-probs of every completion token, nats: row -> completion -> token. Weights play no part.

        Raises UserError for bad rows and CapacityError when the device's memory does not hold the longest of them.
        """
        check_loss(Loss(name="CrossEntropy", denominator=1.0, temperature=temperature))
        self._check(rows)
        return self._smaller(longest(rows), lambda budget: self._logprobs(adapter, rows, budget, temperature))

    def _logprobs(self, adapter: str, rows: Sequence[Row], budget: int, temperature: float) -> list[list[list[float]]]:
        found: list[tuple[int, int, list[float]]] = []  # row, completion, its log-probs
        with self.ranks.together(), self._base.passes(), torch.no_grad():
            self._activate([adapter])
            for batch in self._micro_batches([rows], budget):
                everything = torch.arange(len(batch.target_T))
                logprobs = self._base.logprobs(batch, everything, temperature)[0].tolist()
                for part in batch.parts:
                    for place in part.places:
                        length = len(rows[place.row].completions[place.completion].ids)
                        found.append((place.row, place.completion, logprobs[place.start : place.start + length]))
        result: list[list[list[float]]] = [[[] for _ in row.completions] for row in rows]
        for share in self.ranks.gather(found, list[tuple[int, int, list[float]]]):
            for row, completion, values in share:
                result[row][completion] = values
        return result

    def optim_step(self, adapter: str, adam: AdamParams) -> OptimResult:
        """One AdamW step over the adapter's flat vector with the gradient so far, which is zero afterwards.

        A gradient with a non-finite norm is dropped: nothing else changes and the result says `skipped`.
        """
        started = time.perf_counter()
        check_adam(adam)
        self._trainable(adapter)
        with self.ranks.together():
            (slot,) = self.store.swap_in([adapter])
        state = self.store.state(adapter)
        master, grad, exp_avg, exp_avg_sq = (slot.vector(name, state.layout) for name in VECTORS)
        self.ranks.sum_(grad)
        norm, finite = adam_step(master, grad, exp_avg, exp_avg_sq, state.step, adam)
        if finite:
            state.step += 1
            slot.dirty |= {MASTER, EXP_AVG, EXP_AVG_SQ}
        grad.zero_()
        state.grad_is_zero = True
        slot.dirty.discard(GRAD)
        return OptimResult(step=state.step, grad_norm=norm, skipped=not finite, seconds=time.perf_counter() - started)

    # ------------------------------------------------------------------------------------- inside

    def _check(self, rows: Sequence[Row]) -> None:
        # A sequence longer than a micro-batch would need memory that nobody planned for, and on a CPU running out of
        # memory ends the process for every tenant.
        check_rows(rows, vocabulary=self._base.vocabulary, max_positions=self.longest_row)

    def _fault(self, request: Request) -> EngineError | None:
        """What is wrong with a call before anything is computed."""
        try:
            self._trainable(request.adapter)
            check_loss(request.loss)
            self._check(request.rows)
            if not plain_tokens(request.rows):
                raise UserError("no token of the batch has a weight: there is nothing to train on", field="rows")
        except EngineError as error:
            return error
        return None

    def _micro_batches(
        self, calls: Sequence[Sequence[Row]], budget: int, *, trained_only: bool = False
    ) -> list[MicroBatch]:
        return micro_batches(
            calls,
            budget,
            trained_only=trained_only,
            share=self._share,
            together=self._together,
            deal_to=self.ranks.deal,
        )

    def _alone(self, request: Request, then: str | None) -> ForwardBackwardResult:
        """One call by itself."""
        smallest = longest(request.rows, trained_only=True)
        return self._smaller(smallest, lambda budget: self._run([request], budget, then)[0])

    def _smaller(self, smallest: int, compute: Callable[[int], T]) -> T:
        """What `compute` makes of a micro-batch's size in tokens, the next smaller one wherever memory runs out.
        smallest: the longest row, which cannot be cut. Raises CapacityError when memory does not hold that."""
        budget = self.tokens_per_microbatch
        while True:
            try:
                return compute(budget)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            # Out of the handler the failed pass's tensors are free.
            self._free_device()
            if budget <= smallest:
                raise CapacityError(
                    f"the device's memory does not hold a row of {smallest} tokens, the longest of the batch: shorten "
                    "prompts or completions, or switch on the engine's trainer.gradientCheckpointing",
                    reason="TrainerOutOfMemory",
                )
            budget = max(smallest, budget // 2)
            log.warning("out of memory: tried again with micro-batches of %d tokens", budget)

    def _run(self, requests: Sequence[Request], budget: int, then: str | None) -> list[ForwardBackwardResult]:
        """All calls in the same micro-batches; when it raises, every gradient is as before."""
        started = time.perf_counter()
        with self.ranks.together():
            batches = self._micro_batches([r.rows for r in requests], budget, trained_only=True)
            before = {r.adapter: self._gradient(r.adapter) for r in requests}
            slots = self._activate([r.adapter for r in requests])
        try:
            with self.ranks.together(), self._base.passes():
                for request in requests:
                    self.store.state(request.adapter).grad_is_zero = False
                if then is not None:
                    self.store.prefetch(then)
                totals = accumulate(self._base, batches, requests)
        except BaseException:
            for request, slot in zip(requests, slots, strict=True):
                self._restore_gradient(request.adapter, slot, before[request.adapter])
            raise
        for slot in slots:
            slot.dirty.add(GRAD)
        totals = add_up(self.ranks.gather(totals, list[Totals]))
        seconds = time.perf_counter() - started
        return [t.result(r, seconds=seconds, adapters=len(requests)) for r, t in zip(requests, totals, strict=True)]

    def _activate(self, adapters: Sequence[str]) -> list[Slot]:
        """Swaps the adapters in and points the LoRA layers at their slots."""
        slots = self.store.swap_in(adapters)
        states = [self.store.state(adapter) for adapter in adapters]
        target = [(slot, state.layout, state.scale) for slot, state in zip(slots, states, strict=True)]
        if self._bound != target:
            lives = [Live(s.matrices(state.layout), state.scale) for s, state in zip(slots, states, strict=True)]
            self._base.bind(lives)
            self._bound = target
        return slots

    def _gradient(self, adapter: str) -> Tensor | None:
        """The gradient so far (host), None when it is zero."""
        zero = self.store.state(adapter).grad_is_zero
        return None if zero else self.store.sync(adapter).vectors[GRAD]

    def _restore_gradient(self, adapter: str, slot: Slot, before: Tensor | None) -> None:
        state = self.store.state(adapter)
        grad = slot.vector(GRAD, state.layout)
        if before is None:
            grad.zero_()
            state.grad_is_zero = True
        else:
            grad.copy_(before)

    def _free_device(self) -> None:
        if self._base.device.type == "cuda":
            torch.cuda.empty_cache()
