"""Errors of the control API by what can be done about them; answers of a bounded size."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from clora_api.control import EngineInfo
from clora_operator.engine_client import (
    EngineClient,
    RefusedError,
    RetryableError,
    StartingError,
    UnauthorizedError,
)


def client(answer: httpx.Response | Exception) -> EngineClient:
    """The real client over a transport that gives one answer."""

    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    made = EngineClient("http://engine", "token")
    made._http = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(handle))
    return made


def problem(status: int, kind: str) -> httpx.Response:
    body = {"type": f"https://clora.dev/problems/{kind}", "title": kind, "status": status, "detail": "because"}
    return httpx.Response(status, json=body)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (problem(401, "unauthorized"), UnauthorizedError),
        (problem(409, "capacity-exceeded"), RefusedError),
        (problem(422, "invalid-spec"), RefusedError),
        (problem(503, "not-ready"), StartingError),
        (problem(500, "internal"), RetryableError),
        (httpx.Response(502, text="<html>bad gateway</html>"), RetryableError),
        (httpx.Response(429), RetryableError),
        (httpx.Response(302, headers={"location": "http://elsewhere"}), RetryableError),
        (httpx.Response(404, json={"detail": "Not Found"}), RefusedError),
        (httpx.Response(200, text="not json"), RetryableError),
        (httpx.Response(200, json={"epoch": "x"}), RetryableError),
        (httpx.Response(200, content=b" " * (17 << 20)), RetryableError),
        (httpx.ConnectError("refused"), RetryableError),
        (httpx.ReadTimeout("slow"), RetryableError),
    ],
)
async def test_errors(answer: httpx.Response | Exception, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        await client(answer).info()
    assert type(raised.value) is error


async def test_a_deletion_ends_with_null_or_not_found() -> None:
    assert await client(httpx.Response(200, content=b"null")).delete("u", "Retain") is None
    assert await client(problem(404, "not-found")).delete("u", "Retain") is None
    with pytest.raises(RefusedError):  # somebody else's 404: a proxy's, a wrong path's
        await client(httpx.Response(404, text="nginx")).delete("u", "Retain")


async def test_a_refusal_keeps_the_problem() -> None:
    with pytest.raises(RefusedError) as raised:
        await client(problem(422, "invalid-spec")).info()
    assert raised.value.kind == "invalid-spec"
    assert json.loads(raised.value.problem.model_dump_json())["detail"] == "because"


async def test_no_connection_outlives_its_request() -> None:
    """A Service would lead a kept one to a pod that is no more, while that pod's process lives."""
    info = EngineInfo(epoch=1, ready=True, model="m", version="1", max_experiments=1, max_rank=8, experiments=0)
    body = json.dumps(info.to_api()).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while (await reader.read(65536)) != b"":
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        asked = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "token")
        assert [await asked.info() for _ in range(3)] == [info] * 3
        await asked.close()
    assert connections == 3
