"""Client of an engine's control API: one method per request, and errors sorted by what can be done about them.

Leaves out retries, which are the caller's; answers are bounded in size, for an engine may belong to a tenant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from clora_api.control import (
    DesiredExperiment,
    DesiredServing,
    EngineInfo,
    ExperimentList,
    ExperimentReport,
    Problem,
)

MAX_ANSWER_BYTES = 16 * 1024 * 1024
REQUEST_SECONDS = 10.0
M = TypeVar("M", bound=BaseModel)


class EngineError(Exception):
    """Base of what can go wrong between operator and engine."""


class RetryableError(EngineError):
    """The engine did not answer, or not now."""


class StartingError(RetryableError):
    """The engine is up and loads its model."""


class UnauthorizedError(EngineError):
    """The engine does not take our token."""


class RefusedError(EngineError):
    """The engine answered with a problem; the same request would be refused again, or until there is room."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail or problem.title)
        self.problem = problem

    @property
    def kind(self) -> str:
        """The last part of the problem's type: capacity-exceeded, invalid-spec, …"""
        return self.problem.type.rsplit("/", 1)[-1]


class EngineClient:
    """One engine. `token` goes into the Authorization header and nowhere else.

    A connection for each request: a Service leads one that is kept to the pod that it began with, for as long as that
    pod's process lives, and on a node that hangs the process outlives the pod.
    """

    def __init__(self, endpoint: str, token: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=endpoint,
            headers={"Authorization": f"Bearer {token}"},
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=REQUEST_SECONDS,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def info(self) -> EngineInfo:
        return _parse(EngineInfo, await self._request("GET", "/v1/engine"))

    async def experiments(self, since: int | None = None, timeout_seconds: float = 0.0) -> ExperimentList:
        """All reports; with `since`, answers once something is newer than that revision, or after the time-out."""
        if since is None:
            return _parse(ExperimentList, await self._request("GET", "/v1/experiments"))
        query = {"since": str(since), "timeoutSeconds": f"{timeout_seconds:g}"}
        timeout = timeout_seconds + REQUEST_SECONDS
        return _parse(ExperimentList, await self._request("GET", "/v1/experiments", query=query, timeout=timeout))

    async def put(self, desired: DesiredExperiment) -> ExperimentReport:
        """Raises RefusedError when the engine is full (capacity-exceeded) or the spec cannot run (invalid-spec)."""
        body = desired.model_dump(mode="json", by_alias=True, exclude_none=True)
        return _parse(ExperimentReport, await self._request("PUT", f"/v1/experiments/{desired.uid}", body=body))

    async def serve(self, uid: str, serving: DesiredServing) -> ExperimentReport:
        """Raises RefusedError (not-found) when the engine does not know the experiment."""
        body = serving.model_dump(mode="json", by_alias=True, exclude_none=True)
        return _parse(ExperimentReport, await self._request("PUT", f"/v1/experiments/{uid}/serving", body=body))

    async def delete(self, uid: str, files: Literal["Retain", "Delete"]) -> ExperimentReport | None:
        """The report while its last checkpoint is made; None once the engine knows it no longer."""
        try:
            answer = await self._request("DELETE", f"/v1/experiments/{uid}", query={"files": files})
        except RefusedError as refused:
            if refused.kind == "not-found":  # any other 404 is not the engine speaking
                return None
            raise
        return None if answer.strip() in (b"", b"null") else _parse(ExperimentReport, answer)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        timeout: float = REQUEST_SECONDS,  # noqa: ASYNC109 - handed on to httpx
    ) -> bytes:
        try:
            async with self._http.stream(method, path, params=query, json=body, timeout=timeout) as response:
                answer = bytearray()
                async for chunk in response.aiter_bytes():
                    answer += chunk
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise RetryableError(f"the answer to {method} {path} is longer than {MAX_ANSWER_BYTES} bytes")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RetryableError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        _raise_for_status(response.status_code, bytes(answer))
        return bytes(answer)


def _raise_for_status(status: int, answer: bytes) -> None:
    if status < 300:
        return
    if status in (401, 403):
        raise UnauthorizedError("the engine does not accept the token of tokenSecretRef")
    problem = _problem(status, answer)
    if problem.type.endswith("/not-ready"):
        raise StartingError(problem.detail or problem.title)
    if status >= 500 or status in (408, 425, 429) or status < 400:
        raise RetryableError(f"HTTP {status}: {problem.detail or problem.title}")
    raise RefusedError(problem)


def _problem(status: int, answer: bytes) -> Problem:
    try:
        return Problem.model_validate(json.loads(answer))
    except (ValueError, ValidationError):
        return Problem(type="about:blank", title=f"HTTP {status} without a problem document", status=status)


def _parse(model: type[M], answer: bytes) -> M:
    try:
        return model.model_validate_json(answer)
    except ValidationError as error:
        raise RetryableError(f"unreadable answer: not a {model.__name__} ({error.error_count()} errors)") from error
