"""Runs of real experiments on a real engine with SmolLM2 on the CPU: what the learning and throughput benchmarks share.

An engine process is driven over its control API, as an operator drives it. Jobs run N at a time: the next one is
attached when one has ended, as on an engine with N slots and a queue.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clora_api.control import ExperimentReport, Phase
from local.model import NAME, model
from tests.engine_fixtures import FINAL, EngineProcess

WARM_UP = "warm-up"
WARM_UP_FAMILIES = "errands,TwoStep"
FAMILIES = ("kitchen", "garden", "trips", "workshop")  # of one-step problems that the warm-up has not seen
LORA = {"rank": 16, "alpha": 32}
LEARNING_RATE = "5e-4"
THREADS = 2
MAX_SECONDS = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    """One experiment. `spec` is a LoRAExperiment's; it starts from the warm-up's last step."""

    name: str
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """What a job was like. Times in seconds since the first job of its run was attached; `metrics`: a line a step."""

    name: str
    attached: float
    ended: float
    metrics: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def engine(folder: Path, **flags: Any) -> Iterator[EngineProcess]:
    """A started engine with SmolLM2 and room for eight experiments; it keeps its storage below `folder`."""
    settings = {
        "model_name": NAME,
        "max_experiments": 8,
        "max_model_len": 1024,
        "max_num_seqs": 128,
        "kv_cache_memory": "1Gi",
        "sampler_threads": THREADS,
        "trainer_threads": THREADS,
    }
    process = EngineProcess(folder, model(), **{**settings, **flags})
    try:
        process.start()
        yield process
    finally:
        process.close()


def warm_up_spec(seed: int = 1) -> dict[str, Any]:
    """144 demonstrations, drawn evenly over templates, that teach the form of the tools."""
    return {
        "engineRef": {"name": "local"},
        "lora": {**LORA, "seed": seed},
        "algorithm": {
            "estimator": "SFT",
            "loss": "CrossEntropy",
            "promptsPerStep": 8,
            "learningRate": "1.5e-3",
            "optimizer": {"warmupSteps": 3, "schedule": "Linear"},
        },
        "environment": {"name": "WordProblems", "arguments": {"families": WARM_UP_FAMILIES}},
        "data": {"builtin": "Generated"},
        "maxSteps": 18,
    }


def warm_up(process: EngineProcess, seed: int = 1) -> None:
    """Makes the start of all jobs; once a storage."""
    process.put(WARM_UP, warm_up_spec(seed)).raise_for_status()  # one that has ended on this storage stays ended
    expect_success(process.wait(WARM_UP, lambda r: r.phase in FINAL, MAX_SECONDS))
    process.delete(WARM_UP)


def rl_spec(
    environment: Mapping[str, Any], *, seed: int, prompts: int, group: int, steps: int, **changes: Any
) -> dict[str, Any]:
    """GRPO with PPO's loss from the warm-up; `changes` replace top-level fields."""
    return {
        "engineRef": {"name": "local"},
        "lora": dict(LORA),
        "algorithm": {
            "promptsPerStep": prompts,
            "groupSize": group,
            "learningRate": LEARNING_RATE,
            "optimizer": {"warmupSteps": 2},
        },
        "environment": dict(environment),
        "data": {"builtin": "Generated", "shuffleSeed": seed},
        "sampling": {"temperature": "1.0", "maxTokens": 40},
        "initFrom": {"experiment": {"name": WARM_UP}},
        "checkpoint": {"keep": 1},
        "maxSteps": steps,
    } | changes


def run(
    process: EngineProcess, jobs: Sequence[Job], at_once: int, on_end: Callable[[Ended], None] = lambda _: None
) -> list[Ended]:
    """Runs the jobs, so many at a time, in order; each is told to `on_end` and then taken off, with its files, when it
    has succeeded. Jobs of these names that a killed run has left on the storage go on from their commits: see `forget`.

    Raises RuntimeError when one fails.
    """
    waiting, attached, ended = deque(jobs), dict[str, float](), list[Ended]()
    start = time.monotonic()

    def fill() -> None:
        while waiting and len(attached) < at_once:
            job = waiting.popleft()
            process.put(job.name, job.spec, init_source={"uid": WARM_UP}).raise_for_status()
            attached[job.name] = time.monotonic() - start

    fill()
    for page in process.lists(MAX_SECONDS):
        for report in page.items:
            if report.uid in attached and report.phase in FINAL:
                now = time.monotonic() - start
                expect_success(report)
                ended.append(Ended(report.uid, attached.pop(report.uid), now, process.metrics(report.uid)))
                on_end(ended[-1])
                process.delete(report.uid, files="Delete")
        fill()
        if not attached:
            return ended
    raise RuntimeError(f"not finished within {MAX_SECONDS} s: {sorted(attached)}")


def forget(process: EngineProcess, jobs: Sequence[Job]) -> None:
    """Deletes what a killed run has left of these jobs, for a run whose times count."""
    for job in jobs:
        process.delete(job.name, files="Delete")


def expect_success(report: ExperimentReport) -> None:
    """Raises RuntimeError with what the engine says of one that has ended otherwise."""
    if report.phase is not Phase.SUCCEEDED:
        raise RuntimeError(f"{report.uid} is {report.phase}: {report.reason} {report.message}")


def arguments(doc: str | None, argv: Sequence[str] | None, parts_help: str) -> argparse.Namespace:
    """work, parts and out, of a benchmark that is made part by part."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for storage and finished parts")
    parser.add_argument("--parts", default="", help=parts_help)
    parser.add_argument("--out", type=Path, help="where the results go, of all parts that are there")
    return parser.parse_args(argv)


class Parts:
    """Finished parts of a long benchmark, a file each, so that it goes on where it was stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> dict[str, Any] | None:
        path = self._folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, name: str, part: Mapping[str, Any]) -> None:
        partial = self._folder / f"{name}.partial"
        partial.write_text(json.dumps(part))
        partial.rename(self._folder / f"{name}.json")
