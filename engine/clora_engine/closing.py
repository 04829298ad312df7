"""Closes environments whose episodes are over, in tasks of their own: who is cancelled, or fails, waits for none.

What a close says or does no longer counts for an episode. It gets a few seconds, whatever the time for an answer is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from clora_engine.environments.protocol import Environment

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0

_running: set[asyncio.Task[None]] = set()  # an event loop alone keeps no task alive


def begin_closing(environments: Iterable[Environment], *, experiment: str, seconds: float) -> list[asyncio.Task[None]]:
    """Begins to close each, for `seconds` at most and never more than CLOSE_SECONDS. The tasks raise nothing."""
    seconds = min(seconds, CLOSE_SECONDS)
    tasks = [asyncio.create_task(_close(environment, experiment, seconds)) for environment in environments]
    for task in tasks:
        _running.add(task)
        task.add_done_callback(_running.discard)
    return tasks


async def _close(environment: Environment, experiment: str, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await environment.close()
    except Exception:  # the episode is over, and its result stands
        logger.warning("experiment %s: environment did not close", experiment, exc_info=True)
