"""The compiled LoRA kernel (`lora_kernel.cpp`): built for this machine's CPU, loaded, and called.

vLLM's stock CPU kernel gathers A and B once per token, and reads the index -1 of a base-model row as the last slot.
Here a layer is one call, whatever adapters are in the batch. The kernel is compiled when the sampler starts (about two
seconds) because only then it is known what the CPU can do; vLLM compiles kernels of its own there too.

Shapes: T rows of the batch, S slots, J packed projections of a layer (3 for qkv, 2 for gate and up), R the largest
rank, I and O input and output features.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from clora_engine.errors import EngineError

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp")
MAX_PROJECTIONS = 4
FORK_FROM_BYTES, FORK_FROM_BYTES_ASLEEP = 1 << 17, 3 << 19
"""Weights to read from which a layer is worth sharing among threads: waking one that sleeps takes tens of microseconds,
one that spins a few."""
Stacked = tuple[torch.Tensor, ...]


def library() -> Path:
    """The compiled kernel, made at the first call, and again should somebody have tidied it away; it is removed when
    this process exits. Raises as `build` does."""
    if not (path := _library()).exists():
        _library.cache_clear()
        path = _library()
    return path


@cache
def _library() -> Path:
    directory = TemporaryDirectory(prefix="clora-kernel-")
    atexit.register(directory.cleanup)
    return build(Path(directory.name))


def build(directory: Path) -> Path:
    """Compiles the kernel into `directory`. Raises EngineError when there is no compiler, or it fails."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise EngineError(
            f"there is no C++ compiler {compiler!r}: sampling on a CPU needs one, for clora's kernel and vLLM's own;"
            " install g++, or name one in CXX",
            reason="SamplerUnavailable",
        )
    library = directory / "lora_kernel.so"
    done = subprocess.run(  # noqa: S603  the compiler that this machine's owner chose
        [compiler, *FLAGS, str(SOURCE), "-o", str(library)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EngineError(
            f"{compiler} could not compile the LoRA kernel: {done.stderr[-2000:]}", reason="SamplerUnavailable"
        )
    return library


class _Layer(ctypes.Structure):
    _fields_ = (
        ("is_bfloat16", ctypes.c_int64),
        ("projections", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64 * MAX_PROJECTIONS),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p * MAX_PROJECTIONS),
        ("used", ctypes.c_void_p),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
    )


class BatchRows:
    """Which rows of the batch use which slot."""

    def __init__(self, slot_of_row_T: NDArray[np.int64]) -> None:
        """slot_of_row_T: int64 [T], -1 for rows of the base model."""
        order = np.argsort(slot_of_row_T, kind="stable")
        ordered = slot_of_row_T[order]
        first = int(np.searchsorted(ordered, 0))
        self.rows = np.ascontiguousarray(order[first:])
        self.slots, starts = np.unique(ordered[first:], return_index=True)
        self.starts = np.append(starts, len(self.rows))
        self.size = len(slot_of_row_T)
        self.struct = _Batch(len(self.slots), self.slots.ctypes.data, self.starts.ctypes.data, self.rows.ctypes.data)
        self.reference = ctypes.byref(self.struct)


class PackedLayer:
    """A layer's LoRA weights of all slots, laid out for the kernel: A as [S, J, R, I], B per projection as [S, R, O].

    vLLM's own stacked tensors (J of [S, 1, R, I], J of [S, 1, O, R]; float32 or bfloat16) become views of them, so
    that what vLLM loads is written straight into these.
    """

    def __init__(self, a_stacked: Stacked, b_stacked: Stacked) -> None:
        self.a = torch.cat(a_stacked, dim=1)
        slots, projections, rank, inputs = self.a.shape
        assert projections <= MAX_PROJECTIONS
        assert self.a.dtype in (torch.float32, torch.bfloat16)
        for j, stacked in enumerate(a_stacked):
            strides = (projections * rank * inputs, rank * inputs, inputs, 1)
            stacked.set_(self.a.untyped_storage(), j * rank * inputs, (slots, 1, rank, inputs), strides)
        self.b = tuple(stacked.squeeze(1).transpose(1, 2).contiguous() for stacked in b_stacked)
        for stacked, packed in zip(b_stacked, self.b, strict=True):
            outputs = packed.shape[2]
            stacked.set_(
                packed.untyped_storage(), 0, (slots, 1, outputs, rank), (rank * outputs, rank * outputs, 1, outputs)
            )
        self.inputs, self.width = inputs, sum(packed.shape[2] for packed in self.b)
        self._used = np.full((slots, projections), -1, dtype=np.int64)
        self.struct = _Layer(
            self.a.dtype == torch.bfloat16,
            projections,
            rank,
            inputs,
            (ctypes.c_int64 * MAX_PROJECTIONS)(*(packed.shape[2] for packed in self.b)),
            self.a.data_ptr(),
            (ctypes.c_void_p * MAX_PROJECTIONS)(*(packed.data_ptr() for packed in self.b)),
            self._used.ctypes.data,
        )
        self.reference = ctypes.byref(self.struct)

    def forget(self, slots: Sequence[int]) -> None:
        """These slots hold other weights than before: their ranks must be looked up again."""
        self._used[slots] = -1


class LoraKernel:
    """The loaded kernel."""

    def __init__(self, library: Path) -> None:
        self._add = ctypes.CDLL(str(library)).clora_add_lora
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._add.argtypes = (pointer, pointer, pointer, size, pointer, size, ctypes.c_float, ctypes.c_int, size)
        self._add.restype = None
        self._threads = torch.get_num_threads()
        asleep = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        self._fork_from = FORK_FROM_BYTES_ASLEEP if asleep else FORK_FROM_BYTES

    def add(self, y: torch.Tensor, x: torch.Tensor, layer: PackedLayer, scale: float, batch: BatchRows) -> None:
        """y [T, sum of O] += scale · x [T, I] @ A @ B in place, each row of the batch with its own slot's A and B.

        Both are of the layer's dtype, with contiguous rows; sums are taken in float32. Rows that the batch does not
        know, because vLLM pads a batch, keep their values.
        """
        assert x.stride(1) == y.stride(1) == 1
        assert batch.size <= x.shape[0] <= y.shape[0]
        assert (x.shape[1], y.shape[1]) == (layer.inputs, layer.width)
        assert x.dtype == y.dtype == layer.a.dtype
        self._add(
            *(layer.reference, batch.reference, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)),
            *(scale, self._threads, self._fork_from),
        )
