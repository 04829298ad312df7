"""torch's threads for a while: their number is part of what bit-for-bit promises are about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many, and afterwards as many as before. For tiny tensors one: two threads that spin beside a busy vLLM are a
    hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
