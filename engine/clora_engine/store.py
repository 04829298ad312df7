"""AdapterStore: the state of every adapter on the host, and the slots in which adapters live on the trainer's device.

An adapter is in one of three states. On the **host**: four flat FP32 vectors (master weights, gradient, both Adam
moments; pinned where there is a GPU), of a frozen one the first alone, and its step count. **Live**: also in one of
the K slots, where it is trained; a swap is a handful of large copies, whatever the number of matrices. Only what
changed is copied back, and only when another adapter needs the slot or somebody reads the host copy. **Cold**: past the
host limit, the adapters that were not used for longest are in files, and come back bit for bit.

Every slot takes any adapter that the engine admits. Tenants use slots one after the other, so a slot is overwritten at
every change of tenant as far as anything was ever written: nothing of one tenant's numbers is left for the next.

On a GPU copies run on a stream of their own, with one slot more than a pass may use: `prefetch` fills it, and writes
back what it held, while the passes before it are computed. On a CPU a swap is a copy within memory, overlaps nothing,
and `prefetch` does nothing.

Files of cold adapters have no name (O_TMPFILE), so that they are nobody else's to read and are gone with the process,
however it ends. They are not synced: no adapter outlives the process, commits are elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from clora_engine.adapter_state import GRAD, MASTER, VECTORS, AdapterState, state_bytes
from clora_engine.errors import CapacityError, EngineError
from clora_engine.lora import Layout
from clora_engine.types import LoraConfig


@dataclass(eq=False)
class Slot:
    """Device buffers for one live adapter, large enough for any that is admitted.

    `matrices` are leaves over the master buffer whose .grad lie over the gradient buffer, so that backward passes
    accumulate straight into it. `dirty` names the vectors that differ from the owner's host copy. Beyond `written` the
    buffers hold zeros. `filled`: when its copies are done, on a GPU.
    """

    buffers: dict[str, Tensor]
    owner: str | None = None
    dirty: set[str] = field(default_factory=set)
    written: int = 0
    filled: torch.cuda.Event | None = None
    _views: dict[Layout, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    @classmethod
    def allocate(cls, floats: int, device: torch.device) -> Slot:
        return cls({name: torch.zeros(floats, dtype=torch.float32, device=device) for name in VECTORS})

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

    def fill(self, state: AdapterState) -> None:
        """Overwrites all that was ever written with this state."""
        used, before = state.layout.numel, self.written
        self.written = max(used, before)
        for name, buffer in self.buffers.items():
            buffer[used:before].zero_()
            if name not in state.vectors or (name == GRAD and state.grad_is_zero):
                buffer[:used].zero_()
            else:
                buffer[:used].copy_(state.vectors[name], non_blocking=True)
        self.written = used
        self.dirty.clear()

    def clear(self) -> None:
        """Zeroes every buffer to its end; the slot has no owner afterwards."""
        for buffer in self.buffers.values():
            buffer.zero_()
        self.owner, self.written = None, 0
        self.dirty.clear()


class AdapterStore:
    """All adapters of one trainer process. Not thread-safe: the trainer serves one command at a time.

    slots: adapters that a pass may use together. slot_floats: what one vector of the largest adapter takes.
    host_limit_bytes: the most that adapters together may take in host memory. spill_directory: where the others go;
    without one they are refused.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        slots: int,
        slot_floats: int,
        host_limit_bytes: int,
        spill_directory: Path | None = None,
    ) -> None:
        self.device = device
        self.pinned = device.type == "cuda"
        self._slots: list[Slot] = []
        self._slot_floats = slot_floats
        self._host_limit_bytes = host_limit_bytes
        self._spill_directory = spill_directory
        self._states: dict[str, AdapterState] = {}  # in the order of use, the latest last
        self.slots = slots
        self._in_pass: frozenset[str] = frozenset()
        self._copies = torch.cuda.Stream(device) if self.pinned else None  # type: ignore[no-untyped-call]

    @property
    def slots(self) -> int:
        """Adapters that a pass may use together. With fewer than before, adapters leave the slots that go. All are
        allocated at once: device memory that is missing is missing here, and not in the pass of some tenant."""
        return self._capacity - self.pinned

    @slots.setter
    def slots(self, slots: int) -> None:
        self._capacity = slots + self.pinned  # one to prefetch into
        for slot in self._slots[self._capacity :]:
            if slot.owner is not None:
                self.sync(slot.owner)
        del self._slots[self._capacity :]
        while len(self._slots) < self._capacity:
            self._slots.append(Slot.allocate(self._slot_floats, self.device))

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._states

    @property
    def host_bytes(self) -> int:
        """Host memory that the adapters take that are not cold."""
        return sum(state.host_bytes for state in self._states.values() if state.cold is None)

    # ------------------------------------------------------------------------------------- adapters

    def new_state(
        self, config: LoraConfig, layout: Layout, *, replacing: str | None = None, frozen: bool = False
    ) -> AdapterState:
        """Allocates a state that fits the limit (counting without the adapter it will replace) but is not stored yet.

        Raises CapacityError when the host limit would be passed and nothing can be spilled.
        """
        replaced = self._states.get(replacing) if replacing else None
        freed = replaced.host_bytes if replaced is not None and replaced.cold is None else 0
        self._make_room(state_bytes(layout, frozen=frozen) - freed, keep={replacing} if replacing else set())
        return AdapterState.zeros(config, layout, pinned=self.pinned, frozen=frozen)

    def put(self, adapter: str, state: AdapterState) -> None:
        """Stores a state under this name; a state that had the name is gone, in its slot too."""
        if adapter in self._states:
            self.delete(adapter)
        self._states[adapter] = state

    def state(self, adapter: str) -> AdapterState:
        """The adapter's record. Its vectors may be older than the slot's, or cold: see `sync`."""
        try:
            return self._states[adapter]
        except KeyError:
            raise EngineError(f"the trainer has no adapter {adapter!r}", reason="AdapterNotFound") from None

    def delete(self, adapter: str) -> None:
        """Forgets the adapter and zeroes its slot."""
        state = self.state(adapter)
        slot = self._slot_of(adapter)
        if slot is not None:
            with self._copying(slot):
                slot.clear()
        if state.cold is not None:
            state.cold.close()
        del self._states[adapter]

    def _make_room(self, needed: int, keep: Collection[str]) -> None:
        """Spills the adapters that were not used for longest until `needed` more bytes fit into host memory."""
        limit, warm = self._host_limit_bytes, {n: s.host_bytes for n, s in self._states.items() if s.cold is None}
        if self._spill_directory is not None and sum(warm[n] for n in warm if n in keep) + needed <= limit:
            for adapter in [name for name in warm if name not in keep]:
                if self.host_bytes + needed <= limit:
                    break
                self._spill(adapter, self._spill_directory)
        if self.host_bytes + needed > limit:
            raise CapacityError(
                f"adapters need {needed} more bytes of host memory, and {self.host_bytes} of {limit} are taken; "
                "delete an adapter, choose a lower rank, or raise the trainer's host limit"
            )

    def _spill(self, adapter: str, directory: Path) -> None:
        state = self.sync(adapter)
        try:
            state.cool(directory)
        except OSError as error:
            raise CapacityError(
                f"the trainer's host limit is reached, and the file for an idle adapter cannot be written: "
                f"{error.strerror}; make room on the engine's storage or raise the host limit"
            ) from error
        slot = self._slot_of(adapter)
        if slot is not None:
            slot.owner = None

    def _used(self, adapter: str, keep: Collection[str] = ()) -> AdapterState:
        """The state, in host memory and last in the order of use. keep: adapters that must not be spilled for it."""
        state = self.state(adapter)
        if state.cold is not None:
            self._make_room(state.host_bytes, keep={adapter, *keep})
            state.warm(pinned=self.pinned)
        self._states[adapter] = self._states.pop(adapter)
        return state

    # ------------------------------------------------------------------------------------- swapping

    def swap_in(self, adapters: Sequence[str]) -> list[Slot]:
        """The slots in which these adapters (at most `slots`) live for the pass to come; what changed of others that
        held them is copied back first."""
        self._in_pass = frozenset(adapters)
        slots = [self._live(adapter) for adapter in adapters]
        for slot in slots:
            if slot.filled is not None:
                torch.cuda.current_stream(self.device).wait_event(slot.filled)
        return slots

    def prefetch(self, adapter: str) -> None:
        """Brings the adapter into the spare slot while the device computes the pass that `swap_in` was called for, to
        be called before that is queued. Does nothing on a CPU, nor for an adapter that is unknown or cold, and never
        asks for memory: the pass is another tenant's."""
        state = self._states.get(adapter)
        if self._copies is not None and state is not None and state.cold is None:
            self._live(adapter)

    def sync(self, adapter: str) -> AdapterState:
        """Copies back what changed in the adapter's slot, so that the host's vectors are current; the adapter stays."""
        state = self._used(adapter)
        slot = self._slot_of(adapter)
        if slot is not None:
            with self._copying(slot):
                self._write_back(slot)
        if self._copies is not None:
            self._copies.synchronize()
        return state

    def _live(self, adapter: str) -> Slot:
        state = self._used(adapter, self._in_pass)
        slot = self._slot_of(adapter)
        if slot is None:
            slot = self._free_slot(adapter)
            with self._copying(slot):
                self._write_back(slot)
                slot.owner = None  # until all of it is the new one's
                slot.fill(state)
                slot.owner = adapter
        return slot

    def _write_back(self, slot: Slot) -> None:
        if slot.owner is None:
            return
        state = self._states[slot.owner]
        for name in sorted(slot.dirty):
            if not (name == GRAD and state.grad_is_zero):
                state.vectors[name].copy_(slot.vector(name, state.layout), non_blocking=True)
        slot.dirty.clear()

    def _slot_of(self, adapter: str) -> Slot | None:
        return next((slot for slot in self._slots if slot.owner == adapter), None)

    def _free_slot(self, adapter: str) -> Slot:
        """One without an owner, or that of the adapter which was not used for longest and is not needed."""
        free = next((slot for slot in self._slots if slot.owner is None), None)
        if free is not None:
            return free
        owners = {slot.owner: slot for slot in self._slots}
        idle = next(name for name in self._states if name in owners and name not in self._in_pass and name != adapter)
        return owners[idle]

    def _copying(self, slot: Slot) -> AbstractContextManager[object]:
        """Copies made within run on their own stream on a GPU, after all that was asked of the device before."""
        return nullcontext() if self._copies is None else _Copying(self._copies, slot, self.device)


class _Copying:
    def __init__(self, stream: torch.cuda.Stream, slot: Slot, device: torch.device) -> None:
        self._stream, self._slot, self._device = stream, slot, device
        self._within = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._within.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._slot.filled = self._stream.record_event()
        self._within.__exit__(*error)
