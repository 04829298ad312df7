"""The adapters of a trainer: made, read, written and forgotten. What trains them is trainer.py's.

Whatever can fail fails on all ranks or on none, and leaves the adapter that was there, and all others, as they were.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from clora_engine import peft_io
from clora_engine.adapter_state import GRAD, MASTER, AdapterState
from clora_engine.errors import EngineError, UserError
from clora_engine.lora import Layout, ModuleShape, initialise, match_targets, rank_bucket
from clora_engine.store import AdapterStore
from clora_engine.trainer_base import BaseModel
from clora_engine.trainer_ranks import Ranks
from clora_engine.types import AdapterInfo, LoraConfig


class _Head(msgspec.Struct, frozen=True):
    """What an AdapterState is beside its vectors."""

    config: LoraConfig
    step: int
    grad_is_zero: bool


class Adapters:
    """Those of one base model, in an AdapterStore.

    base: the wrapped model. model_name: what exports name as their base model. max_rank: the highest rank accepted.
    host_limit_bytes: for all adapters; what is beyond goes to files in spill_directory, or is refused without one.
    slots: adapters on the device at once. ranks: of which this process is one.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        model_name: str,
        max_rank: int,
        host_limit_bytes: int,
        slots: int,
        spill_directory: Path | None,
        ranks: Ranks | None,
    ) -> None:
        self._base = base
        self.ranks = ranks or Ranks()
        self._model_name = model_name
        self.max_rank = max_rank
        self._layouts: dict[tuple[tuple[ModuleShape, ...], int], Layout] = {}
        self.store = AdapterStore(
            device=base.device,
            slots=slots,
            slot_floats=self._layout(base.modules, rank_bucket(max_rank)).numel,
            host_limit_bytes=host_limit_bytes,
            spill_directory=spill_directory,
        )

    @property
    def slots(self) -> int:
        """Adapters that one pass can train."""
        return self.store.slots

    @slots.setter
    def slots(self, slots: int) -> None:
        self.store.slots = slots

    def create(self, adapter: str, config: LoraConfig) -> AdapterInfo:
        """A new adapter at its start (B zero, so it equals the base model).

        Raises UserError for a config that does not fit the base model, CapacityError when the host is full, and
        EngineError (AdapterExists) when the name is taken.
        """
        if adapter in self.store:
            raise EngineError(f"the trainer already has an adapter {adapter!r}", reason="AdapterExists")
        with self.ranks.together():
            state = self.store.new_state(config, self._layout_for(config))
            initialise(state.layout, config, state.vectors[MASTER])
        self.ranks.copy_(state.vectors[MASTER])  # random numbers may differ between kinds of CPUs
        self.store.put(adapter, state)
        return self._info(state)

    def load(
        self,
        adapter: str,
        directory: Path,
        *,
        optimizer: bool,
        config: LoraConfig | None = None,
        frozen: bool = False,
    ) -> AdapterInfo:
        """An adapter from a PEFT directory that rank 0 reads, with its optimizer state or with a fresh one; it replaces
        an adapter of this name once everything is read and checked. With `config`, the directory must hold an adapter
        of its rank, alpha and target modules. frozen: it is there for its log-probs, cannot be trained, and takes a
        quarter of the memory; it has no optimizer state.

        Raises CheckpointError (names file and tensor) when files are missing or damaged, UserError when the adapter is
        of a kind, rank or shape that is not trained here.
        """
        assert not (optimizer and frozen), "what is never trained has no optimizer state"
        state: AdapterState | None = None
        with self.ranks.together():
            if self.ranks.rank == 0:
                state = self._read(adapter, directory, optimizer=optimizer, config=config, frozen=frozen)
        state = self._given(adapter, state, frozen=frozen)
        self.store.put(adapter, state)
        return self._info(state)

    def save(self, adapter: str, directory: Path, *, optimizer: bool) -> None:
        """Writes the adapter as a PEFT directory, and its optimizer state if asked; made if absent, files fsynced."""
        if optimizer:
            self._trainable(adapter)
        with self.ranks.together():
            state = self.store.sync(adapter)
            if optimizer and not state.grad_is_zero:  # each rank has a share of it
                state = replace(state, vectors=state.vectors | {GRAD: state.vectors[GRAD].clone()})
        if optimizer and not state.grad_is_zero:
            self.ranks.sum_(state.vectors[GRAD])
        with self.ranks.together():
            if self.ranks.rank == 0:
                peft_io.write(
                    directory,
                    state,
                    model_name=self._model_name,
                    available=self._base.modules,
                    optimizer=optimizer,
                )

    def export(self, adapter: str, directory: Path) -> None:
        """Writes the adapter as the sampler wants it (peft_io.write_version); `directory` is made if absent."""
        with self.ranks.together():
            state = self.store.sync(adapter)
            if self.ranks.rank == 0:
                peft_io.write_version(directory, state, model_name=self._model_name, available=self._base.modules)

    def delete(self, adapter: str) -> None:
        """Forgets the adapter; nothing of it remains in its slot."""
        self.store.delete(adapter)

    # ------------------------------------------------------------------------------------- inside

    def _read(
        self, adapter: str, directory: Path, *, optimizer: bool, config: LoraConfig | None, frozen: bool
    ) -> AdapterState:
        found = peft_io.read_config(directory)
        layout = self._layout_for(found)
        if config is not None:
            self._check_same(found, config)
            found = LoraConfig(
                rank=config.rank, alpha=config.alpha, target_modules=config.target_modules, seed=config.seed
            )
        state = self.store.new_state(found, layout, replacing=adapter, frozen=frozen)
        peft_io.read_adapter(directory, state)
        if optimizer:
            peft_io.read_optimizer(directory, state)
        return state

    def _given(self, adapter: str, read: AdapterState | None, *, frozen: bool) -> AdapterState:
        """Rank 0's state, on every rank: on another node nobody else may have the directory. read: of rank 0 alone."""
        head = None if read is None else _Head(read.config, read.step, read.grad_is_zero)
        first = self.ranks.gather(head, _Head | None)[0]  # type: ignore[arg-type]  # a union is no type to mypy
        assert first is not None
        with self.ranks.together():
            state = read or self.store.new_state(
                first.config, self._layout_for(first.config), replacing=adapter, frozen=frozen
            )
        state.step, state.grad_is_zero = first.step, first.grad_is_zero
        for name, vector in state.vectors.items():
            if name != GRAD:  # rank 0's share is all of it
                self.ranks.copy_(vector)
        return state

    def _trainable(self, adapter: str) -> None:
        if self.store.state(adapter).frozen:
            raise EngineError(
                f"adapter {adapter!r} is frozen: it cannot be trained and has no optimizer state",
                reason="AdapterFrozen",
            )

    def _layout_for(self, config: LoraConfig) -> Layout:
        if not 1 <= config.rank <= self.max_rank:
            raise UserError(f"lora.rank is {config.rank}; this engine takes 1 to {self.max_rank}", field="lora.rank")
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
