"""An asyncio event loop whose clock jumps: whenever nothing can run, it is at once the time of the next timer.

Code that only awaits timers and futures runs on it unchanged, hours in seconds, and the same way every time. There is
nothing outside: no sockets, no threads, no subprocesses.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` is in virtual seconds from 0. Raises RuntimeError where somebody waits for what can never happen."""

    def __init__(self) -> None:
        self._seconds = 0.0
        super().__init__(_NothingOutside(self))

    def time(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        self._seconds += seconds


class _NothingOutside(selectors.SelectSelector):
    """To wait for input is to let the time pass."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("no timer is left, and somebody still waits")
        self._loop.advance(timeout)
        return []


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
