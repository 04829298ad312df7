"""How the ranks of a trainer come together; what they then compute is tests/numerics/test_parallel.py's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from clora_engine import store, trainer_ranks
from clora_engine.errors import EngineError, UserError
from clora_engine.trainer_cost import choose
from clora_engine.trainer_place import FileMeeting
from clora_engine.trainer_ranks import Ranks
from tests.numerics.tiny import tiny_trainer


class LostError(Exception):
    """In place of the end of the process."""


def lost(_: Ranks, error: Exception) -> NoReturn:
    raise LostError from error


def test_a_rank_whose_others_do_not_come_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "_lost", lost)
    monkeypatch.setattr(trainer_ranks, "MEETING_TIMEOUT", timedelta(milliseconds=10))
    with pytest.raises(LostError):
        Ranks.join(0, 2, FileMeeting(tmp_path / "rendezvous"), torch.device("cpu"))
    assert not torch.distributed.is_initialized()


def test_a_rank_that_cannot_be_reached_is_waited_for_no_longer_than_one_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the store, as when a network lets ranks meet and drops what they send to each other."""
    meeting = FileMeeting(tmp_path / "rendezvous")
    meeting.store(1, 2, timedelta(seconds=10)).set("here-1", "null")
    monkeypatch.setattr(Ranks, "_lost", lost)
    monkeypatch.setattr(trainer_ranks, "MEETING_TIMEOUT", timedelta(milliseconds=500))
    with pytest.raises(LostError):
        Ranks.join(0, 2, meeting, torch.device("cpu"))
    assert not torch.distributed.is_initialized()


def test_a_rank_without_a_device_is_told_to_all(tmp_path: Path) -> None:
    """None waits for it, and all raise what it would."""
    meeting, cpu = FileMeeting(tmp_path / "rendezvous"), torch.device("cpu")
    missing = UserError("the trainer needs 2 GPUs on node 1, and torch finds 1", field="trainer.gpus")
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(Ranks.join, rank, 2, meeting, (cpu, missing)[rank]) for rank in range(2)]:
            with pytest.raises(UserError, match="needs 2 GPUs on node 1") as caught:
                future.result(60)
            assert caught.value.field == "trainer.gpus"
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


def test_a_network_that_somebody_has_chosen_stays() -> None:
    assert trainer_ranks.network("eth0", {}) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    chosen = {"NCCL_SOCKET_IFNAME": "ib0", "PATH": "/bin"}
    assert trainer_ranks.network("eth0", chosen) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
