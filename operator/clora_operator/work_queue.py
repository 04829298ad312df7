"""A coalescing work queue for asyncio: a key waits at most once, is never worked on twice at once, and backs off alone.

Leaves out priorities and persistence: everything that is lost with the process comes back with the first resync.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """Keys become due at once or after a delay; the earliest of several wishes for one key counts.

    base, limit   seconds of the exponential back-off of `retry`
    """

    def __init__(self, *, base: float = 0.5, limit: float = 60.0) -> None:
        self._base, self._limit = base, limit
        self._due: deque[K] = deque()
        self._waiting: set[K] = set()  # in _due
        self._active: set[K] = set()
        self._again: set[K] = set()  # became due while active
        self._timers: list[tuple[float, int, K]] = []
        self._when: dict[K, float] = {}  # the timer that counts
        self._failures: dict[K, int] = {}
        self._sequence = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: K, delay: float = 0.0) -> None:
        """`delay` in seconds."""
        if delay > 0:
            when = asyncio.get_running_loop().time() + delay
            if self._when.get(key, float("inf")) > when:
                self._when[key] = when
                self._sequence += 1
                heapq.heappush(self._timers, (when, self._sequence, key))
                self._changed.set()
            return
        self._when.pop(key, None)
        if key in self._active:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._due.append(key)
            self._changed.set()

    async def get(self) -> K:
        """The next key; the caller must call `done` or `retry`."""
        while True:
            self._fire_timers()
            if self._due:
                key = self._due.popleft()
                self._waiting.discard(key)
                self._active.add(key)
                return key
            self._changed.clear()
            await self._wait_for_change()

    def done(self, key: K) -> None:
        """Worked off; its back-off is forgotten."""
        self._failures.pop(key, None)
        self._release(key)

    def retry(self, key: K) -> float:
        """It failed: due again after a back-off, whose length in seconds is returned."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = min(self._limit, self._base * 2.0 ** min(failures, 16))
        self._release(key)
        self.add(key, delay)
        return delay

    def _release(self, key: K) -> None:
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _fire_timers(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._timers and self._timers[0][0] <= now:
            when, _, key = heapq.heappop(self._timers)
            if self._when.get(key) == when:
                self.add(key)

    async def _wait_for_change(self) -> None:
        timeout = None
        if self._timers:
            timeout = max(0.0, self._timers[0][0] - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return
