"""The trainer behind its queue, simulated: a position takes one tick. Exact and without a clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from clora_api.v1alpha1.engine import Scheduling
from clora_engine import trainer_protocol as protocol
from clora_engine.trainer_calls import Call, Piece
from clora_engine.trainer_queue import TrainerQueue


def make(adapter: str | None, kind: type, *costs: int, tokens: int | None = None) -> Call:
    """A call of so many pieces, ready; without costs one that is no pass. Without an event loop nobody waits for it."""
    loop = asyncio.new_event_loop()
    loop.close()
    call = Call(adapter, kind, loop.create_future(), sum(costs) if tokens is None else tokens, ready=True)
    call.pieces.extend(Piece(b"", cost) for cost in costs or (0,))
    return call


class Simulation:
    """`now` counts positions. positions: computed so far, by tenant. order: adapters, piece by piece. ended: when each
    tenant's last call so far was over."""

    def __init__(self, scheduling: Scheduling, *, slots: int = 1, join_below: int = 0, most_tokens: int = 0) -> None:
        self.queue = TrainerQueue(scheduling)
        self.now = 0
        self.positions: Counter[str] = Counter()
        self.order: list[str | None] = []
        self.ended: dict[str, int] = {}
        self.when_over: Callable[[Call], None] = lambda call: None
        self._limits = slots, join_below, most_tokens

    def ask(self, adapter: str, *costs: int) -> Call:
        """A forward_backward of so many pieces."""
        call = make(adapter, protocol.ForwardBackward, *costs)
        self.queue.put(call)
        return call

    def step(self) -> Sequence[Call]:
        """Make one pass, or one quick call."""
        taken = self.queue.take(*self._limits)
        for call in taken:
            piece = call.pieces.popleft()
            self.now += piece.cost
            self.positions[call.tenant] += piece.cost
            self.order.append(call.adapter)
            call.answers.append(b"")
        for call in taken:
            if call.pieces:
                self.queue.put_back(call)
            else:
                self.ended[call.tenant] = self.now
                self.when_over(call)
        return taken

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while not until() and self.step():
            pass
