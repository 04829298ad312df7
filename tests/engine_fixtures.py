"""A real `clora-engine serve` with a tiny random model: what the engine's integration tests drive over HTTP.

tiny_model   a Qwen3 checkpoint with 4 layers, hidden size 256, random weights and a byte-level ChatML tokenizer
engine       one engine for a whole module, with room for 3 experiments
EngineProcess    to start, kill and restart engines on one storage
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from clora_api.control import DesiredExperiment, EngineInfo, ExperimentList, ExperimentReport, Phase
from local.control_plane import free_port
from tests.unit.engine.chat_fixtures import CHATML, tiny_tokenizer

TOKEN = "token-of-the-tests"
FINAL = (Phase.SUCCEEDED, Phase.FAILED, Phase.SUSPENDED)
START_SECONDS = 400.0


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny"
    words = tiny_tokenizer(CHATML)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=words.convert_tokens_to_ids("<|im_end|>"),
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


class EngineProcess:
    """One engine's storage and, while it runs, its process."""

    def __init__(self, folder: Path, model: Path, **flags: Any) -> None:
        self.folder, self.storage = folder, folder / "storage"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "token").write_text(TOKEN)
        self.port = free_port()
        self._flags = {
            "model": model,
            "model-name": "tiny",
            "storage": self.storage,
            "token-file": folder / "token",
            "host": "127.0.0.1",
            "port": self.port,
            "max-experiments": 3,
            "max-rank": 16,
            "max-model-len": 512,
            "max-num-seqs": 32,
            "kv-cache-memory": "256Mi",
            "tokens-per-microbatch": 2048,
            "sampler-threads": 1,
            "trainer-threads": 1,
        } | {name.replace("_", "-"): value for name, value in flags.items()}
        self.process: subprocess.Popen[bytes] | None = None
        self._still: list[int] = []
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=90
        )

    # ---------------------------------------------------------------- life

    def start(self) -> EngineInfo:
        """Starts it and waits until it is ready."""
        with (self.folder / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "clora_engine",
                    "serve",
                    *(f"--{k}" if v is True else f"--{k}={v}" for k, v in self._flags.items()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the engine ended with {self.process.returncode}:\n{self.tail()}")
            try:
                if self.http.get("/readyz").status_code == 200:
                    return self.info()
            except httpx.TransportError:
                pass
            time.sleep(0.1)  # it listens only later: there is nothing yet to wait on
        raise AssertionError(f"the engine was not ready within {START_SECONDS} s:\n{self.tail()}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """All its processes stand still, until `thaw`."""
        assert self.process is not None
        self._still = [self.process.pid, *_descendants(self.process.pid)]
        for pid in self._still:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            self.thaw()

    def thaw(self) -> None:
        for pid in self._still:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)

    def terminate(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(120)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)
        self.http.close()

    def tail(self) -> str:
        return "\n".join((self.folder / "engine.log").read_text(errors="replace").splitlines()[-25:])

    def child(self, name: str) -> int:
        """The pid of the engine's one descendant whose command line holds `name`."""
        assert self.process is not None
        found = [pid for pid in _descendants(self.process.pid) if name in _command(pid)]
        assert len(found) == 1, {pid: _command(pid) for pid in _descendants(self.process.pid)}
        return found[0]

    # ---------------------------------------------------------------- API

    def info(self) -> EngineInfo:
        return EngineInfo.model_validate(self.http.get("/v1/engine").raise_for_status().json())

    def put(self, uid: str, spec: dict[str, Any], **desired: Any) -> httpx.Response:
        body = DesiredExperiment.model_validate({"uid": uid, "namespace": "team", "name": uid, "spec": spec} | desired)
        return self.http.put(f"/v1/experiments/{uid}", json=body.to_api())

    def report(self, uid: str) -> ExperimentReport:
        return ExperimentReport.model_validate(self.http.get(f"/v1/experiments/{uid}").raise_for_status().json())

    def lists(self, seconds: float) -> Iterator[ExperimentList]:
        """All experiments, now and after each change, by long polls."""
        deadline = time.monotonic() + seconds
        query: dict[str, int] = {}
        while time.monotonic() < deadline:
            answer = self.http.get("/v1/experiments", params=query).raise_for_status().json()
            page = ExperimentList.model_validate(answer)
            yield page
            query = {"since": page.revision, "timeoutSeconds": 5}

    def wait(self, uid: str, wanted: Callable[[ExperimentReport], bool], seconds: float = 240.0) -> ExperimentReport:
        """The first report that is as wanted."""
        for page in self.lists(seconds):
            for report in page.items:
                if report.uid == uid and wanted(report):
                    return report
        raise AssertionError(f"{uid} did not get there within {seconds} s:\n{self.report(uid)}\n{self.tail()}")

    def finish(self, uid: str) -> ExperimentReport:
        report = self.wait(uid, lambda r: r.phase in FINAL)
        assert report.phase is Phase.SUCCEEDED, report
        return report

    def delete(self, uid: str, **query: str) -> None:
        """Deletes it and waits until it is gone."""
        self.http.delete(f"/v1/experiments/{uid}", params=query).raise_for_status()
        for page in self.lists(120.0):
            if uid not in [report.uid for report in page.items]:
                return
        raise AssertionError(f"{uid} is still there:\n{self.report(uid)}\n{self.tail()}")

    def metrics(self, uid: str) -> list[dict[str, Any]]:
        text = self.http.get(f"/v1/experiments/{uid}/metrics").raise_for_status().text
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path_factory.mktemp("engine"), tiny_model)
    try:
        process.start()
        yield process
    finally:
        process.close()


@pytest.fixture
def own_engine(tmp_path: Path, tiny_model: Path) -> Iterator[EngineProcess]:
    """An engine of one test's own, to be killed; not started."""
    process = EngineProcess(tmp_path / "engine", tiny_model)
    yield process
    process.close()


def sft_spec(**changes: Any) -> dict[str, Any]:
    """Supervised steps, which change the adapter whatever a random model says."""
    return {
        "engineRef": {"name": "tiny"},
        "lora": {"rank": 8, "alpha": 16, "seed": 3},
        "algorithm": {
            "estimator": "SFT",
            "loss": "CrossEntropy",
            "promptsPerStep": 4,
            "learningRate": "5e-3",
        },
        "environment": {"name": "WordProblems", "arguments": {"families": "kitchen"}},
        "data": {"builtin": "Generated"},
        "sampling": {"maxTokens": 8},
        "maxSteps": 3,
    } | changes


def rl_spec(**changes: Any) -> dict[str, Any]:
    return {
        "engineRef": {"name": "tiny"},
        "lora": {"rank": 8, "alpha": 16, "seed": 4},
        "algorithm": {"promptsPerStep": 2, "groupSize": 2, "learningRate": "1e-3"},
        "environment": {"name": "WordProblems", "arguments": {"families": "garden"}},
        "data": {"builtin": "Generated", "shuffleSeed": 5},
        "sampling": {"maxTokens": 8},
        "maxSteps": 3,
    } | changes


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
