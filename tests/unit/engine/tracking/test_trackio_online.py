"""Trackio's own client, in its real process, against its own server: what arrives, once, and where the key goes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from clora_engine import tracking
from tests.unit.engine.loop import UID
from tests.unit.engine.tracking import fixtures, server, trackio_server
from tests.unit.engine.tracking.fixtures import KEY, Run, anywhere, children, expected, seen_by_others, workspace


def online(folder: Path, port: int, *, key: str = KEY, loopback: bool = True) -> Run:
    tracker = {"kind": "Trackio", "project": "p", "secretRef": {"name": "s", "key": "k"}}
    return fixtures.online(folder, tracker | {"url": f"http://127.0.0.1:{port}"}, port, key, loopback=loopback)


async def test_a_server_gets_everything_once_whoever_is_killed(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "PAUSES", (0.0,))
    store = tmp_path / "store"
    async with trackio_server.serving(store, KEY) as first:
        run = online(tmp_path / "engine", first.port)
        run.begin()
        run.step(0)
        await run.sent(0)
        (pid,) = children()
        assert KEY not in seen_by_others(pid) + seen_by_others(os.getpid())
        assert anywhere(workspace(pid), KEY) == []
        for step in range(1, 40):
            run.step(step)
        await run.sent_in_part(lambda: len(first.requests()), 20, 39)
        os.killpg(pid, signal.SIGKILL)  # in the midst of them
        await run.sent(39)
        for step in range(40, 80):
            run.step(step)
        await run.sent_in_part(lambda: len(first.requests()), 60, 79)
    await run.until(lambda report: report.problem != "" or report.step == 79)  # it has been killed in the midst
    async with trackio_server.serving(store, KEY, port=first.port) as second:
        run.step(80)
        await run.sent(80)
        await run.end()
        asked = second.requests()
    assert await trackio_server.steps(store) == expected(81)
    (row,) = await trackio_server.read(store, "SELECT run_id, run_name, config FROM configs")
    assert (row["run_id"], row["run_name"]) == (UID, "e")
    assert '"learningRate":"1e-2"' in row["config"]
    assert await trackio_server.read(store, "SELECT * FROM system_metrics") == []  # nothing of the engine's machine
    assert {path for path, _ in asked} == {"/version", "/api/get_run_summary", "/api/bulk_log"}
    assert {keys for _, keys in asked} == {("x-trackio-write-token",)}
    assert anywhere(tmp_path, KEY) == []
    assert KEY not in caplog.text + repr(run.tracking.report()) + repr(run.wanted)


async def test_a_key_that_is_refused_is_said_and_a_new_one_taken(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tracking, "PAUSES", (0.0,))
    async with trackio_server.serving(tmp_path / "store", KEY) as there:
        run = online(tmp_path / "engine", there.port, key="another-key")
        run.begin()
        run.step(0)
        await run.until(lambda report: "A write_token is required" in report.problem)
        assert "another-key" not in run.tracking.report()[0].problem
        run.tracking.update(run.wanted.model_copy(update={"tracking_keys": {"Trackio": KEY}}))
        await run.sent(0)
        await run.end()
    assert await trackio_server.steps(tmp_path / "store") == expected(1)


async def test_a_redirect_takes_the_key_nowhere(tmp_path: Path) -> None:
    async with server.serving() as elsewhere, server.serving() as there:
        there.redirect = f"http://127.0.0.1:{elsewhere.port}"
        run = online(tmp_path, there.port)
        run.begin()
        await run.until(lambda report: "307" in report.problem)
        await run.end()
        assert elsewhere.requests == []
        assert {path for path, _ in there.requests} == {"/version"}


async def test_a_loopback_address_is_reached_by_no_name(tmp_path: Path) -> None:
    async with server.serving() as there:
        run = online(tmp_path, there.port, loopback=False)
        run.begin()
        await run.until(lambda report: "loopback" in report.problem)
        await run.end()
        assert there.requests == []


async def test_a_name_that_trackio_reserves_is_said(tmp_path: Path) -> None:
    run = Run(tmp_path, fixtures.tracked(fixtures.TRACKIO | {"project": "my_system"}))
    run.begin()
    await run.until(lambda report: "Choose a different project name" in report.problem)
    await run.end()


NAMES = """
import socket
ask = socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **more: ask("127.0.0.1" if host == "team-p.hf.space" else host, *rest, **more)
"""


async def test_a_space_gets_the_key_as_a_token_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server as it runs on a Space. Its name is made to lead to this machine; everything else is as ever."""
    (tmp_path / "names").mkdir()
    (tmp_path / "names" / "sitecustomize.py").write_text(NAMES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "names"), os.environ.get("PYTHONPATH", "")]))
    async with trackio_server.serving(tmp_path / "store", KEY, space=True) as there:
        tracker = {"kind": "Trackio", "project": "p", "url": f"http://team-p.hf.space:{there.port}"}
        wanted = fixtures.tracked(tracker | {"secretRef": {"name": "s", "key": "k"}}, keys={"Trackio": KEY})
        hosts = (f"*.hf.space:{there.port}",)
        run = Run(tmp_path / "engine", wanted, tracking_hosts=hosts, loopback_environments=True)
        run.begin()
        run.step(0)
        await run.sent(0)
        await run.end()
        assert {keys for _, keys in there.requests()} == {("authorization",)}
    assert await trackio_server.steps(tmp_path / "store") == expected(1)
