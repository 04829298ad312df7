"""One check at a time of what an experiment asks for, however often it is asked.

A check may read a large file or wait for somebody's container, longer than the one who asks does. The next question of
the same thing then joins the check, or gets the answer that nobody waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from clora_engine.errors import TransientError

T = TypeVar("T")

KEEP_SECONDS = 30.0  # an answer that nobody waited for; the operator asks again sooner


class Admissions(Generic[T]):
    """Checks under way by uid, each of one digest."""

    def __init__(self) -> None:
        self._checks: dict[str, tuple[str, asyncio.Task[T]]] = {}

    async def ask(self, uid: str, digest: str, check: Callable[[], Awaitable[T]]) -> T:
        """The result of `check`, or its error. Raises TransientError while another digest of the uid is checked."""
        known = self._checks.get(uid)
        if known is not None and known[0] != digest and not known[1].done():
            raise TransientError("what it asked for before is still being checked")
        if known is None or known[0] != digest:
            known = self._begin(uid, digest, check)
        task = known[1]
        try:
            return await asyncio.shield(task)
        finally:
            if task.done():
                self._forget(uid, task)

    def _begin(self, uid: str, digest: str, check: Callable[[], Awaitable[T]]) -> tuple[str, asyncio.Task[T]]:
        async def run() -> T:
            return await check()

        task = asyncio.create_task(run(), name=f"check-{uid}")
        task.add_done_callback(lambda done: self._keep(uid, done))
        self._checks[uid] = digest, task
        return self._checks[uid]

    def _keep(self, uid: str, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # told to whoever asks, or to nobody
        task.get_loop().call_later(KEEP_SECONDS, self._forget, uid, task)

    def _forget(self, uid: str, task: asyncio.Task[T]) -> None:
        if uid in self._checks and self._checks[uid][1] is task:
            del self._checks[uid]
