"""The trainer: forward_backward accumulates a gradient, optim_step applies it, for any number of adapters in turn.

One frozen base model, one AdapterStore. Each call names its adapter, which is swapped into its slot if it is not there;
its gradient stays with it until its own optim_step, whatever other adapters do in between. With the same batches,
shapes and threads an adapter's numbers are the same bit for bit whether it trains alone or between others.

A call that fails (a bad batch, memory that ran out) leaves the adapter as it was before the call.

Left out for now: several adapters in one pass, and more than one device.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from clora_engine import peft_io
from clora_engine.errors import CapacityError, EngineError, UserError
from clora_engine.lora import Layout, ModuleShape, initialise, match_targets, rank_bucket
from clora_engine.losses import TrainedTokens, loss_sum, metric_sums
from clora_engine.store import EXP_AVG, EXP_AVG_SQ, GRAD, MASTER, VECTORS, AdapterState, AdapterStore, Slot
from clora_engine.trainer_base import BaseModel
from clora_engine.trainer_packing import MicroBatch, check_loss, check_rows, micro_batches, trained_selection
from clora_engine.types import AdamParams, AdapterInfo, ForwardBackwardResult, LoraConfig, Loss, OptimResult, Row

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Trainer:
    """Serves one command at a time on one device.

    base: the wrapped model. model_name: what exports name as their base model. max_rank: the highest rank accepted.
    tokens_per_microbatch: positions computed in one pass, padding included; a prompt and a completion of it must fit.
    host_limit_bytes: for all adapters.
    """

    def __init__(
        self, base: BaseModel, *, model_name: str, max_rank: int, tokens_per_microbatch: int, host_limit_bytes: int
    ) -> None:
        self._base = base
        self._model_name = model_name
        self._max_rank = max_rank
        self._tokens_per_microbatch = tokens_per_microbatch
        self._layouts: dict[tuple[tuple[ModuleShape, ...], int], Layout] = {}
        self.store = AdapterStore(
            device=base.device,
            slot_capacity=lambda bucket: self._layout(base.modules, bucket).numel,
            host_limit_bytes=host_limit_bytes,
        )
        self._bound: tuple[Slot, Layout, float] | None = None

    # ------------------------------------------------------------------------------------- life of an adapter

    def create(self, adapter: str, config: LoraConfig) -> AdapterInfo:
        """A new adapter at its start (B zero, so it equals the base model).

        Raises UserError for a config that does not fit the base model, CapacityError when the host is full, and
        EngineError (AdapterExists) when the name is taken.
        """
        if adapter in self.store:
            raise EngineError(f"the trainer already has an adapter {adapter!r}", reason="AdapterExists")
        state = self.store.new_state(config, self._layout_for(config))
        initialise(state.layout, config, state.vectors[MASTER])
        self.store.put(adapter, state)
        return self._info(state)

    def load(self, adapter: str, directory: Path, *, optimizer: bool, config: LoraConfig | None = None) -> AdapterInfo:
        """An adapter from a PEFT directory, with its optimizer state or with a fresh one; it replaces an adapter of
        this name once everything is read and checked. With `config`, the directory must hold an adapter of its rank,
        alpha and target modules.

        Raises CheckpointError (names file and tensor) when files are missing or damaged, UserError when the adapter is
        of a kind, rank or shape that is not trained here.
        """
        found = peft_io.read_config(directory)
        layout = self._layout_for(found)
        if config is not None:
            self._check_same(found, config)
            found = LoraConfig(
                rank=config.rank, alpha=config.alpha, target_modules=config.target_modules, seed=config.seed
            )
        state = self.store.new_state(found, layout, replacing=adapter)
        peft_io.read_adapter(directory, state)
        if optimizer:
            peft_io.read_optimizer(directory, state)
        self.store.put(adapter, state)
        return self._info(state)

    def save(self, adapter: str, directory: Path, *, optimizer: bool) -> None:
        """Writes the adapter as a PEFT directory, and its optimizer state if asked; made if absent, files fsynced."""
        peft_io.write(
            directory,
            self.store.sync(adapter),
            model_name=self._model_name,
            available=self._base.modules,
            optimizer=optimizer,
        )

    def export(self, adapter: str, directory: Path) -> None:
        """Writes the adapter as the sampler wants it (peft_io.write_version); `directory` is made if absent."""
        peft_io.write_version(
            directory, self.store.sync(adapter), model_name=self._model_name, available=self._base.modules
        )

    def delete(self, adapter: str) -> None:
        """Forgets the adapter; nothing of it remains in its slot."""
        self.store.delete(adapter)

    # ------------------------------------------------------------------------------------- training

    def forward_backward(self, adapter: str, rows: Sequence[Row], loss: Loss) -> ForwardBackwardResult:
        """Adds the gradient of `loss` over `rows` to the adapter's; all or nothing.

        Raises UserError for a bad batch and CapacityError when the device's memory does not hold it.
        """
        started = time.perf_counter()
        check_loss(loss)
        self._check(rows)
        if not any(weight for row in rows for completion in row.completions for weight in completion.weights):
            raise UserError("no token of the batch has a weight: there is nothing to train on", field="rows")
        batches = micro_batches(rows, self._tokens_per_microbatch)
        state = self.store.state(adapter)
        before = None if state.grad_is_zero else self.store.sync(adapter).vectors[GRAD]
        slot = self._activate(adapter)
        state.grad_is_zero = False
        try:
            sums, trained, tokens = self._accumulate(batches, rows, loss)
        except torch.OutOfMemoryError as error:
            self._restore_gradient(state, slot, before)
            raise CapacityError(
                f"the device's memory does not hold {max(batch.tokens for batch in batches)} tokens at once; lower "
                "trainer.tokensPerMicroBatch or the lengths of prompts and completions",
                reason="TrainerOutOfMemory",
            ) from error
        except BaseException:
            self._restore_gradient(state, slot, before)
            raise
        slot.dirty.add(GRAD)
        return ForwardBackwardResult(
            loss=sums.pop("loss"),
            metrics={name: value / trained for name, value in sums.items()},
            tokens=tokens,
            seconds=time.perf_counter() - started,
        )

    def forward(self, adapter: str, rows: Sequence[Row], *, temperature: float = 1.0) -> list[list[list[float]]]:
        """Log-probs of every completion token, nats: row -> completion -> token. Weights play no part."""
        check_loss(Loss(name="CrossEntropy", denominator=1.0, temperature=temperature))
        self._check(rows)
        result: list[list[list[float]]] = [[[] for _ in row.completions] for row in rows]
        self._activate(adapter)
        with torch.no_grad():
            for batch in micro_batches(rows, self._tokens_per_microbatch):
                everything = torch.arange(len(batch.target_T))
                logprobs = self._base.logprobs(batch, everything, temperature)[0].tolist()
                for place in batch.places:
                    length = len(rows[place.row].completions[place.completion].ids)
                    result[place.row][place.completion] = logprobs[place.start : place.start + length]
        return result

    def optim_step(self, adapter: str, adam: AdamParams) -> OptimResult:
        """One AdamW step over the adapter's flat vector with the gradient so far, which is zero afterwards.

        A gradient with a non-finite norm is dropped: nothing else changes and the result says `skipped`.
        """
        started = time.perf_counter()
        check_adam(adam)
        state = self.store.state(adapter)
        slot = self._activate(adapter)
        master, grad, exp_avg, exp_avg_sq = (slot.vector(name, state.layout) for name in VECTORS)
        norm = float(torch.linalg.vector_norm(grad))
        finite = math.isfinite(norm)
        if finite:
            if 0 < adam.grad_clip_norm < norm:
                grad.mul_(adam.grad_clip_norm / (norm + CLIP_EPS))
            _adamw(master, grad, exp_avg, exp_avg_sq, state.step, adam)
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
        limit = min(self._base.max_positions, self._tokens_per_microbatch)
        check_rows(rows, vocabulary=self._base.vocabulary, max_positions=limit)

    def _accumulate(
        self, batches: list[MicroBatch], rows: Sequence[Row], loss: Loss
    ) -> tuple[dict[str, float], int, int]:
        """Backward through every micro-batch: sums of the loss and the metrics, tokens trained, positions computed."""
        sums, trained, tokens = defaultdict[str, float](float), 0, 0
        for batch in batches:
            done = self._backward(batch, rows, loss)
            if done is not None:
                for name, value in done[0].items():
                    sums[name] += value
                trained += done[1]
                tokens += batch.tokens
        return sums, trained, tokens

    def _backward(self, batch: MicroBatch, rows: Sequence[Row], loss: Loss) -> tuple[dict[str, float], int] | None:
        """One pass: the loss's and the metrics' sums over the batch's trained tokens, and how many these are."""
        chosen = trained_selection(batch, rows)
        if chosen is None:
            return None
        logprobs_H, entropies_H = self._base.logprobs(batch, chosen.head_H, loss.temperature)
        index_N = chosen.index_N.to(logprobs_H.device)
        logprobs_N, entropies_N = logprobs_H[index_N], entropies_H[index_N]
        tokens = TrainedTokens(*chosen.columns_3N.to(logprobs_N))
        loss_value = loss_sum(loss, logprobs_N, tokens)
        loss_value.backward()  # type: ignore[no-untyped-call]
        sums = {"loss": loss_value.detach().double()} | metric_sums(loss, logprobs_N, entropies_N, tokens)
        return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)), len(index_N)

    def _activate(self, adapter: str) -> Slot:
        """Swaps the adapter in and points the LoRA layers at its slot."""
        slot, state = self.store.swap_in(adapter), self.store.state(adapter)
        target = (slot, state.layout, state.scale)
        if self._bound is None or self._bound[0] is not slot or self._bound[1:] != target[1:]:
            matrices = slot.matrices(state.layout)
            for name, layer in self._base.layers.items():
                if name in matrices:
                    layer.bind(*matrices[name], state.scale)
                else:
                    layer.unbind()
            self._bound = target
        return slot

    def _restore_gradient(self, state: AdapterState, slot: Slot, before: Tensor | None) -> None:
        grad = slot.vector(GRAD, state.layout)
        if before is None:
            grad.zero_()
            state.grad_is_zero = True
        else:
            grad.copy_(before)

    def _layout_for(self, config: LoraConfig) -> Layout:
        if not 1 <= config.rank <= self._max_rank:
            raise UserError(f"lora.rank is {config.rank}; this engine takes 1 to {self._max_rank}", field="lora.rank")
        if config.alpha < 1:
            raise UserError(f"lora.alpha is {config.alpha}; it must be at least 1", field="lora.alpha")
        return self._layout(match_targets(config.target_modules, self._base.modules), rank_bucket(config.rank))

    def _layout(self, modules: tuple[ModuleShape, ...], bucket: int) -> Layout:
        # One object per layout, so that its placements are worked out once.
        return self._layouts.setdefault((modules, bucket), Layout(modules, bucket))

    def _check_same(self, found: LoraConfig, wanted: LoraConfig) -> None:
        for name in ("rank", "alpha"):
            if getattr(found, name) != getattr(wanted, name):
                raise UserError(
                    f"the saved adapter has {name} {getattr(found, name)}, the experiment lora.{name} "
                    f"{getattr(wanted, name)}; they must be the same",
                    field=f"lora.{name}",
                )
        if self._layout_for(found).modules != self._layout_for(wanted).modules:
            raise UserError(
                "the saved adapter and the experiment's lora.targetModules name different modules",
                field="lora.targetModules",
            )

    def _info(self, state: AdapterState) -> AdapterInfo:
        return AdapterInfo(
            parameters=state.layout.parameters(state.config.rank), host_bytes=state.host_bytes, step=state.step
        )


def check_adam(adam: AdamParams) -> None:
    """Raises UserError for AdamW settings without meaning."""
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        value = getattr(adam, name)
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"adam.{name} is {value}; it must be a finite number of at least 0", field=f"adam.{name}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(adam, name) < 1:
            raise UserError(f"adam.{name} is {getattr(adam, name)}; it must be in [0, 1)", field=f"adam.{name}")
    if not (math.isfinite(adam.eps) and adam.eps > 0):
        # At 0 the padding's update would be 0/0.
        raise UserError(f"adam.eps is {adam.eps}; it must be a finite number above 0", field="adam.eps")


def _adamw(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, adam: AdamParams) -> None:
    with torch.no_grad():
        adamw(
            [master],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [torch.tensor(float(step), device=master.device)],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
