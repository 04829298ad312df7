"""A real HTTP server on this machine's loopback that behaves as an environment, or misbehaves as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from clora_engine.environments.http import HttpFactory
from clora_engine.environments.http_addresses import AllowedHost, HostPolicy
from clora_engine.environments.http_protocol import Description

LOOPBACK = HostPolicy((AllowedHost.parse("127.0.0.1"),), loopback=True)
ECHO = {
    "name": "echo",
    "description": "Says it again.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
DESCRIPTION: dict[str, Any] = {"protocol": 1, "tools": [ECHO], "requiredFields": ["question"]}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Server:
    """An environment with the tool echo: it answers `echo` with its text, and ends with reward 1 at the text "end".
    `handlers` replace its answers by path; `requests` are (path, Idempotency-Key, body)."""

    url: str = ""
    handlers: dict[str, Handler] = field(default_factory=dict)
    requests: list[tuple[str, str, Any]] = field(default_factory=list)

    def factory(self, policy: HostPolicy = LOOPBACK, retries: int = 0) -> HttpFactory:
        return HttpFactory(self.url, policy, Description.model_validate_json(json.dumps(DESCRIPTION)), retries=retries)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"null")
        self.requests.append((request.path, request.headers.get("Idempotency-Key", ""), body))
        if request.path in self.handlers:
            return await self.handlers[request.path](request)
        return web.json_response(self._answer(request.path, body))

    def _answer(self, path: str, body: Any) -> Any:
        if path == "/v1/environment":
            return DESCRIPTION
        if path == "/v1/reset":
            return {"messages": [{"role": "user", "content": body["example"]["question"]}]}
        if path == "/v1/close":
            return {}
        calls = body["message"]["toolCalls"]
        text = calls[0]["arguments"].get("text") if calls else "say it with echo"
        if text == "end":
            return {"reward": 1, "done": True}
        return {
            "messages": [{"role": "tool", "name": "echo", "content": str(text)}],
            "reward": 0.25,
            "toolErrors": int(not calls),
        }


@asynccontextmanager
async def serving(**handlers: Handler) -> AsyncIterator[Server]:
    """`handlers`: by the path's last part."""
    server = Server(handlers={f"/v1/{name}": handler for name, handler in handlers.items()})
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{tail:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def answers(data: bytes | str, status: int = 200, **headers: str) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        body = data.encode() if isinstance(data, str) else data
        return web.Response(body=body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return handler


async def never(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def breaks_off(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
