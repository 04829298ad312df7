"""The environment of vLLM's processes, which is the engine's own for a while."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from clora_engine.sampler_config import SamplerConfig, process_environment
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
