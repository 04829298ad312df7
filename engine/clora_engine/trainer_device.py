"""Which errors of a device the trainer's process survives.

An error of CUDA is sticky when it leaves the process's context in an undefined state: whatever is asked of the device
afterwards fails with it, for every tenant, until the process is ended (CUDA Runtime API, cudaError: "the process must
be terminated and relaunched"). torch raises them as AcceleratorError; libraries above CUDA as a RuntimeError, which
their text alone tells from others. Errors may come late: whoever meets one need not have caused it.

What is known to leave the context as it was is listed; every other error of the device ends the process. Left out:
memory that ran out, which has an answer of its own (trainer_memory.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clora_engine.trainer_memory import is_out_of_memory

_OF_THE_DEVICE = (
    *("CUDA error", "CUDA driver error", "HIP error", "Triton Error", "NCCL error"),
    *("cuDNN error", "CUDNN_STATUS", "CUBLAS_STATUS", "CUSPARSE_STATUS", "cusolver error"),
    *("device-side assert", "illegal memory access", "unspecified launch failure", "uncorrectable ECC error"),
)
# Refused before anything ran: arguments, a launch that asks for too much, memory outside torch's own allocator.
_SURVIVED = (
    *("out of memory", "STATUS_ALLOC_FAILED", "STATUS_NOT_SUPPORTED", "STATUS_INVALID_VALUE"),
    *("invalid argument", "invalid configuration argument", "too many resources requested for launch"),
)


def is_device_failure(error: BaseException) -> bool:
    """Whether the device may be past use for this process: by the error, or by one that it came from."""
    return any(_is_sticky(one) for one in _chain(error))


def first_line(error: BaseException) -> str:
    """The error for a log or a message: torch appends paragraphs of advice."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]


def _is_sticky(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    text = str(error).partition("\n")[0]
    of_device = isinstance(error, torch.AcceleratorError) or any(mark in text for mark in _OF_THE_DEVICE)
    return of_device and not any(mark in text for mark in _SURVIVED)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, the latest first."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
