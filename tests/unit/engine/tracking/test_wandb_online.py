"""W&B's own library against a server that speaks its API: what arrives, once, and with which key."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from clora_engine import tracking
from tests.unit.engine.loop import UID
from tests.unit.engine.tracking import fixtures
from tests.unit.engine.tracking.fixtures import (
    SECONDS,
    WANDB,
    Run,
    anywhere,
    children,
    expected,
    seen_by_others,
    tracked,
    workspace,
)
from tests.unit.engine.tracking.wandb_server import Server, serving

KEY = "0123456789abcdef" * 2 + "01234567"  # W&B's have forty characters
BASIC = "Basic " + base64.b64encode(f"api:{KEY}".encode()).decode()


def online(folder: Path, server: Server) -> Run:
    url = f"http://127.0.0.1:{server.port}"
    tracker = {"kind": "WandB", "project": "p", "url": url, "secretRef": {"name": "s", "key": "k"}}
    return fixtures.online(folder, tracker, server.port, KEY)


async def test_a_server_gets_everything_once(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "PAUSES", (2.0,))  # W&B's own process ends a second after its parent
    async with serving() as server:
        run = online(tmp_path, server)
        run.begin()
        for step in range(3):
            run.step(step)
        await run.sent(2)
        (pid,) = children()
        assert KEY not in seen_by_others(pid) + seen_by_others(os.getpid())
        assert anywhere(workspace(pid), KEY) == []
        os.killpg(pid, signal.SIGKILL)
        await run.until(lambda report: "has ended" in report.problem)
        run.step(3)
        await run.sent(3)
        await run.end()
    assert server.steps() == expected(4)
    assert server.over
    assert {authorization for _, authorization in server.requests} == {BASIC}
    assert {path for path, _ in server.requests} == {"/graphql", f"/files/team/p/{UID}/file_stream"}  # and no files
    assert "learningRate" in server.run["config"]
    assert not server.run["host"]
    assert anywhere(tmp_path, KEY) == []
    assert KEY not in caplog.text + repr(run.tracking.report()) + repr(run.wanted)


async def test_a_key_that_is_refused_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tracking, "PAUSES", (0.0,))
    async with serving(Server(status=401)) as server:
        run = online(tmp_path, server)
        run.begin()
        run.step(0)
        await run.until(lambda report: report.problem != "")
        assert KEY not in run.tracking.report()[0].problem
        server.status = 200
        await run.sent(0)
        await run.end()
    assert server.steps() == expected(1)


async def test_wandb_sync_joins_what_was_kept_offline(tmp_path: Path) -> None:
    """Each life of a tracker has made a folder of its own."""
    run = Run(tmp_path, tracked(WANDB))
    for first in (0, 2):
        run.begin()
        run.step(first)
        run.step(first + 1)
        await run.sent(first + 1)
        await run.end(None)
    folders = sorted(map(str, (run.folder / "tracking" / "wandb").glob("offline-run-*")))
    assert len(folders) == 2
    async with serving() as server:
        environment = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.port}", "WANDB_API_KEY": KEY, "HOME": str(tmp_path)}
        command = (sys.executable, "-m", "wandb", "sync", *folders)
        sync = await asyncio.create_subprocess_exec(*command, env=environment, cwd=tmp_path)
        assert await asyncio.wait_for(sync.wait(), SECONDS) == 0
    assert server.steps() == expected(4)
