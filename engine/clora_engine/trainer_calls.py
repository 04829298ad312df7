"""Calls that wait for the trainer's process: what each is, and what it costs."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from clora_engine import trainer_protocol as protocol
from clora_engine.trainer_wire import tokens_of

FORWARD_PART = 2
"""A position of a Forward costs one in so many of one with its way back: the base model's weights get no gradients, so
that backward is about as many products as forward."""


def cost_of(command: protocol.Command | protocol.ForwardBackward) -> int:
    """In positions of a forward_backward; 0 for what is no pass through the model."""
    if isinstance(command, protocol.ForwardBackward):
        return max(1, tokens_of(command.rows))
    return max(1, tokens_of(command.rows) // FORWARD_PART) if isinstance(command, protocol.Forward) else 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What is sent at a time: a command's bytes, and its cost."""

    body: bytes
    cost: int


@dataclass(slots=True, eq=False)
class Call:
    """`pieces`: to be sent, one after the other, once it is `ready`; `answers`: to those that were. `tokens`: of its
    batch, about as many positions as it computes."""

    adapter: str | None
    kind: type
    future: asyncio.Future[list[bytes]]
    tokens: int = 0
    pieces: deque[Piece] = field(default_factory=deque)
    ready: bool = False
    answers: list[bytes] = field(default_factory=list)

    @property
    def tenant(self) -> str:
        """Whose it is: an experiment's adapters are named after it, `experiment` and `experiment/…`."""
        return (self.adapter or "").partition("/")[0]

    @property
    def quick(self) -> bool:
        """No pass through the model."""
        return self.kind not in (protocol.ForwardBackward, protocol.Forward)

    @property
    def trains(self) -> bool:
        """A pass that those of other adapters can join."""
        return self.kind is protocol.ForwardBackward

    @property
    def halved(self) -> bool:
        """Whether it leaves half a gradient when it ends now."""
        return self.trains and bool(self.answers and self.pieces)
