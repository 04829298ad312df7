"""The tenants' port under connections that ask for nothing: real sockets and servers, side by side as in an engine."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from clora_engine import engine as engine_module
from clora_engine.server.app import create_app
from clora_engine.server.auth import TokenFile
from clora_engine.server.connections import MOST_CONNECTIONS, Crowd
from clora_engine.server.tenants import create_tenant_app
from tests.unit.engine.test_serving import TOKEN, Engine, one

COMPLETION = {"model": "e", "prompt": "How many?", "max_tokens": 4}
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Ports:
    """An engine's two servers. Everything that is opened is closed in the end."""

    def __init__(self, engine: Engine, crowd: Crowd, tenants: int, control: int, stack: AsyncExitStack) -> None:
        self.engine, self.crowd = engine, crowd
        self._tenants, self._control = tenants, control
        self._stack = stack

    async def peer(self, sends: bytes = b"", *, address: str = "127.0.0.1") -> Peer:
        """A connection to the tenants' port that has been taken in."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._tenants, local_addr=(address, 0))
        self._stack.callback(writer.close)
        writer.write(sends)
        await writer.drain()
        return reader, writer

    async def client(self) -> httpx.AsyncClient:
        return await self._stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._tenants}", headers=HEADERS, timeout=30)
        )

    async def control_answers(self) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._control}", timeout=30) as client:
            assert (await client.get("/healthz")).status_code == 200
            answer = await client.get("/v1/experiments", headers={"Authorization": "Bearer of-the-operator"})
            assert answer.status_code == 200


@asynccontextmanager
async def ports(folder: Path, crowd: Crowd) -> AsyncIterator[Ports]:
    engine = Engine(folder)
    engine.supervisor.served.admit(one().uid, "e", TOKEN)
    engine.sampler.published.append(1)
    (folder / "token").write_text("of-the-operator")
    control = create_app(engine.supervisor, TokenFile(folder / "token"), CollectorRegistry())
    servers = [
        engine_module._server(create_tenant_app(engine.supervisor), http=crowd.protocol, backlog=8),
        engine_module._server(control),
    ]
    sockets = [engine_module._listen("127.0.0.1", 0, "--port") for _ in servers]
    numbers = [socket.getsockname()[1] for socket in sockets]
    serving = [asyncio.create_task(s.serve(sockets=[socket])) for s, socket in zip(servers, sockets, strict=True)]
    try:
        while not all(server.started for server in servers):  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0)
        async with AsyncExitStack() as stack:
            yield Ports(engine, crowd, numbers[0], numbers[1], stack)
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)


@pytest_asyncio.fixture
async def full(tmp_path: Path) -> AsyncIterator[Ports]:
    """A port for eight connections."""
    async with ports(tmp_path, Crowd(most=8, idle_seconds=600)) as opened:
        yield opened


async def ended(peer: Peer) -> bytes:
    """What it was told before it was closed."""
    async with asyncio.timeout(20):
        try:
            return await peer[0].read()
        except ConnectionError:
            return b""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - sockets have no event for it
            await asyncio.sleep(0)


async def test_connections_that_ask_for_nothing_keep_nobody_out(full: Ports) -> None:
    """Silent ones, ones in the middle of a header, and ones that were refused and stay."""
    refused = b"GET /v1/models HTTP/1.1\r\nhost: e\r\nauthorization: Bearer wrong\r\n\r\n"
    unfinished = b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: 1000\r\n\r\n{"
    peers = [await full.peer(sends) for sends in (b"", b"GET /v1/mod", refused, unfinished) * 8]
    await until(lambda: len(full.crowd) == 8)
    client = await full.client()
    assert (await client.get("/v1/models")).status_code == 200
    assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
    await full.control_answers()
    assert len(full.crowd) == 8
    await ended(peers[0])
    assert (await client.get("/v1/models")).status_code == 200, "it is none of the longest idle"


async def test_pipelined_requests_without_a_token_hold_no_place(full: Ports) -> None:
    requests = b"GET /v1/models HTTP/1.1\r\nhost: e\r\n\r\n" * 200
    for _ in range(8):
        await full.peer(requests)
    client = await full.client()
    assert (await client.get("/v1/models")).status_code == 200


async def test_the_address_with_most_idle_connections_gives_way(full: Ports) -> None:
    quiet = await full.peer(address="127.0.0.2")
    await until(lambda: len(full.crowd) == 1)
    many = [await full.peer() for _ in range(20)]
    await until(lambda: len(full.crowd) == 8)
    for peer in many[:13]:
        assert await ended(peer) == b""
    assert len(full.crowd) == 8
    assert not quiet[0].at_eof(), "the oldest of all, and alone at its address"


async def test_who_is_served_is_never_closed_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ports(tmp_path, Crowd(most=2, idle_seconds=600)) as opened:
        sampler, sample = opened.engine.sampler, opened.engine.sampler.sample
        begun, go_on = asyncio.Semaphore(0), asyncio.Event()

        async def slowly(*given: Any) -> Any:
            begun.release()
            await go_on.wait()
            return await sample(*given)

        monkeypatch.setattr(sampler, "sample", slowly)
        clients = [await opened.client() for _ in range(2)]
        asking = [asyncio.create_task(client.post("/v1/completions", json=COMPLETION)) for client in clients]
        async with asyncio.timeout(20):
            for _ in asking:
                await begun.acquire()
        told = await ended(await opened.peer())
        assert told.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in told
        await opened.control_answers()
        go_on.set()
        assert [(await answer).status_code for answer in asking] == [200, 200]
        assert (await (await opened.client()).get("/v1/models")).status_code == 200, "theirs are idle now"


@pytest.mark.parametrize(
    "begins",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET /v1/models HTTP/1.1\r\nx: ", id="a header without end"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: 9999999\r\n\r\n", id="refused"),
    ],
)
async def test_an_idle_connection_ends_whatever_it_sends(tmp_path: Path, begins: bytes) -> None:
    async with ports(tmp_path, Crowd(most=8, idle_seconds=0.1)) as opened:
        peer = await opened.peer(begins)

        async def trickle() -> None:
            while begins:
                peer[1].write(b"a")
                await peer[1].drain()
                await asyncio.sleep(0.01)

        sending = asyncio.create_task(trickle())
        await ended(peer)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: len(opened.crowd) == 0)


async def test_a_header_without_end_is_refused_by_its_size(full: Ports) -> None:
    peer = await full.peer(b"GET /v1/models HTTP/1.1\r\n" + b"x: y\r\n" * 20_000)
    await ended(peer)
    await until(lambda: len(full.crowd) == 0)


def test_tenants_connections_leave_files_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    for limits, connections in (
        ((256, 256), 64),
        ((1024, 2048), 512),
        ((1024, 1 << 20), MOST_CONNECTIONS),
        ((1024, resource.RLIM_INFINITY), MOST_CONNECTIONS),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), MOST_CONNECTIONS),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert engine_module._tenant_connections() == connections
    assert raised == [(256, 256), (2048, 2048), (4096, 1 << 20), (4096, resource.RLIM_INFINITY)]
