"""Writing to a storage that may be full: the experiment pauses, says so, and goes on when there is room.

Nothing is lost meanwhile: the step is in the trainer, its groups in memory. Who writes sees to it that a write which
found no room leaves what was there, so that it can be tried again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from clora_engine.errors import EngineError, StorageFullError

log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_SECONDS = 5.0


class Patience:
    """Tries writes again while there is no room for them.

    on_full: told why, for people; with "" once there is room. gives_up: whether there is no time to wait (the engine
    ends, or the experiment is deleted).
    """

    def __init__(
        self, on_full: Callable[[str], None], gives_up: Callable[[], bool], retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._on_full = on_full
        self._gives_up = gives_up
        self._retry_seconds = retry_seconds

    async def keep(self, write: Callable[[], Awaitable[T]]) -> T:
        """What `write` returns, as soon as there is room. Raises StorageFullError when it gives up, and whatever else
        goes wrong."""
        paused = False
        while True:
            try:
                done = await write()
            except (EngineError, OSError) as error:
                if not _is_full(error):
                    raise
                if self._gives_up():
                    raise StorageFullError(str(error)) from error
                if not paused:
                    log.warning("waiting for room: %s", error)
                paused = True
                self._on_full(f"the engine's storage is full: {error}; free some, or enlarge its volume")
                await asyncio.sleep(self._retry_seconds)
            else:
                if paused:
                    self._on_full("")
                return done


def _is_full(error: EngineError | OSError) -> bool:
    if isinstance(error, EngineError):  # from the journal, or the trainer's process
        return error.reason == StorageFullError.reason
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
