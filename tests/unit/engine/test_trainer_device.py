"""Which errors of a device end the trainer; what ends its processes is tests/integration/test_trainer_device.py's."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from clora_engine import trainer as trainer_module
from clora_engine.errors import CheckpointError, EngineError, UserError
from clora_engine.trainer_device import first_line, is_device_failure
from clora_engine.trainer_pass import Request
from clora_engine.trainer_ranks import Ranks
from clora_engine.types import LoraConfig, Loss
from tests.numerics.tiny import batch, tiny_trainer, trained_tokens

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call, invalid argument or not."
ASSERT = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ASSERT + ADVICE),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        torch.AcceleratorError("CUDA error: misaligned address"),
        torch.AcceleratorError("of a kind that nobody has seen yet"),
        RuntimeError(ASSERT),  # as older code raises it
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA driver error: device not ready"),
    ],
)
def test_an_unknown_error_of_the_device_ends_the_trainer(error: Exception) -> None:
    assert is_device_failure(error)
    assert "\n" not in first_line(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        torch.AcceleratorError("CUDA error: out of memory" + ADVICE),
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        torch.AcceleratorError("CUDA error: too many resources requested for launch"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(...)`"),
        RuntimeError("shape '[3]' is invalid for input of size 4"),
        RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
        ValueError(ASSERT),
        EngineError(ASSERT),
        UserError("CUDA error", field="rows"),
        OSError(5, "Input/output error"),
    ],
)
def test_what_the_process_survives_is_its_tenants_alone(error: Exception) -> None:
    assert not is_device_failure(error)


def test_an_error_that_came_from_the_devices_is_the_devices() -> None:
    def wrapped(hide: bool) -> Exception:
        try:
            try:
                raise torch.AcceleratorError(ASSERT)
            except RuntimeError as error:
                raise CheckpointError("cannot be written") from (None if hide else error)
        except CheckpointError as outer:
            return outer

    assert is_device_failure(wrapped(hide=False))
    assert is_device_failure(wrapped(hide=True))


def test_it_is_raised_from_a_joined_pass_and_no_call_is_made_alone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(slots=2)
    requests = []
    for seed, name in enumerate("ab"):
        trainer.create(name, LoraConfig(rank=8, alpha=16))
        rows = batch(seed)
        requests.append(Request(name, rows, Loss(name="PPO", denominator=trained_tokens(rows))))
    passes = []

    def fails(*given: Any) -> NoReturn:
        passes.append(given)
        raise torch.AcceleratorError(ASSERT)

    monkeypatch.setattr(trainer_module, "accumulate", fails)
    for several in (requests, requests[:1]):
        passes.clear()
        with pytest.raises(RuntimeError, match="device-side assert"):
            trainer.forward_backward_joined(several)
        assert len(passes) == 1


def test_a_rank_whose_device_fails_asks_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be waiting for it in another collective; its end tells them."""
    ranks = Ranks(0, 2)
    asked: list[bool] = []

    def anybody(_: Ranks, failed: bool) -> bool:
        asked.append(failed)
        return False

    monkeypatch.setattr(Ranks, "_anybody", anybody)
    with pytest.raises(RuntimeError, match="device-side"), ranks.together():
        raise torch.AcceleratorError(ASSERT)
    assert asked == []
    with ranks.together():
        pass
    assert asked == [False]
