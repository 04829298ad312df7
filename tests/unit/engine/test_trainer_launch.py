"""The environment of a trainer's processes: what torch and OpenMP read before the first line of it runs."""

from __future__ import annotations

import pytest

from clora_engine.config import SLEEPING_THREADS
from clora_engine.trainer_launch import environment


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SLEEPING_THREADS, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_on_the_cpu_threads_sleep_while_they_wait_for_the_sampler_has_the_same_cores() -> None:
    found = environment("cpu", threads=3, processes=1)
    assert found.items() >= SLEEPING_THREADS.items()
    assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == ("3", "")


def test_on_gpus_threads_wait_as_they_like() -> None:
    found = environment("cuda:2", threads=3, processes=2)
    assert not found.keys() & SLEEPING_THREADS.keys()
    assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == ("3", "2,3")
