"""Keeps one vLLM core running: notices its death, starts the next with growing pauses, gives up when that is no use.

What a core must hold before it may serve is the caller's (`reload`). Everybody who needs a core asks `running`, which
waits while there is none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from clora_engine.adapter_files import BaseShapes
from clora_engine.errors import EngineError
from clora_engine.sampler_config import SamplerConfig
from clora_engine.sampler_core import SamplerCore

logger = logging.getLogger(__name__)

Prepare = Callable[[SamplerCore], Awaitable[None]]


class CoreSupervisor:
    """`core` is None before the start, while it is being restarted, and after the end. `generation` counts the cores
    that came up."""

    def __init__(self, config: SamplerConfig, reload: Prepare) -> None:
        self.core: SamplerCore | None = None
        self.generation = 0
        self._config = config
        self._reload = reload
        self._lora_modules: tuple[str, ...] = ()
        self._changed = asyncio.Event()
        self._ended: EngineError | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, base: BaseShapes, first: Prepare) -> None:
        """Start the first core, which must also pass `first`. What that raises, or the start, goes to the caller."""
        self._lora_modules = base.suffixes
        core = await self._start_core(first)
        self._task = asyncio.create_task(self._run(core), name="sampler-supervisor")

    async def close(self) -> None:
        """End the core; whoever waits for one gets EngineError (SamplerClosed)."""
        self._end(EngineError("the sampler was closed", reason="SamplerClosed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        core, self.core = self.core, None
        if core is not None:
            await core.close()

    async def running(self) -> SamplerCore:
        """The core, as soon as there is one. Raises EngineError when there will be none."""
        while (core := self.core) is None:
            await self.change()
        self.raise_if_ended()
        return core

    async def change(self) -> None:
        """Wait until a core came up or `notify` was called. Raises EngineError when all has ended."""
        self.raise_if_ended()
        await self._changed.wait()
        self.raise_if_ended()

    def notify(self) -> None:
        """Wake everybody who waits in `change`."""
        self._changed.set()
        self._changed = asyncio.Event()

    def raise_if_ended(self) -> None:
        if self._ended is not None:
            raise EngineError(str(self._ended), reason=self._ended.reason)

    def _end(self, error: EngineError) -> None:
        self._ended = self._ended or error
        self.notify()

    async def _start_core(self, prepare: Prepare) -> SamplerCore:
        core = await SamplerCore.start(self._config, self._lora_modules)
        try:
            await prepare(core)
        except BaseException:
            await core.close()
            raise
        self.core = core
        self.generation += 1
        self.notify()
        return core

    async def _run(self, core: SamplerCore) -> None:
        try:
            await self._supervise(core)
        except Exception as error:  # a bug: better the end than requests that wait for ever
            logger.exception("the sampler's supervisor failed")
            self._end(EngineError(f"the sampler's supervisor failed: {error}", reason="SamplerUnavailable"))

    async def _supervise(self, core: SamplerCore) -> None:
        """Give up after `start_attempts` cores in a row that did not come up, or died before they finished a sample."""
        fruitless = 0
        while True:
            await core.died()
            self.core = None
            logger.error("vLLM's core died (generation %d)", self.generation)
            fruitless = 0 if core.samples else fruitless + 1
            await core.close()
            while (started := await self._try_start(fruitless)) is None:
                fruitless += 1
                if fruitless >= self._config.start_attempts:
                    message = f"vLLM's core failed {fruitless} times in a row; the sampler gives up"
                    self._end(EngineError(message, reason="SamplerUnavailable"))
                    return
            core = started

    async def _try_start(self, fruitless: int) -> SamplerCore | None:
        if fruitless >= self._config.start_attempts:
            return None
        await asyncio.sleep(self._config.backoff_seconds * 2**fruitless)
        try:
            return await self._start_core(self._reload)
        except EngineError as error:
            logger.error("vLLM's core could not be restarted: %s", error)
            return None
