"""The versions that the sampler serves: brought into vLLM, leased, and out again when nobody needs them.

`versions.py` keeps the books; here its decisions are carried out, on the core that runs at the time. Every version is
loaded on all data-parallel ranks before anybody can lease it; what is neither latest, nor leased, nor in flight is
taken out of vLLM, and its directory removed. No slot is taken from a version that may still be asked for.

Left out: sampling, and the core's life (sampler.py, sampler_supervisor.py).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clora_engine.adapter_files import BaseShapes, check_adapter
from clora_engine.errors import EngineError, SamplerRestarted, TransientError
from clora_engine.sampler_config import SamplerConfig
from clora_engine.sampler_core import Adapter, SamplerCore
from clora_engine.sampler_supervisor import CoreSupervisor
from clora_engine.types import Version
from clora_engine.versions import Entry, State, VersionTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VersionStats:
    version: Version
    state: State
    leases: int
    in_flight: int


class LiveVersions:
    """See the module. All methods belong to one event loop."""

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config
        self._table = VersionTable(config.slots)
        self._supervisor = CoreSupervisor(config, self._reload)
        self._unloading: set[asyncio.Task[None]] = set()
        self._second_load = asyncio.Lock()
        self.on_lost: Callable[[Version], None] = lambda _: None

    @property
    def supervisor(self) -> CoreSupervisor:
        """Keeps the core, into which these versions are loaded again after a restart."""
        return self._supervisor

    @property
    def free(self) -> int:
        """Slots."""
        return self._table.free

    def stats(self) -> tuple[VersionStats, ...]:
        return tuple(VersionStats(e.version, e.state, e.leases, e.in_flight) for e in self._table.entries)

    async def settle(self) -> None:
        """Wait for what is being unloaded."""
        await asyncio.gather(*self._unloading, return_exceptions=True)

    async def publish(self, version: Version, directory: Path, base: BaseShapes) -> None:
        """See Sampler.publish."""
        if directory.parent != self._config.versions_root or directory.name == "..":
            raise EngineError(f"{directory.name} is not directly below the sampler's versions root")
        entry = self._table.announce(version, directory)
        try:
            await asyncio.to_thread(check_adapter, directory, base, self._config.max_lora_rank)
            while not self._table.reserve(entry):
                await self._supervisor.change()
            await self._load(entry)
            retired = self._table.commit(entry)
        except BaseException:
            unloading = self._table.abandon(entry)
            self._retire(unloading)
            if not unloading:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise
        self._retire(retired)
        self._supervisor.notify()
        logger.info("published %s as %d", version, entry.lora_id)

    def lease(self, experiment: str) -> Entry:
        """The experiment's latest version, held until `release`. Raises EngineError (NoVersion) when it has none."""
        return self._table.lease(experiment)

    def release(self, entry: Entry) -> None:
        self._retire(self._table.release(entry))

    def drop(self, experiment: str) -> None:
        """Retire all versions of an experiment; what is leased or in flight goes last."""
        self._retire(self._table.drop(experiment))
        self._supervisor.notify()

    @contextmanager
    def in_flight(self, entry: Entry | None) -> Iterator[None]:
        """A request with this version is under way: it stays loaded, also when its lease is released meanwhile."""
        if entry is None:
            yield
            return
        self._table.enter(entry)
        try:
            yield
        finally:
            self._retire(self._table.leave(entry))

    def adapter(self, entry: Entry | None) -> Adapter | None:
        """What vLLM must be told, None for the base model. Raises EngineError (VersionLost) for a version that could
        not be loaded again."""
        if entry is None:
            return None
        self._table.check_loaded(entry)
        return _adapter(entry)

    # ------------------------------------------------------------------------------------------ inside

    async def _load(self, entry: Entry) -> None:
        """Into the running core. An adapter under whose load the core died is tried once more, with no other beside it:
        what kills the core again is then known, and refused before the sampler gives up."""
        async with self._second_load:
            pass
        try:
            return await self._with_core(lambda core: core.load(_adapter(entry)))
        except SamplerRestarted:
            logger.warning("vLLM's core died while it loaded %s", entry.name)
        async with self._second_load:
            try:
                await self._with_core(lambda core: core.load(_adapter(entry)))
            except SamplerRestarted as error:
                raise EngineError(
                    f"vLLM's core died twice while it loaded {entry.version}", reason="InvalidAdapter"
                ) from error

    async def _with_core(self, call: Callable[[SamplerCore], Awaitable[None]]) -> None:
        """Raises SamplerRestarted when the core dies meanwhile, and not before the supervisor knows."""
        core = await self._supervisor.running()
        try:
            await call(core)
        except SamplerRestarted:
            await core.died()
            await asyncio.sleep(0)
            raise

    def _retire(self, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            task = asyncio.create_task(self._unload(entry), name=f"unload-{entry.lora_id}")
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, entry: Entry) -> None:
        """Out of vLLM, then out of the directory. If vLLM does not let it go, the slot stays taken: better than one
        version too many, for which vLLM would evict another."""
        try:
            while True:
                try:
                    await self._with_core(lambda core: core.unload(entry.lora_id))
                    break
                except SamplerRestarted:
                    continue
        except EngineError as ended:
            logger.debug("not unloading %s: %s", entry.name, ended)
        except Exception:
            logger.exception("vLLM did not unload %s; its slot is lost until vLLM's core is restarted", entry.name)
            if (core := self._supervisor.core) is not None:
                await core.died()
        self._table.removed(entry)
        await asyncio.to_thread(shutil.rmtree, entry.directory, ignore_errors=True)
        self._supervisor.notify()

    async def _reload(self, core: SamplerCore) -> None:
        """Load into a new core all versions that can still be asked for; one that can't be loaded again is lost."""
        for entry in self._table.to_load():
            try:
                await core.load(_adapter(entry))
            except TransientError:
                raise
            except EngineError as error:
                logger.error("%s is lost: %s", entry.name, error)
                self._retire(self._table.abandon(entry))
                self.on_lost(entry.version)


def _adapter(entry: Entry) -> Adapter:
    return Adapter(entry.name, entry.lora_id, entry.directory)
