"""The queue: coalescing, no key twice at once, back-off by key, delays."""

from __future__ import annotations

import asyncio

import pytest

from clora_operator.work_queue import WorkQueue


async def taken(queue: WorkQueue[str], seconds: float = 5.0) -> str:
    return await asyncio.wait_for(queue.get(), seconds)


async def nothing(queue: WorkQueue[str]) -> bool:
    try:
        await asyncio.wait_for(queue.get(), 0.01)
    except TimeoutError:
        return True
    return False


async def test_a_key_waits_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in "aba":
        queue.add(key)
    assert [await taken(queue), await taken(queue)] == ["a", "b"]
    assert await nothing(queue)


async def test_a_key_is_not_worked_on_twice_at_once_and_not_lost() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    await taken(queue)
    queue.add("a")
    assert await nothing(queue)
    queue.done("a")
    assert await taken(queue) == "a"
    queue.done("a")
    assert await nothing(queue)


async def test_the_earliest_wish_counts() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a", 3600)
    queue.add("a", 0.01)
    queue.add("b", 3600)
    queue.add("b")
    assert await taken(queue) == "b"
    assert await taken(queue) == "a"
    queue.done("a")
    assert await nothing(queue)


async def test_backoff_grows_by_key_and_is_forgotten() -> None:
    queue: WorkQueue[str] = WorkQueue(base=1.0, limit=5.0)
    delays = []
    for _ in range(4):
        queue.add("a")
        await taken(queue)
        delays.append(queue.retry("a"))
    assert delays == [1.0, 2.0, 4.0, 5.0]
    queue.add("b")
    await taken(queue)
    assert queue.retry("b") == 1.0
    queue.add("a")
    await taken(queue)
    queue.done("a")
    queue.add("a")
    await taken(queue)
    assert queue.retry("a") == 1.0


@pytest.mark.parametrize("workers", [1, 4])
async def test_all_is_worked_off_by_many(workers: int) -> None:
    queue: WorkQueue[int] = WorkQueue()
    seen: list[int] = []
    busy: set[int] = set()
    finished = asyncio.Event()

    async def work() -> None:
        while True:
            key = await queue.get()
            assert key not in busy
            busy.add(key)
            await asyncio.sleep(0)
            seen.append(key)
            busy.discard(key)
            queue.done(key)
            if set(seen) == set(range(10)):
                finished.set()

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    for key in range(50):
        queue.add(key % 10)
        await asyncio.sleep(0)
    await asyncio.wait_for(finished.wait(), 5)
    for task in tasks:
        task.cancel()
