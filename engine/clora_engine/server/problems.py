"""Errors as RFC 9457 problem documents, with a stable `type` under https://clora.dev/problems/."""

from __future__ import annotations

import logging
from typing import get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from clora_api.control import PROBLEM_BASE, Problem, ProblemType
from clora_engine.errors import CapacityError, CheckpointError, EngineError, StaleEpochError, UserError
from clora_engine.supervisor import UnknownExperimentError

log = logging.getLogger(__name__)

_TITLES: dict[ProblemType, str] = {
    "capacity-exceeded": "The engine has no room",
    "invalid-spec": "The spec cannot run on this engine",
    "not-found": "Not found",
    "unauthorized": "The bearer token is missing or wrong",
    "conflict": "The experiment's files cannot be used",
    "not-ready": "The engine is starting",
    "internal": "Internal error",
}
assert set(_TITLES) == set(get_args(ProblemType))


def problem(kind: ProblemType, status: int, detail: str, *, field: str | None = None, reason: str = "") -> JSONResponse:
    """A response of media type application/problem+json."""
    body = Problem(
        type=PROBLEM_BASE + kind, title=_TITLES[kind], status=status, detail=detail, field=field, reason=reason
    )
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(body.to_api(), status_code=status, media_type="application/problem+json", headers=headers)


def install(app: FastAPI) -> None:
    """Answers every error of the engine with its problem document."""

    @app.exception_handler(CapacityError)
    async def _capacity(_: Request, error: CapacityError) -> JSONResponse:
        return problem("capacity-exceeded", 409, str(error), reason=error.reason)

    @app.exception_handler(UserError)
    async def _user(_: Request, error: UserError) -> JSONResponse:
        return problem("invalid-spec", 422, str(error), field=error.field, reason=error.reason)

    @app.exception_handler(RequestValidationError)
    async def _body(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
        return problem("invalid-spec", 422, f"{path}: {first['msg']}", field=path or None, reason="InvalidSpec")

    @app.exception_handler(UnknownExperimentError)
    async def _unknown(_: Request, error: UnknownExperimentError) -> JSONResponse:
        return problem("not-found", 404, f"the engine has no experiment {error.args[0]}")

    @app.exception_handler(CheckpointError)
    async def _checkpoint(_: Request, error: CheckpointError) -> JSONResponse:
        return problem("conflict", 409, str(error), reason=error.reason)

    @app.exception_handler(StaleEpochError)
    async def _stale(_: Request, error: StaleEpochError) -> JSONResponse:
        return problem("conflict", 409, str(error), reason=error.reason)

    @app.exception_handler(EngineError)
    async def _engine(_: Request, error: EngineError) -> JSONResponse:
        return problem("internal", 500, str(error), reason=error.reason)

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        kind: ProblemType = "not-found" if error.status_code == 404 else "invalid-spec"
        return problem(kind, error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:
        log.error("unexpected error", exc_info=error)
        return problem("internal", 500, f"unexpected {type(error).__name__}; the engine's log has more")
