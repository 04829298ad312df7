"""Checks of specs: one at a time for a uid, and no answer is lost."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from clora_engine import supervisor as supervising
from clora_engine.admissions import Admissions
from clora_engine.config import EngineConfig
from clora_engine.errors import TransientError, UserError


class Check:
    """Answers `made`, its count, once `go` is set, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made = 0
        self.error = error
        self.go = asyncio.Event()

    async def __call__(self) -> int:
        self.made += 1
        number = self.made
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return number


async def turns() -> None:
    """Lets what can go on go on."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_many_who_ask_for_the_same_share_one_check() -> None:
    admissions, check = Admissions[int](), Check()
    asking = [asyncio.create_task(admissions.ask("u", "d", check)) for _ in range(4)]
    other = asyncio.create_task(admissions.ask("v", "d", check))
    await turns()
    asking[0].cancel()  # who gives up does not end it for the others
    check.go.set()
    assert len(set(await asyncio.gather(*asking[1:], other))) == 2
    assert check.made == 2


async def test_another_spec_waits_for_the_end_of_the_check() -> None:
    admissions, check = Admissions[int](), Check()
    asking = asyncio.create_task(admissions.ask("u", "d", check))
    await turns()
    with pytest.raises(TransientError, match="is still being checked"):
        await admissions.ask("u", "other", check)
    check.go.set()
    await asking
    assert await admissions.ask("u", "other", check) == 2


async def test_an_answer_that_nobody_waited_for_is_told_to_the_next_who_asks_once() -> None:
    admissions, check = Admissions[int](), Check(UserError("wrong"))
    asking = asyncio.create_task(admissions.ask("u", "d", check))
    await turns()
    asking.cancel()
    await asyncio.wait([asking])
    check.go.set()
    for made in (1, 2):
        with pytest.raises(UserError, match="wrong"):
            await admissions.ask("u", "d", check)
        assert check.made == made


async def test_an_engine_ends_though_a_task_of_its_own_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervising, "CANCEL_SECONDS", 0.01)
    engine = supervising.Supervisor(EngineConfig(model="m", storage=tmp_path, token_file=tmp_path / "token"), 1, "0")
    go = asyncio.Event()

    async def stubborn() -> None:
        while not go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go.wait()

    task = engine._tasks["u"] = asyncio.create_task(stubborn(), name="experiment-u")
    await turns()
    await engine.stop(0.0)
    assert "experiment-u does not end: left behind" in caplog.text
    go.set()
    await task
