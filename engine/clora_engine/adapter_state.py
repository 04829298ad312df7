"""One adapter's state on the host, or in a file while it is cold."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from clora_engine.errors import EngineError
from clora_engine.lora import Layout
from clora_engine.types import LoraConfig

MASTER, GRAD, EXP_AVG, EXP_AVG_SQ = "master", "grad", "exp_avg", "exp_avg_sq"
VECTORS = (MASTER, GRAD, EXP_AVG, EXP_AVG_SQ)
FLOAT_BYTES = 4


@dataclass(slots=True)
class AdapterState:
    """One adapter on the host. `vectors` holds the four flat vectors (FP32, layout.numel), or nothing while they are in
    the file `cold`; `step` counts optimizer steps. While `grad_is_zero` the gradient vector's contents mean nothing: it
    is zero without being written. One that is `frozen` is never trained and has the master weights alone."""

    config: LoraConfig
    layout: Layout
    vectors: dict[str, Tensor]
    step: int = 0
    grad_is_zero: bool = True
    cold: IO[bytes] | None = None
    frozen: bool = False

    @classmethod
    def zeros(cls, config: LoraConfig, layout: Layout, *, pinned: bool, frozen: bool = False) -> AdapterState:
        """A state of zeros: initialise or fill `vectors["master"]` next."""
        state = cls(config, layout, {}, frozen=frozen)
        state.vectors = state._allocate(pinned=pinned)
        return state

    def _allocate(self, *, pinned: bool) -> dict[str, Tensor]:
        numel = self.layout.numel
        return {name: torch.zeros(numel, dtype=torch.float32, pin_memory=pinned) for name in _vectors(self.frozen)}

    @property
    def host_bytes(self) -> int:
        """What it takes in host memory when it is there."""
        return state_bytes(self.layout, frozen=self.frozen)

    @property
    def scale(self) -> float:
        return self.config.alpha / self.config.rank

    def cool(self, directory: Path) -> None:
        """Host -> file. An OSError passes through and leaves it on the host."""
        file: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - as long as the adapter is cold
        try:
            for name in self._kept():
                file.write(_raw(self.vectors[name]))
            file.flush()
        except BaseException:
            file.close()
            raise
        self.cold, self.vectors = file, {}

    def warm(self, *, pinned: bool) -> None:
        """File -> host."""
        assert self.cold is not None
        vectors = self._allocate(pinned=pinned)
        self.cold.seek(0)
        for name in self._kept():
            target = _raw(vectors[name])
            if self.cold.readinto(target) != len(target):  # type: ignore[attr-defined]
                raise EngineError("an adapter's spilled state is truncated", reason="StorageFailed")
        self.cold.close()
        self.cold, self.vectors = None, vectors

    def _kept(self) -> list[str]:
        return [name for name in _vectors(self.frozen) if not (name == GRAD and self.grad_is_zero)]


def _raw(vector: Tensor) -> memoryview:
    """The vector's own bytes."""
    return memoryview(vector.numpy()).cast("B")  # type: ignore[arg-type]  # numpy's arrays are buffers


def _vectors(frozen: bool) -> tuple[str, ...]:
    return (MASTER,) if frozen else VECTORS


def state_bytes(layout: Layout, *, frozen: bool = False) -> int:
    """Host memory of one adapter of this layout; a slot's buffers take as much on the device as one that is trained."""
    return len(_vectors(frozen)) * layout.numel * FLOAT_BYTES
