"""What the engine and its trainer process say to each other: typed frames over an inherited socket pair.

A frame is its length (4 bytes, big-endian) and a msgpack body. The engine sends one `Request`, the process answers it
with one `Reply`, in order; nothing is pickled. Structs are versioned by being of one installation: the engine starts
its own trainer.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from clora_engine.errors import CapacityError, CheckpointError, EngineError, TrainerDied, TransientError, UserError
from clora_engine.types import AdamParams, LoraConfig, Loss, Row

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = (1 << 32) - 1
# How a trainer's process ends when it was not told to.
EXIT_RANK_LOST = 4
EXIT_DEVICE_FAILED = 5


class Start(msgspec.Struct, frozen=True, tag=True):
    """Always the first command: loads the base model. Answer: StartInfo.

    sampler_copies, sampler_kv_bytes: copies of the base model and bytes of KV cache that a sampler on the CPU takes of
    rank 0's host. host_free_bytes: what was free there before that sampler began to load; None: what is free now.
    """

    model_path: str
    model_name: str
    dtype: str
    device: str
    max_rank: int
    tokens_per_microbatch: int
    host_limit_bytes: int
    slots: int | None = None  # None: as many as a measurement says
    max_adapters: int = 1  # that the engine will ask for
    gradient_checkpointing: bool = False
    spill_directory: str | None = None
    shard_base: bool = False  # over the processes
    sampler_copies: int = 0
    sampler_kv_bytes: int = 0
    host_free_bytes: int | None = None


class StartInfo(msgspec.Struct, frozen=True):
    """base_parameters: scalars of the frozen base model. load_seconds: wall-clock. slots: adapters that one pass can
    train. join_below: calls of fewer tokens than this are faster together."""

    base_parameters: int
    vocabulary: int
    max_positions: int
    linear_layers: int
    load_seconds: float
    slots: int
    join_below: int


class Create(msgspec.Struct, frozen=True, tag=True):
    """Answer: AdapterInfo."""

    adapter: str
    config: LoraConfig


class Load(msgspec.Struct, frozen=True, tag=True):
    """Answer: AdapterInfo."""

    adapter: str
    directory: str
    optimizer: bool
    config: LoraConfig | None
    frozen: bool = False


class ForwardBackward(msgspec.Struct, frozen=True):
    """One call within a Joined. Answer: ForwardBackwardResult."""

    adapter: str
    rows: list[Row]
    loss: Loss


class Joined(msgspec.Struct, frozen=True, tag=True):
    """forward_backward calls of different adapters, at most as many as there are slots, to be computed in one pass.
    Answer: list[Reply], one for each: some may fail.

    calls: encoded ForwardBackward. then: the adapter of the command that waits next, if there is one.
    """

    calls: list[msgspec.Raw]
    then: str | None = None


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Answer: list[list[list[float]]], row -> completion -> token."""

    adapter: str
    rows: list[Row]
    temperature: float


class OptimStep(msgspec.Struct, frozen=True, tag=True):
    """Answer: OptimResult."""

    adapter: str
    adam: AdamParams


class Save(msgspec.Struct, frozen=True, tag=True):
    """Answer: None."""

    adapter: str
    directory: str
    optimizer: bool


class Export(msgspec.Struct, frozen=True, tag=True):
    """Answer: None."""

    adapter: str
    directory: str


class Delete(msgspec.Struct, frozen=True, tag=True):
    """Answer: None."""

    adapter: str


Command = Start | Create | Load | Joined | Forward | OptimStep | Save | Export | Delete


class Failure(msgspec.Struct, frozen=True):
    """An error of one command, to be raised again on the engine's side. TrainerDied: the process's last words, and no
    answer to anybody's command."""

    kind: Literal["EngineError", "UserError", "CapacityError", "TransientError", "CheckpointError", "TrainerDied"]
    message: str
    reason: str
    field: str | None


class Reply(msgspec.Struct, frozen=True):
    """`result` is the command's answer, still encoded: the engine knows which type it asked for."""

    result: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    failure: Failure | None = None


_KINDS: dict[str, type[EngineError]] = {
    kind.__name__: kind
    for kind in (EngineError, UserError, CapacityError, TransientError, CheckpointError, TrainerDied)
}


def failure_of(error: BaseException) -> Failure:
    """An error as it travels. One that is not the engine's own is a bug: it fails its experiment as an EngineError."""
    if isinstance(error, EngineError):
        kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS)
        return Failure(kind, str(error), error.reason, error.field)  # type: ignore[arg-type]  # a key of _KINDS
    return Failure("EngineError", f"{type(error).__name__}: {error}", "TrainerError", None)


def error_of(failure: Failure) -> EngineError:
    return _KINDS[failure.kind](failure.message, reason=failure.reason, field=failure.field)


def header(body: bytes | bytearray) -> bytes:
    """The header of a frame with this body."""
    assert len(body) <= MAX_FRAME_BYTES
    return LENGTH.pack(len(body))
