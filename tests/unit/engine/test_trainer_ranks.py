"""How the ranks of a trainer come together; what they then compute is tests/numerics/test_parallel.py's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from clora_engine import store, trainer_ranks
from clora_engine.errors import EngineError
from clora_engine.trainer_cost import choose
from clora_engine.trainer_ranks import Ranks
from tests.numerics.tiny import tiny_trainer


class LostError(Exception):
    """In place of the end of the process."""


def test_a_rank_whose_others_do_not_come_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: Ranks, error: Exception) -> NoReturn:
        raise LostError from error

    monkeypatch.setattr(Ranks, "_lost", lost)
    monkeypatch.setattr(trainer_ranks, "MEETING_TIMEOUT", timedelta(milliseconds=10))
    with pytest.raises(LostError):
        Ranks.join(0, 2, tmp_path / "rendezvous", torch.device("cpu"))
    assert not torch.distributed.is_initialized()


def test_slots_are_allocated_where_all_ranks_fail_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    together = 0
    allocated = []

    class OneOfMany(Ranks):
        @contextmanager
        def together(self) -> Iterator[None]:
            nonlocal together
            together += 1
            try:
                yield
            finally:
                together -= 1

    allocate = store.Slot.allocate

    def allocating(*arguments: Any) -> store.Slot:
        allocated.append(together)
        return allocate(*arguments)

    monkeypatch.setattr(store.Slot, "allocate", allocating)

    def create(*_: object) -> NoReturn:
        raise EngineError("nothing is to be measured here")

    trainer = tiny_trainer(budget=2048)
    trainer.ranks = OneOfMany()
    monkeypatch.setattr(trainer, "create", create)
    allocated.clear()
    with pytest.raises(EngineError, match="measured"):
        choose(trainer, 4)
    assert allocated == [1, 1, 1]
