"""The engine's real HTTP servers, for the operator and for tenants, over the real supervisor and the real loop with the
tiny model of the unit tests: in a thread, without vLLM. What it lacks is a sampler whose answers mean anything."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from clora_engine.server.app import create_app
from clora_engine.server.auth import TokenFile
from clora_engine.server.tenants import create_tenant_app
from local.control_plane import free_port
from tests.unit.engine.test_serving import Engine

START_SECONDS = 60


class LoopEngine:
    """token: the control API's. With room for one experiment."""

    def __init__(self, folder: Path, token: str) -> None:
        self._folder, ports = folder, (free_port(), free_port())
        folder.mkdir()
        (folder / "token").write_text(token)
        self.endpoint, tenants = (f"http://127.0.0.1:{port}" for port in ports)
        self.tenants = f"{tenants}/v1"
        self._ports, self._servers, self._up = ports, list[uvicorn.Server](), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="loop-engine")

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(START_SECONDS)

    def close(self) -> None:
        """Its running step comes to its end first."""
        for server in self._servers:
            server.should_exit = True
        self._thread.join()

    def accepts(self, token: str) -> bool:
        """Whether a tenant who has this token is let in."""
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.get(f"{self.tenants}/models", headers=headers, trust_env=False, timeout=60)
        assert answer.status_code in (200, 401)
        return answer.status_code == 200

    async def _live(self) -> None:
        supervisor = Engine(self._folder).supervisor
        control = create_app(supervisor, TokenFile(self._folder / "token"), CollectorRegistry())
        for app, port in zip((control, create_tenant_app(supervisor)), self._ports, strict=True):
            self._servers.append(_server(app, port))
        serving = [asyncio.create_task(server.serve()) for server in self._servers]
        while not all(server.started for server in self._servers):  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
        self._up.set()
        await asyncio.gather(*serving)
        await supervisor.stop(60)


def _server(app: FastAPI, port: int) -> uvicorn.Server:
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)
    return uvicorn.Server(config)
