"""The environment of vLLM's processes, which is the engine's own for a while."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from clora_engine.config import SLEEPING_THREADS, EngineConfig
from clora_engine.engine import _kv_cache_bytes
from clora_engine.sampler_config import SamplerConfig, process_environment, share_of_host
from clora_engine.vllm_plugin import ENGINE_PID


def config(folder: Path, threads: int) -> SamplerConfig:
    return SamplerConfig(
        model=folder,
        versions_root=folder / "versions",
        max_model_len=64,
        max_lora_rank=8,
        slots=2,
        threads=threads,
    )


def test_what_a_sampler_on_the_cpu_takes_of_its_host(tmp_path: Path) -> None:
    said = replace(config(tmp_path, 1), kv_cache_bytes=3 << 30, data_parallel_size=2)
    assert share_of_host(said, 64 << 30) == (2, 6 << 30)
    copies, kv_bytes = share_of_host(config(tmp_path, 1), 100 << 30)
    assert (copies, kv_bytes) == (0, 92 << 30), "vLLM's own choice: model and cache together"


@pytest.mark.parametrize("shares_cores", [True, False])
def test_threads_sleep_while_they_wait_where_the_trainer_has_the_same_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares_cores: bool
) -> None:
    for name in SLEEPING_THREADS:
        monkeypatch.delenv(name, raising=False)
    with process_environment(replace(config(tmp_path, 2), shares_cores=shares_cores)):
        found = {name: os.environ[name] for name in SLEEPING_THREADS if name in os.environ}
    assert found == (SLEEPING_THREADS if shares_cores else {})


def test_samplers_that_start_at_once_leave_the_environment_as_it_was(tmp_path: Path) -> None:
    before = dict(os.environ)
    first_is_in, first_may_end = Event(), Event()

    def start(threads: int) -> str:
        with process_environment(config(tmp_path, threads)):
            first_is_in.set()
            assert first_may_end.wait(60)
            assert os.environ[ENGINE_PID] == str(os.getpid())
            return os.environ["OMP_NUM_THREADS"]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(start, 3)
        assert first_is_in.wait(60)
        second = pool.submit(start, 4)
        first_may_end.set()
        assert (first.result(60), second.result(60)) == ("3", "4")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("given", "gpus", "ranks", "wanted"),
    [(3 << 30, 0, 2, 3 << 30), (None, 1, 1, None), (None, 0, 1, 8 << 30), (None, 0, 2, 4 << 30)],
)
def test_a_kv_cache_on_a_cpu_leaves_room_for_the_trainer(
    tmp_path: Path, given: int | None, gpus: int, ranks: int, wanted: int | None
) -> None:
    settings: dict[str, Any] = {"kv_cache_bytes": given, "sampler_gpus": gpus, "data_parallel_size": ranks}
    engine = EngineConfig(model="m", storage=tmp_path, token_file=tmp_path / "token", **settings)
    assert _kv_cache_bytes(engine, 64 << 30) == wanted
