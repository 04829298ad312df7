"""How long something was busy: what an idle share of expensive hardware is read from."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType


class BusyClock:
    """Seconds in which at least one `with` block of this clock was open; blocks may overlap."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._open = 0
        self._since = self._total = 0.0

    @property
    def seconds(self) -> float:
        """So far, the present moment included."""
        return self._total + (self._now() - self._since if self._open else 0.0)

    def __enter__(self) -> None:
        if self._open == 0:
            self._since = self._now()
        self._open += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open -= 1
        if self._open == 0:
            self._total += self._now() - self._since
