"""Versions that are read before they are added, on vLLM's own class for a worker's adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from clora_engine.vllm_plugin.read_ahead import ReadAhead


class Files(LRUCacheWorkerLoRAManager):  # type: ignore[misc]
    """Says which files it has read, instead of reading them."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def _load_adapter(self, lora_request: LoRARequest) -> Any:
        if lora_request.lora_path.endswith("broken"):
            raise ValueError("truncated")
        self.read.append(lora_request.lora_path)
        return lora_request.lora_path


class Worker(ReadAhead):
    def __init__(self) -> None:
        self.files = Files()
        self.model_runner = SimpleNamespace(lora_manager=self.files)
        self.removed: list[int] = []

    def remove_lora(self, lora_id: int) -> bool:
        self.removed.append(lora_id)
        return True

    def load(self, lora_id: int, path: str) -> Any:
        """As vLLM's `add_lora` does, through whatever stands in the place of the method."""
        return self.files._load_adapter(LoRARequest("a", lora_id, path))


def test_what_was_read_is_not_read_again() -> None:
    worker = Worker()
    worker.read_lora("a", 1, "/one")
    worker.read_lora("b", 2, "/two")
    assert worker.files.read == ["/one", "/two"]
    assert (worker.load(2, "/two"), worker.load(1, "/one")) == ("/two", "/one")
    assert worker.files.read == ["/one", "/two"]


def test_it_is_given_once() -> None:
    """A later load of the same adapter reads what its files hold by then."""
    worker = Worker()
    worker.read_lora("a", 1, "/one")
    worker.load(1, "/one")
    assert worker.load(1, "/new") == "/new"


def test_what_was_not_read_is_read_when_it_is_added() -> None:
    worker = Worker()
    assert worker.load(3, "/three") == "/three"


def test_what_is_dropped_is_not_kept() -> None:
    worker = Worker()
    worker.read_lora("a", 1, "/one")
    assert worker.drop_lora(1)
    assert worker.removed == [1]
    assert worker.load(1, "/other") == "/other"


def test_files_that_cannot_be_read_are_told_at_once() -> None:
    worker = Worker()
    with pytest.raises(ValueError, match="truncated"):
        worker.read_lora("a", 1, "/broken")
    assert worker.load(1, "/mended") == "/mended"
