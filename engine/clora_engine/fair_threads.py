"""A few threads that many tenants share: one call of a tenant at a time, and the tenants in turn.

Whoever asks for a thousand long calls waits for its own; another's next call waits for one call at most of everybody
who is there. Calls of one tenant keep their order. How many may wait is the caller's to bound.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class FairThreads:
    """`workers` threads. Belongs to no event loop."""

    def __init__(self, workers: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._lock = threading.Lock()
        # By tenant, what waits. Who is in here has one turn in the threads' queue, or a call that runs.
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}

    async def run(self, tenant: str, call: Callable[[], T]) -> T:
        """The call's result, or what it raises. Cancelled before its turn it is not made; once begun, it runs to its
        end."""
        return await asyncio.wrap_future(self.submit(tenant, call))

    def submit(self, tenant: str, call: Callable[[], T]) -> Future[T]:
        """`run`, for callers without an event loop."""
        future: Future[T] = Future()
        with self._lock:
            known = tenant in self._waiting
            self._waiting.setdefault(tenant, deque()).append((future, call))
        if not known:
            self._threads.submit(self._turn, tenant)
        return future

    def _turn(self, tenant: str) -> None:
        """Makes the tenant's next call, and takes its next turn behind everybody else's."""
        if (taken := self._next(tenant)) is not None:
            future, call = taken
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        with self._lock:
            more = bool(self._waiting[tenant])
            if not more:
                del self._waiting[tenant]
        if more:
            self._threads.submit(self._turn, tenant)

    def _next(self, tenant: str) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The first that nobody has cancelled."""
        while True:
            with self._lock:
                if not self._waiting[tenant]:
                    return None
                future, call = self._waiting[tenant].popleft()
            if future.set_running_or_notify_cancel():
                return future, call
