"""A version's files are read between two decode steps, and written into its slot between two others.

vLLM does both in one call, for which every request in the batch waits: on a CPU, for a rank of 16 on SmolLM2-135M, a
third of a decode step. In two calls the batch goes on in between, and waits for the longer of them at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.lora.request import LoRARequest

Load = Callable[[LoRARequest], Any]


class ReadAhead:
    """Methods that vLLM adds to its worker (`worker_extension_cls`), to be called by `collective_rpc`."""

    model_runner: Any
    remove_lora: Callable[[int], bool]

    def read_lora(self, name: str, lora_id: int, directory: str) -> None:
        """Read an adapter, for the `add_lora` that follows. Raises as that would."""
        _reader(self.model_runner.lora_manager).read(LoRARequest(name, lora_id, directory))

    def drop_lora(self, lora_id: int) -> bool:
        """Take an adapter out, also one that was only read. False for one that is not loaded."""
        _reader(self.model_runner.lora_manager).forget(lora_id)
        return self.remove_lora(lora_id)


class _Reader:
    """In the place of a LoRA manager's `_load_adapter`: gives what was read before, once, or else reads it."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._read: dict[int, Any] = {}

    def read(self, request: LoRARequest) -> None:
        self._read[request.lora_int_id] = self._load(request)

    def forget(self, lora_id: int) -> None:
        self._read.pop(lora_id, None)

    def __call__(self, request: LoRARequest) -> Any:
        read = self._read.pop(request.lora_int_id, None)
        return self._load(request) if read is None else read


def _reader(manager: Any) -> _Reader:
    if not isinstance(manager._load_adapter, _Reader):
        manager._load_adapter = _Reader(manager._load_adapter)
    reader: _Reader = manager._load_adapter
    return reader
