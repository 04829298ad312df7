"""Threads that tenants share: who is served when; what is cancelled is not made."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, wait

import pytest

from clora_engine.fair_threads import FairThreads

SECONDS = 30.0


class Calls:
    """Calls that begin when a thread takes them and end when they are told to."""

    def __init__(self, workers: int) -> None:
        self.threads = FairThreads(workers, "test")
        self.begun: list[str] = []
        self._ends: dict[str, threading.Event] = {}
        self._news = threading.Condition()

    def submit(self, name: str) -> Future[str]:
        """`name` begins with the tenant's letter."""
        self._ends[name] = threading.Event()

        def call() -> str:
            with self._news:
                self.begun.append(name)
                self._news.notify_all()
            assert self._ends[name].wait(SECONDS)
            return name

        return self.threads.submit(name[0], call)

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()

    def until_begun(self, count: int) -> list[str]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.begun) >= count, SECONDS)
            return self.begun


def test_a_tenant_with_many_calls_has_one_thread_and_the_others_come_between() -> None:
    calls = Calls(workers=2)
    many = [calls.submit(f"a{i}") for i in range(5)]
    assert calls.until_begun(1) == ["a0"]
    other = [calls.submit("b0"), calls.submit("c0"), calls.submit("b1")]
    assert calls.until_begun(2) == ["a0", "b0"], "the second thread is free for others"
    calls.end("a0")
    assert calls.until_begun(3) == ["a0", "b0", "c0"], "a has had its turn"
    calls.end("b0")
    assert calls.until_begun(4)[3] == "a1"
    calls.end("c0")
    assert calls.until_begun(5)[4] == "b1"
    calls.end("b1", *(f"a{i}" for i in range(1, 5)))
    wait([*many, *other], SECONDS)
    assert [future.result() for future in many] == [f"a{i}" for i in range(5)], "a tenant's calls keep their order"
    assert [name for name in calls.begun if name[0] == "a"] == [f"a{i}" for i in range(5)]


def test_what_is_cancelled_before_its_turn_is_not_made_and_takes_no_turn() -> None:
    calls = Calls(workers=1)
    first = calls.submit("a0")
    calls.until_begun(1)
    waiting = [calls.submit("a1"), calls.submit("b0"), calls.submit("a2")]
    assert waiting[0].cancel()
    assert not first.cancel(), "it runs"
    calls.end("a0", "b0", "a2")
    wait(waiting, SECONDS)
    assert calls.begun == ["a0", "b0", "a2"]
    assert first.result() == "a0"


def test_an_error_is_its_callers_and_nothing_is_kept_of_who_has_left() -> None:
    threads = FairThreads(1, "test")

    def fails() -> None:
        raise ValueError("mine")

    failed, made = threads.submit("a", fails), threads.submit("a", lambda: 7)
    with pytest.raises(ValueError, match="mine"):
        failed.result(SECONDS)
    assert made.result(SECONDS) == 7
    assert threads.submit("b", lambda: 8).result(SECONDS) == 8  # after a's last turn
    assert "a" not in threads._waiting


async def test_awaited_it_can_be_cancelled_while_it_waits() -> None:
    calls = Calls(workers=1)
    calls.submit("a0")
    await asyncio.to_thread(calls.until_begun, 1)
    made: list[str] = []
    waiting = asyncio.create_task(calls.threads.run("b", lambda: made.append("b")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    calls.end("a0")
    assert await calls.threads.run("c", lambda: "c") == "c"
    assert made == []
