"""Trackers that are online: where the key goes, and where it does not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from clora_engine import tracking
from tests.unit.engine.tracking import fixtures
from tests.unit.engine.tracking.fixtures import KEY, Run, anywhere, children, expected, seen_by_others
from tests.unit.engine.tracking.server import Server, serving


def mlflow(url: str) -> dict[str, Any]:
    return {"kind": "MLflow", "project": "p", "url": url, "secretRef": {"name": "s", "key": "k"}}


def online(folder: Path, server: Server, *, host: str = "127.0.0.1", loopback: bool = True) -> Run:
    return fixtures.online(folder, mlflow(f"http://{host}:{server.port}"), server.port, KEY, loopback=loopback)


async def test_a_server_gets_everything_once_and_the_key_in_its_header_alone(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "PAUSES", (0.0,))
    async with serving() as server:
        run = online(tmp_path, server)
        run.begin()
        for step in range(3):
            run.step(step)
        await run.sent(2)
        (pid,) = children()
        assert KEY not in seen_by_others(pid) + seen_by_others(os.getpid())
        os.killpg(pid, signal.SIGKILL)
        await run.until(lambda report: "ended" in report.problem)
        run.step(3)
        await run.sent(3)
        await run.end()
    assert server.steps() == expected(4)
    assert server.run["status"] == "FINISHED"
    assert server.run["tags"]["clora.step"] == "3"
    assert {authorization for _, authorization in server.requests} == {f"Bearer {KEY}"}
    assert anywhere(tmp_path, KEY) == []
    assert KEY not in caplog.text + repr(run.tracking.report()) + repr(run.wanted)


async def test_a_redirect_takes_the_key_nowhere(tmp_path: Path) -> None:
    async with serving() as elsewhere, serving() as server:
        server.redirect = f"http://127.0.0.1:{elsewhere.port}"
        run = online(tmp_path, server)
        run.begin()
        await run.until(lambda report: report.problem != "")
        await run.end()
        assert elsewhere.requests == []
        assert server.requests != []


async def test_a_loopback_address_is_reached_by_no_name(tmp_path: Path) -> None:
    async with serving() as server:
        run = online(tmp_path, server, loopback=False)
        run.begin()
        await run.until(lambda report: "loopback" in report.problem)
        await run.end()
        assert server.requests == []


async def test_another_node_of_the_engine_is_reached_by_no_name(tmp_path: Path) -> None:
    wanted = fixtures.tracked(mlflow("http://198.51.100.7:5000"), keys={"MLflow": KEY})
    run = fixtures.Run(tmp_path, wanted, tracking_hosts=("198.51.100.7",), other_nodes=("198.51.100.7",))
    run.begin()
    await run.until(lambda report: "one of the engine's nodes" in report.problem)
    await run.end()


async def test_what_a_server_refuses_is_said_without_the_key(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "PAUSES", (0.0,))
    async with serving(Server(status=403)) as server:
        run = online(tmp_path, server)
        run.begin()
        run.step(0)
        await run.until(lambda report: "PERMISSION_DENIED" in report.problem)
        assert KEY not in caplog.text + run.tracking.report()[0].problem
        server.status = 200
        await run.sent(0)
        await run.end()
        assert server.steps() == expected(1)


async def test_a_key_that_was_not_sent_is_said(tmp_path: Path) -> None:
    async with serving() as server:
        run = online(tmp_path, server)
        run.wanted = run.wanted.model_copy(update={"tracking_keys": None})
        run.begin()
        await run.until(lambda report: "Secret" in report.problem)
        assert server.requests == []
        run.tracking.update(run.wanted.model_copy(update={"tracking_keys": {"MLflow": KEY}}))
        run.step(0)
        await run.sent(0)
        await run.end()
        assert server.steps() == expected(1)
