"""AdapterStore: the state of every adapter on the host, and the slots in which adapters live on the trainer's device.

An adapter's home is host memory: four flat FP32 vectors (master weights, gradient, both Adam moments; pinned where
there is a GPU) and its step count. To be trained it is swapped into the slot of its rank bucket: a handful of large
copies, whatever the number of matrices. Only what changed is copied back, and only when another adapter needs the slot
or somebody reads the host copy.

Tenants share slots one after the other, so a slot is overwritten from end to end at every change of tenant, gaps and
tail included: nothing of one tenant's numbers is left for the next.

Left out for now: more than one slot per bucket, copies that overlap compute, and spilling to disk (a full host is a
clear error).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clora_engine.errors import CapacityError, EngineError
from clora_engine.lora import Layout, rank_bucket
from clora_engine.types import LoraConfig

MASTER, GRAD, EXP_AVG, EXP_AVG_SQ = "master", "grad", "exp_avg", "exp_avg_sq"
VECTORS = (MASTER, GRAD, EXP_AVG, EXP_AVG_SQ)
FLOAT_BYTES = 4


@dataclass(slots=True)
class AdapterState:
    """One adapter on the host. `vectors` holds the four flat vectors (FP32, layout.numel); `step` counts optimizer
    steps. While `grad_is_zero` the gradient vector's contents mean nothing: it is zero without being written."""

    config: LoraConfig
    layout: Layout
    vectors: dict[str, Tensor]
    step: int = 0
    grad_is_zero: bool = True

    @classmethod
    def zeros(cls, config: LoraConfig, layout: Layout, *, pinned: bool) -> AdapterState:
        """A state of zeros: initialise or fill `vectors["master"]` next."""
        vectors = {name: torch.zeros(layout.numel, dtype=torch.float32, pin_memory=pinned) for name in VECTORS}
        return cls(config, layout, vectors)

    @property
    def host_bytes(self) -> int:
        return len(VECTORS) * self.layout.numel * FLOAT_BYTES

    @property
    def scale(self) -> float:
        return self.config.alpha / self.config.rank


@dataclass
class Slot:
    """Device buffers for one live adapter of a rank bucket, large enough for any choice of target modules.

    `matrices` are leaves over the master buffer whose .grad lie over the gradient buffer, so that backward passes
    accumulate straight into it. `dirty` names the vectors that differ from the owner's host copy.
    """

    buffers: dict[str, Tensor]
    owner: str | None = None
    dirty: set[str] = field(default_factory=set)
    _views: dict[Layout, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    @classmethod
    def allocate(cls, capacity: int, device: torch.device) -> Slot:
        return cls({name: torch.zeros(capacity, dtype=torch.float32, device=device) for name in VECTORS})

    def vector(self, name: str, layout: Layout) -> Tensor:
        """The part of a buffer that an adapter of this layout uses (layout.numel)."""
        return self.buffers[name][: layout.numel]

    def matrices(self, layout: Layout) -> dict[str, tuple[Tensor, Tensor]]:
        """Module name -> leaves A (bucket x I) and B (O x bucket), with .grad in place."""
        if layout not in self._views:
            grads = layout.matrices(self.buffers[GRAD])
            leaves = {}
            for name, pair in layout.matrices(self.buffers[MASTER]).items():
                leaf_a, leaf_b = (matrix.detach().requires_grad_() for matrix in pair)
                leaf_a.grad, leaf_b.grad = grads[name]
                leaves[name] = (leaf_a, leaf_b)
            self._views[layout] = leaves
        return self._views[layout]

    def clear(self) -> None:
        """Zeroes every buffer to its end; the slot has no owner afterwards."""
        for buffer in self.buffers.values():
            buffer.zero_()
        self.owner = None
        self.dirty.clear()


class AdapterStore:
    """All adapters of one trainer process. Not thread-safe: the trainer serves one command at a time.

    slot_capacity: rank bucket -> floats that a slot of this bucket must hold (all linear layers targeted).
    host_limit_bytes: the most that all adapters together may take on the host.
    """

    def __init__(self, *, device: torch.device, slot_capacity: Callable[[int], int], host_limit_bytes: int) -> None:
        self.device = device
        self.pinned = device.type == "cuda"
        self._slot_capacity = slot_capacity
        self._host_limit_bytes = host_limit_bytes
        self._states: dict[str, AdapterState] = {}
        self._slots: dict[int, Slot] = {}

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._states

    @property
    def host_bytes(self) -> int:
        """Host memory that all adapters take together."""
        return sum(state.host_bytes for state in self._states.values())

    def new_state(self, config: LoraConfig, layout: Layout, *, replacing: str | None = None) -> AdapterState:
        """Allocates a state that fits the limit (counting without the adapter it will replace) but is not stored yet.

        Raises CapacityError when the host limit would be passed.
        """
        needed = len(VECTORS) * layout.numel * FLOAT_BYTES
        freed = self._states[replacing].host_bytes if replacing in self._states else 0
        held = self.host_bytes - freed
        if held + needed > self._host_limit_bytes:
            raise CapacityError(
                f"the adapter needs {needed} bytes of host memory, and {held} of {self._host_limit_bytes} are taken; "
                "delete an adapter, choose a lower rank, or raise the trainer's host limit"
            )
        return AdapterState.zeros(config, layout, pinned=self.pinned)

    def put(self, adapter: str, state: AdapterState) -> None:
        """Stores a state under this name; a state that had the name is gone, in its slot too."""
        if adapter in self._states:
            self.delete(adapter)
        self._states[adapter] = state

    def state(self, adapter: str) -> AdapterState:
        """The adapter's record. Its vectors may be older than the slot's: see `sync`."""
        try:
            return self._states[adapter]
        except KeyError:
            raise EngineError(f"the trainer has no adapter {adapter!r}", reason="AdapterNotFound") from None

    def delete(self, adapter: str) -> None:
        """Forgets the adapter and zeroes its slot."""
        state = self.state(adapter)
        slot = self._slots.get(state.layout.bucket)
        if slot is not None and slot.owner == adapter:
            slot.clear()
        del self._states[adapter]

    # ------------------------------------------------------------------------------------- swapping

    def swap_in(self, adapter: str) -> Slot:
        """The slot in which the adapter lives now; what changed of another tenant that held it is copied back first."""
        state = self.state(adapter)
        slot = self._slot(state.config.rank)
        if slot.owner == adapter:
            return slot
        if slot.owner is not None:
            self.sync(slot.owner)
        slot.owner = None
        for name, buffer in slot.buffers.items():
            used, tail = buffer[: state.layout.numel], buffer[state.layout.numel :]
            tail.zero_()
            if name == GRAD and state.grad_is_zero:
                used.zero_()
            else:
                used.copy_(state.vectors[name], non_blocking=True)
        slot.owner = adapter
        slot.dirty.clear()
        return slot

    def sync(self, adapter: str) -> AdapterState:
        """Copies back what changed in the adapter's slot, so that the host's vectors are current; the adapter stays."""
        state = self.state(adapter)
        slot = self._slots.get(state.layout.bucket)
        if slot is None or slot.owner != adapter:
            return state
        for name in sorted(slot.dirty):
            if not (name == GRAD and state.grad_is_zero):
                state.vectors[name].copy_(slot.vector(name, state.layout), non_blocking=True)
        if slot.dirty and self.pinned:
            torch.cuda.current_stream(self.device).synchronize()
        slot.dirty.clear()
        return state

    def _slot(self, rank: int) -> Slot:
        bucket = rank_bucket(rank)
        if bucket not in self._slots:
            self._slots[bucket] = Slot.allocate(self._slot_capacity(bucket), self.device)
        return self._slots[bucket]
