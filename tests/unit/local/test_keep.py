"""A keeper restarts what fails, stops with it, and never outlives or is outlived by it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local.cache import REPOSITORY

Keeper = subprocess.Popen[str]


@pytest.fixture
def keepers() -> Iterator[list[Keeper]]:
    made: list[Keeper] = []
    yield made
    for keeper in made:
        keeper.kill()
        keeper.wait(10)
        assert keeper.stderr is not None
        keeper.stderr.close()


def start(keepers: list[Keeper], *command: str) -> Keeper:
    keeper = subprocess.Popen(
        [sys.executable, "-m", "local.keep", "--", *command], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )
    keepers.append(keeper)
    return keeper


def child(keeper: Keeper) -> int:
    """The pid of the next child that the keeper says it has started."""
    assert keeper.stderr is not None
    for line in keeper.stderr:
        if "started pid" in line:
            return int(line.split("started pid ")[1].split(":")[0])
    raise AssertionError("the keeper ended")


def test_it_starts_again_what_was_killed(keepers: list[Keeper]) -> None:
    keeper = start(keepers, "sleep", "1000")
    first = child(keeper)
    os.kill(first, signal.SIGKILL)
    second = child(keeper)
    assert second != first
    keeper.terminate()
    assert keeper.wait(10) == 0
    assert not Path(f"/proc/{second}").exists()


def test_it_ends_with_what_ends_well(keepers: list[Keeper]) -> None:
    assert start(keepers, "true").wait(10) == 0


def test_the_child_dies_with_a_killed_keeper(keepers: list[Keeper]) -> None:
    keeper = start(keepers, "sleep", "1000")
    pid = child(keeper)
    watch = os.pidfd_open(pid)
    keeper.kill()
    keeper.wait(10)
    assert select.select([watch], [], [], 10)[0], "the child outlived its keeper"
    os.close(watch)
