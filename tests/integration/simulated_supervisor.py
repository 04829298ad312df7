"""The engine's real HTTP server over experiments that only count steps: for tests of what many of them cost, where the
server's own part must be counted and training must not. Its process takes seconds to start, for it loads what an engine
loads; simulated_engine has a server of its own for all other tests.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from clora_api.control import DesiredExperiment, DesiredServing, EngineInfo, ExperimentList, ExperimentReport
from clora_engine.errors import CapacityError, CheckpointError, UserError
from clora_engine.server.app import create_app
from clora_engine.server.auth import TokenFile
from clora_engine.supervisor import UnknownExperimentError
from tests.integration.simulated_engine import Engine, RefusalError, Simulated


class SimulatedSupervisor:
    """What the control API's server asks of a supervisor, answered by a simulated engine."""

    ready, starting = True, ""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: set[asyncio.Task[None]] = set()

    def info(self) -> EngineInfo:
        return self._engine.info()

    async def list(self, since: int | None, timeout_seconds: float) -> ExperimentList:
        return await self._engine.listed_after(since, timeout_seconds)

    async def put(self, desired: DesiredExperiment) -> ExperimentReport:
        try:
            return self._engine.put(desired)
        except RefusalError as refusal:
            raise _as_the_engine_s(refusal) from None

    def serve(self, uid: str, serving: DesiredServing) -> ExperimentReport:
        return self._engine.serve(self._find(uid), serving)

    def report(self, uid: str) -> ExperimentReport:
        return self._find(uid).report()

    async def delete(self, uid: str, *, files: bool) -> ExperimentReport | None:
        return self._engine.begin_delete(uid, files, self._tasks)

    def _find(self, uid: str) -> Simulated:
        if uid not in self._engine.experiments:
            raise UnknownExperimentError(uid)
        return self._engine.experiments[uid]


def _as_the_engine_s(refusal: RefusalError) -> Exception:
    told = refusal.problem
    if told.reason == CheckpointError.reason:
        return CheckpointError(told.detail)
    return UserError(told.detail, field=told.field) if told.status == 422 else CapacityError(told.detail)


def create_real_app(engine: Engine, token_file: Path) -> FastAPI:
    return create_app(cast(Any, SimulatedSupervisor(engine)), TokenFile(token_file), CollectorRegistry())
