"""The proxy of trackers, over real connections: whom it connects to, and whom not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from clora_engine.environments.http_addresses import HostPolicy
from clora_engine.environments.http_addresses import policy as policy_of
from clora_engine.tracker import proxy


@asynccontextmanager
async def web_server() -> AsyncIterator[int]:
    async def echo(request: web.Request) -> web.StreamResponse:
        return web.Response(text=f"{request.method} {request.path_qs} {(await request.read()).decode()}")

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", echo)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def allow(*hosts: str, loopback: bool = True, api_server: str = "") -> HostPolicy:
    return policy_of(hosts, loopback=loopback, environ={"KUBERNETES_SERVICE_HOST": api_server})


async def ask(policy: HostPolicy, url: str, data: str = "") -> tuple[int, str]:
    with proxy.running(policy) as way_out:
        async with aiohttp.ClientSession() as session, session.post(url, data=data, proxy=way_out) as response:
            return response.status, await response.text()


async def tunnelled(policy: HostPolicy, target: str, said: bytes) -> bytes:
    with proxy.running(policy) as way_out:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(way_out.rpartition(":")[2]))
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode() + said)
        try:
            return await reader.read()
        finally:
            writer.close()


async def test_requests_reach_an_allowed_host_as_they_were() -> None:
    async with web_server() as port:
        found = await ask(allow(f"127.0.0.1:{port}"), f"http://127.0.0.1:{port}/a/b?c=%20d", "x" * 200_000)
        assert found == (200, f"POST /a/b?c=%20d {'x' * 200_000}")


async def test_a_tunnel_reaches_an_allowed_host() -> None:
    async with web_server() as port:
        said = b"GET /in HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        answer = await tunnelled(allow("127.0.0.1"), f"127.0.0.1:{port}", said)
        assert answer.startswith(b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
        assert answer.endswith(b"GET /in ")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (allow(), "none of the engine's tracking.allowedHosts"),
        (allow("a.svc"), "none of the engine's tracking.allowedHosts"),
        (allow("127.0.0.1:1"), "none of the engine's tracking.allowedHosts"),
        (allow("localhost", "127.0.0.1", loopback=False), "is a loopback address"),
    ],
)
async def test_others_are_not_reached(policy: HostPolicy, words: str) -> None:
    async with web_server() as port:
        for host in ("127.0.0.1", "localhost"):
            status, text = await ask(policy, f"http://{host}:{port}/")
            assert status == 403
            assert "allowedHosts" in text or words in text
            answer = await tunnelled(policy, f"{host}:{port}", b"")
            assert answer.startswith(b"HTTP/1.1 403")


async def test_addresses_are_checked_whatever_the_name() -> None:
    policy = allow("localhost", "169.254.169.254", "10.96.0.1", api_server="10.96.0.1")
    assert "link-local" in (await ask(policy, "http://169.254.169.254/latest"))[1]
    assert "API server" in (await ask(policy, "http://10.96.0.1:443/"))[1]
    status, text = await ask(allow("no-such-host.invalid"), "http://no-such-host.invalid/")
    assert status == 502, text


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET ftp://127.0.0.1/ HTTP/1.1\r\n\r\n",
        b"GET https://127.0.0.1/ HTTP/1.1\r\n\r\n",
        b"CONNECT 127.0.0.1:99999 HTTP/1.1\r\n\r\n",
        b"\xff\xfe\r\n\r\n",
    ],
)
async def test_nonsense_is_answered(head: bytes) -> None:
    with proxy.running(allow("127.0.0.1")) as way_out:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(way_out.rpartition(":")[2]))
        writer.write(head)
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
