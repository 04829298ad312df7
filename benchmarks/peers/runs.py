"""One run of a peer, from its process's start to its end, and one of clora beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engine_runs import Ended
from benchmarks.peers.environments import source_path
from benchmarks.peers.work import Work, read_events
from local.cache import working_uv
from local.control_plane import free_port

START_SECONDS = 900.0
RUN_SECONDS = 3600.0
FIGURES = ("rollout_seconds", "train_seconds", "sampled_tokens", "trained_tokens", "reward_mean")


class PeerFailed(Exception):
    """A peer did not start, or did not end well. `reason` is one line."""

    def __init__(self, reason: str, log: Path | None = None) -> None:
        super().__init__(f"{reason} (see {log})" if log else reason)
        self.reason = reason

    @classmethod
    def ended(cls, status: int | None, log: Path) -> PeerFailed:
        """A process that ended so, or did not in time (None), with the last line of its log."""
        lines = log.read_text(errors="replace").strip().splitlines()
        how = "not finished in time" if status is None else f"exit status {status}"
        return cls(": ".join([how, *lines[-1:]]), log)


def run_script(python: Path, module: str, work: Work, folder: Path) -> tuple[float, float, list[dict[str, Any]]]:
    """Runs a peer's script to its end.

    Returns:
        Seconds since the epoch of the process's start and end, and its events.

    Raises:
        PeerFailed: it did not end well, or not at all.
    """
    told, log = folder / "work.json", folder / "log.txt"
    told.write_bytes(msgspec.json.encode(work))
    environment = {**os.environ, "PYTHONPATH": source_path(), "OMP_NUM_THREADS": str(os.cpu_count())}
    with log.open("w") as output:
        start = time.time()
        command = [str(python), "-m", module, str(told)]
        try:
            done = subprocess.run(
                command, stdout=output, stderr=output, env=environment, timeout=RUN_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise PeerFailed.ended(None, log) from None
        end = time.time()
    if done.returncode != 0:
        raise PeerFailed.ended(done.returncode, log)
    return start, end, read_events(Path(work.out))


def trl_record(start: float, end: float, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """cold_seconds: from the process's start to the end of its first step. job_seconds: all steps, the first from where
    training begins. process_seconds: all of the process."""
    (begin,) = (event["time"] for event in events if event["event"] == "begin")
    ends = [event["time"] for event in events if event["event"] == "step"]
    rollouts = [event for event in events if event["event"] == "rollout"]
    steps = [
        {
            "step": number,
            "seconds": ended - began,
            "rollout_seconds": rollout["seconds"],
            "train_seconds": ended - began - rollout["seconds"],
            "sampled_tokens": rollout["sampled"],
            "trained_tokens": rollout["rows"],
            "padded_tokens": rollout["padded"],
            "reward_mean": rollout["reward_mean"],
        }
        for number, (began, ended, rollout) in enumerate(zip([begin, *ends], ends, rollouts, strict=False), 1)
    ]
    return {
        "cold_seconds": ends[0] - start,
        "job_seconds": ends[-1] - begin,
        "process_seconds": end - start,
        "steps": steps,
    }


def clora_record(jobs: Sequence[Ended]) -> dict[str, Any]:
    """first, mean and last: seconds from the first job's attachment to a job's end; steps: of all jobs."""
    seconds = [job.ended for job in jobs]
    return {
        "first_seconds": min(seconds),
        "mean_seconds": sum(seconds) / len(seconds),
        "last_seconds": max(seconds),
        "steps": [
            {"step": line["step"], "seconds": line["step_seconds"], **{name: line.get(name, 0.0) for name in FIGURES}}
            for job in jobs
            for line in job.metrics
            if line["step"] > 0
        ],
    }


def skyrl_record(clients: int, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Steps of all clients; `wall_seconds`: of each step, from the end of the one before to the last client's end."""
    begun = next(event["time"] for event in events if event["event"] == "created")
    steps = [event for event in events if event["event"] == "step"]
    last = max(event["step"] for event in steps)
    ends = [begun, *(max(e["time"] for e in steps if e["step"] == step) for step in range(1, last + 1))]
    return {
        "clients": clients,
        "wall_seconds": [after - before for before, after in pairwise(ends)],
        "steps": [
            {
                "step": event["step"],
                "publish_seconds": event["publish_seconds"],
                "rollout_seconds": event["rollout_seconds"],
                "train_seconds": event["train_seconds"],
                "sampled_tokens": event["sampled"],
                "trained_tokens": event["trained_tokens"],
                "reward_mean": event["reward_mean"],
            }
            for event in steps
        ],
    }


@contextmanager
def skyrl_server(python: Path, model: Path, folder: Path, adapters: int, rank: int) -> Iterator[str]:
    """SkyRL's Tinker server with its JAX back end on the CPU; its address. It keeps its files below `folder`.

    It starts its engine by `uv run`, with the flags that it finds in its parent's command line, so it must be started
    so itself.

    Raises:
        PeerFailed: there is no uv, or the server ended or did not answer in time.
    """
    uv = working_uv()
    if uv is None:
        raise PeerFailed("SkyRL starts itself by `uv run`, and there is no uv on the PATH")
    port, log = free_port(), folder / "server.log"
    database = folder / "tinker.db"
    for old in folder.glob("tinker.db*"):
        old.unlink()
    backend = {
        "max_lora_adapters": adapters,
        "max_lora_rank": rank,
        "train_micro_batch_size": 16,
        "sample_max_num_sequences": 64,
    }
    command = [uv, "run", "--no-project", "--offline", "-m", "skyrl.tinker.api", "--host=127.0.0.1", f"--port={port}"]
    command += [f"--base-model={model}", "--backend=jax", f"--backend-config={json.dumps(backend)}"]
    command += [f"--database-url=sqlite:///{database}", f"--checkpoints-base={folder / 'checkpoints'}"]
    environment = {
        **os.environ,
        "VIRTUAL_ENV": str(python.parent.parent),
        "PATH": os.pathsep.join([str(python.parent), str(Path(uv).parent), os.environ["PATH"]]),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        _await_engine(process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process)


def _await_engine(process: subprocess.Popen[bytes], log: Path) -> None:
    """The server answers long before its engine does: only its log says when that has started."""
    deadline = time.monotonic() + START_SECONDS
    while "Starting background engine..." not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise PeerFailed.ended(process.poll(), log)
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server with its engine: all of its session's processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue
