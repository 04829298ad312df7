"""Batches as bytes, and their answers back, off the event loop where they are large.

msgspec holds Python's lock while it works, so that one call for a whole batch would hold up the event loop from any
thread. What is large is therefore encoded and decoded one completion after another, in threads that every adapter has
by turns; between two completions the event loop has its own. The bytes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from clora_engine import trainer_protocol as protocol
from clora_engine.errors import UserError
from clora_engine.fair_threads import FairThreads
from clora_engine.types import Loss, Row

T = TypeVar("T")
INLINE_TOKENS = 1 << 13  # of a batch: about 250 kB, a millisecond
_threads = FairThreads(2, "trainer-bytes")


class _Row(msgspec.Struct):
    """A Row whose completions are encoded."""

    prompt: list[int]
    completions: list[msgspec.Raw]


class _ForwardBackward(msgspec.Struct):
    """A protocol.ForwardBackward whose rows are encoded."""

    adapter: str
    rows: list[msgspec.Raw]
    loss: Loss


class _Forward(msgspec.Struct, tag="Forward"):
    """A protocol.Forward whose rows are encoded."""

    adapter: str
    rows: list[msgspec.Raw]
    temperature: float


def tokens_of(rows: Sequence[Row]) -> int:
    """Tokens of all prompts and completions."""
    return sum(len(row.prompt) + sum(len(one.ids) for one in row.completions) for row in rows)


async def apart(adapter: str | None, tokens: int, call: Callable[[], T]) -> T:
    """What `call` makes of a batch of so many tokens: at once where it is small, else in the adapter's turn."""
    return call() if tokens <= INLINE_TOKENS else await _threads.run(adapter or "", call)


def encoded(command: protocol.Command | protocol.ForwardBackward) -> bytes:
    """A command's bytes. Raises UserError for one that no frame holds."""
    body = msgspec.msgpack.encode(_in_parts(command))
    if len(body) > protocol.MAX_FRAME_BYTES // 2:
        raise UserError(f"the batch takes {len(body)} bytes, too many for one call; split it", field="rows")
    return body


def decoded_logprobs(body: bytes) -> list[list[list[float]]]:
    """The answer to a Forward."""
    rows = msgspec.msgpack.decode(body, type=list[list[msgspec.Raw]])
    return [[msgspec.msgpack.decode(one, type=list[float]) for one in row] for row in rows]


def _in_parts(command: protocol.Command | protocol.ForwardBackward) -> msgspec.Struct:
    if isinstance(command, protocol.ForwardBackward):
        return _ForwardBackward(command.adapter, [_encoded_row(row) for row in command.rows], command.loss)
    if isinstance(command, protocol.Forward):
        return _Forward(command.adapter, [_encoded_row(row) for row in command.rows], command.temperature)
    return command


def _encoded_row(row: Row) -> msgspec.Raw:
    completions = [msgspec.Raw(msgspec.msgpack.encode(one)) for one in row.completions]
    return msgspec.Raw(msgspec.msgpack.encode(_Row(row.prompt, completions)))
