"""Calls that wait for the trainer's process: what each is, and whose turn it is. Pure bookkeeping."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from clora_engine import trainer_protocol as protocol


@dataclass(slots=True, eq=False)
class Call:
    """`bodies`: the pieces to be sent, one after the other, once it is `ready`; `answers`: to those that were.
    `tokens`: of a forward_backward, about as many positions as it computes; 0 for every other command."""

    adapter: str | None
    kind: type
    future: asyncio.Future[list[bytes]]
    tokens: int = 0
    bodies: deque[bytes] = field(default_factory=deque)
    ready: bool = False
    answers: list[bytes] = field(default_factory=list)

    @property
    def quick(self) -> bool:
        """No pass through the model."""
        return self.kind not in (protocol.ForwardBackward, protocol.Forward)

    @property
    def halved(self) -> bool:
        """Whether it leaves half a gradient when it ends now."""
        return self.kind is protocol.ForwardBackward and bool(self.answers and self.bodies)


def next_call(waiting: Sequence[Call]) -> list[Call]:
    """The call whose turn it is, none if none is ready: of those with no other of their adapter before them the first
    quick one, else the oldest. An optimizer step, or an export, that waited for the passes of others would hold up its
    whole experiment and drive all of them into lock-step."""
    passed = set[str | None]()
    first: list[Call] = []
    for call in waiting:
        if call.ready and call.adapter not in passed:
            if call.quick:
                return [call]
            first = first or [call]
        passed.add(call.adapter)
    return first


def joining(first: Call, waiting: Sequence[Call], info: protocol.StartInfo, most_tokens: int) -> list[Call]:
    """Those that are made in one pass with the call whose turn it is: of other adapters, each its adapter's first that
    waits, small enough to gain by it, all together of no more than `most_tokens`, a micro-batch of each process."""
    joined: list[Call] = []
    tokens, passed = first.tokens, set[str | None]()
    for call in waiting:
        fits = tokens + call.tokens <= most_tokens and len(joined) + 1 < info.slots
        small = call.ready and all(0 < one.tokens < info.join_below for one in (first, call))
        if small and fits and call.adapter not in passed and call is not first:
            joined.append(call)
            tokens += call.tokens
        passed.add(call.adapter)
    return joined
