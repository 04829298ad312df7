"""The control API (see clora_api.control for its wire types). What tenants reach is not here."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from clora_api.control import (
    CheckpointList,
    DesiredExperiment,
    DesiredServing,
    EngineInfo,
    ExperimentList,
    ExperimentReport,
    TrajectoryOrder,
    TrajectoryPage,
)
from clora_engine.errors import UserError
from clora_engine.server import tracked_files
from clora_engine.server.auth import TokenFile
from clora_engine.server.problems import install, problem
from clora_engine.server.trajectories import page as trajectories_as_text
from clora_engine.server.trajectories import steps
from clora_engine.supervisor import Supervisor

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
MAX_BODY_BYTES = 4 << 20


def create_app(supervisor: Supervisor, token: TokenFile, registry: CollectorRegistry) -> FastAPI:
    """The ASGI application over a supervisor."""
    app = FastAPI(title="clora engine", version="v1", docs_url=None, redoc_url=None)
    install(app)
    _install_guard(app, supervisor, token)
    _install_probes(app, supervisor, registry)
    _install_experiments(app, supervisor)
    _install_downloads(app, supervisor)
    return app


def _install_guard(app: FastAPI, supervisor: Supervisor, token: TokenFile) -> None:
    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path in OPEN_PATHS:
            return await call_next(request)
        if not token.accepts(request.headers.get("authorization")):
            return problem("unauthorized", 401, "send the control API's token as Authorization: Bearer …")
        if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
            return problem("invalid-spec", 413, f"a request body may have {MAX_BODY_BYTES} bytes")
        if not supervisor.ready:
            return problem("not-ready", 503, supervisor.starting)
        return await call_next(request)


def _install_probes(app: FastAPI, supervisor: Supervisor, registry: CollectorRegistry) -> None:
    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> JSONResponse:
        return JSONResponse({"ready": supervisor.ready}, status_code=200 if supervisor.ready else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _install_experiments(app: FastAPI, supervisor: Supervisor) -> None:
    @app.get("/v1/engine")
    async def engine() -> EngineInfo:
        return supervisor.info()

    @app.get("/v1/experiments")
    async def experiments(
        since: int | None = None,
        timeout_seconds: Annotated[float, Query(alias="timeoutSeconds", ge=0, le=60)] = 0.0,
    ) -> ExperimentList:
        return await supervisor.list(since, timeout_seconds)

    @app.put("/v1/experiments/{uid}")
    async def put(uid: str, desired: DesiredExperiment) -> ExperimentReport:
        if uid != desired.uid:
            raise UserError(f"the body is of {desired.uid}, the path of {uid}", field="uid")
        return await supervisor.put(desired)

    @app.put("/v1/experiments/{uid}/serving")
    async def serve(uid: str, serving: DesiredServing) -> ExperimentReport:
        return supervisor.serve(uid, serving)

    @app.get("/v1/experiments/{uid}")
    async def get(uid: str) -> ExperimentReport:
        return supervisor.report(uid)

    @app.delete("/v1/experiments/{uid}", response_model=ExperimentReport | None)
    async def delete(
        uid: str, response: Response, files: Literal["Retain", "Delete"] = "Retain"
    ) -> ExperimentReport | None:
        report = await supervisor.delete(uid, files=files == "Delete")
        response.status_code = 200 if report is None else 202
        return report


def _install_downloads(app: FastAPI, supervisor: Supervisor) -> None:
    @app.get("/v1/experiments/{uid}/metrics")
    async def metrics(uid: str) -> Response:
        path = supervisor.journal(uid).folder / "metrics.jsonl"
        data = await asyncio.to_thread(path.read_bytes) if path.exists() else b""
        return Response(data, media_type="application/jsonl")

    @app.get("/v1/experiments/{uid}/trajectories")
    async def trajectories(uid: str, step: Annotated[int, Query(ge=1, le=10_000_000)]) -> Response:
        path = supervisor.journal(uid).folder / "rollouts" / f"{step:05d}.jsonl"
        if not path.exists():
            return problem("not-found", 404, f"{uid} keeps no trajectories of step {step}")
        return Response(await asyncio.to_thread(path.read_bytes), media_type="application/jsonl")

    @app.get("/v1/experiments/{uid}/trajectories/text", response_model=TrajectoryPage)
    async def readable(
        uid: str,
        step: Annotated[int | None, Query(ge=1, le=10_000_000)] = None,
        order: TrajectoryOrder = TrajectoryOrder.FIRST,
        limit: Annotated[int, Query(ge=1, le=50)] = 10,
    ) -> TrajectoryPage | Response:
        rollouts = supervisor.journal(uid).folder / "rollouts"
        found = await asyncio.to_thread(trajectories_as_text, rollouts, step, order, limit, supervisor.decode)
        if found is None:
            kept = await asyncio.to_thread(steps, rollouts)
            has = f"of steps {kept[0]} to {kept[-1]} at most" if kept else "none"
            wanted = f" of step {step}" if step is not None else ""
            return problem("not-found", 404, f"it keeps no trajectories{wanted}; it has {has}")
        return found

    @app.get("/v1/experiments/{uid}/checkpoints")
    async def checkpoints(uid: str) -> CheckpointList:
        return await asyncio.to_thread(supervisor.checkpoints, uid)

    @app.get("/v1/experiments/{uid}/checkpoints/{step}")
    async def checkpoint(uid: str, step: int) -> Response:
        return Response(await asyncio.to_thread(_adapter_tar, supervisor, uid, step), media_type="application/x-tar")

    @app.get("/v1/experiments/{uid}/tracking")
    async def tracking(uid: str) -> Response:
        file = await asyncio.to_thread(tracked_files.packed, supervisor.journal(uid).folder)
        if file is None:
            return problem(
                "not-found", 404, "it keeps no files of trackers: none in spec.tracking has had mode Offline"
            )
        return StreamingResponse(tracked_files.chunks(file), media_type="application/x-tar")


def _adapter_tar(supervisor: Supervisor, uid: str, step: int) -> bytes:
    """The PEFT adapter of a committed step: adapter_config.json and adapter_model.safetensors."""
    commit = supervisor.journal(uid).read_commit(step)
    assert commit is not None
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            tar.add(commit.folder / name, arcname=name)
    return buffer.getvalue()
