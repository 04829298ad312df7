"""The ranks of a trainer: one process per device, each with the base model and all adapters, in step with one another.

Every rank is given the same commands in the same order (trainer_followers.py) and computes its share of a batch. What
must not differ between ranks passes through here: the sum of an adapter's gradient, which is all-reduced once per
optimizer step, and whether work succeeded. Work that can fail (a full disk, memory that ran out) is done within
`together`, before anything is changed for good: it succeeds on all ranks or raises on all of them. So clipping, AdamW
and every decision of the AdapterStore are the same on all ranks, bit for bit.

A collective that fails means that a rank is gone. There is no going on from that: the process ends. Nor is there from
a device that has failed (trainer_device.py): that rank ends, tells rank 0 alone, and with it all do.

Ranks may be of several nodes (trainer_nodes.py), and share no folder then: what rank 0 reads it gives to the others,
and they see that their base model is the same. Nodes are to be of one kind: other CPUs or GPUs round otherwise, and
ranks would drift apart by that; what is saved is rank 0's. Left out: encryption between nodes, which NCCL and gloo have
not either and is the network's; and sharing out the adapters' state (it is small beside the base model).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout as set_pg_timeout

from clora_engine.errors import EngineError, UserError
from clora_engine.trainer_device import is_device_failure
from clora_engine.trainer_memory import is_out_of_memory
from clora_engine.trainer_packing import Deal
from clora_engine.trainer_place import FileMeeting, Meeting
from clora_engine.trainer_protocol import EXIT_RANK_LOST, Failure, error_of, failure_of

log = logging.getLogger("clora.trainer")

T = TypeVar("T")
# Ranks wait for each other as long as the slowest takes for a share, or rank 0 to write a commit to a slow volume.
TIMEOUT = timedelta(minutes=30)
# At the start, for the slowest to have loaded torch: what keeps a rank from coming at all must not cost TIMEOUT.
MEETING_TIMEOUT = timedelta(minutes=5)
# Of which all have come when they connect to each other; gloo tries a connection that is dropped so many times.
CONNECT_TRIES = 5


def network(interface: str, chosen: Mapping[str, str]) -> dict[str, str]:
    """The environment by which Gloo and NCCL use an interface; what of it somebody has chosen already (an engine's
    podTemplate may name a faster network between its nodes) stays."""
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: chosen.get(name, value) for name, value in names.items()}


class FailedElsewhere(Exception):
    """Raised in the middle of work that has failed on another rank; `together` makes it that rank's error."""


class _Trouble(msgspec.Struct, frozen=True):
    failure: Failure
    out_of_memory: bool


class Ranks:
    """This process's place among the ranks. Not thread-safe. `Ranks()` is a trainer of one process, where nothing is
    exchanged and every method does what it says at no cost.

    in_step: the base model is sharded, so that ranks must run as many passes as each other (trainer_shard.py). on_lost:
    ends the process in its own way once a collective has failed; it need not return.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        in_step: bool = False,
        meeting: Meeting | None = None,
        on_lost: Callable[[], object] | None = None,
    ) -> None:
        self.rank, self.size, self.in_step = rank, size, in_step
        self._meeting, self._on_lost = meeting, on_lost

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        meeting: Meeting | None,
        device: torch.device | UserError,
        *,
        in_step: bool = False,
        on_lost: Callable[[], object] | None = None,
    ) -> Ranks:
        """Meets the others; returns when all have come, on their devices. device: this rank's, or why it has none,
        which all ranks raise then; gradients go by NCCL between GPUs, everything else by gloo. A rank that cannot join,
        or waits for another longer than MEETING_TIMEOUT, ends its process, and with that all ranks: none waits for one
        that will not come."""
        if size == 1:
            if isinstance(device, UserError):
                raise device
            if device.type == "cuda":
                torch.cuda.set_device(device)
            return cls()
        ranks = cls(rank, size, in_step=in_step, meeting=meeting or FileMeeting.anywhere(), on_lost=on_lost)
        ranks._collective(lambda: ranks._meet(device))
        ranks.check()
        return ranks

    def _meet(self, device: torch.device | UserError) -> None:
        assert self._meeting is not None
        # Kept: a rank that fails to come must still find there why.
        store = self._store = self._meeting.store(self.rank, self.size, MEETING_TIMEOUT)
        found: torch.device | EngineError = device
        interface = ""
        try:
            interface = self._meeting.interface()
        except EngineError as error:
            found = error
        trouble = failure_of(found) if isinstance(found, EngineError) else None
        store.set(f"here-{self.rank}", msgspec.json.encode(trouble).decode())
        here = [f"here-{rank}" for rank in range(self.size)]
        store.wait(here, MEETING_TIMEOUT)
        for key in here:
            if (failure := msgspec.json.decode(store.get(key), type=Failure | None)) is not None:
                raise error_of(failure)
        assert isinstance(found, torch.device)
        os.environ |= network(interface, os.environ if self.apart else {})
        if found.type == "cuda":
            torch.cuda.set_device(found)
        log.info("rank %d meets the other %d over %s", self.rank, self.size - 1, interface)
        try:
            dist.init_process_group(
                "gloo" if found.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=MEETING_TIMEOUT / CONNECT_TRIES,
                device_id=found if found.type == "cuda" else None,
            )
        except RuntimeError as error:
            hint = "; the trainer's nodes must reach each other on all ports" if self.apart else ""
            raise RuntimeError(f"{error}{hint}") from error
        set_pg_timeout(TIMEOUT)

    @property
    def apart(self) -> bool:
        """Whether ranks are of several nodes, each with files of its own."""
        return self._meeting is not None and self._meeting.apart

    @property
    def deal(self) -> Deal:
        """Which share of a batch is this rank's."""
        return Deal(self.rank, self.size, self.in_step)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work of every rank that succeeds on all of them or raises on all of them: the error of the first rank on
        which it failed, for an EngineError with its reason and field. It must leave nothing behind when it raises, and
        use no collective but `check` and those that follow one."""
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if is_device_failure(raised):
                raise
            error = raised
        try:
            if isinstance(error, FailedElsewhere) or self._anybody(error is not None):
                raise self._first_error(error)
        finally:
            del error  # or it would keep this frame, and with it the failed pass's tensors, until they are collected

    def check(self) -> None:
        """A point that all ranks pass within `together`, before a collective of which none can be left out. Raises
        FailedElsewhere when a rank will not come to it."""
        if self.size > 1 and self._anybody(False):
            raise FailedElsewhere

    def sum_(self, tensor: Tensor) -> None:
        """Adds the ranks' tensors up, in place; bit for bit the same on all of them. Device or CPU."""
        if self.size > 1:
            self._collective(lambda: dist.all_reduce(tensor))

    def copy_(self, tensor: Tensor) -> None:
        """Rank 0's tensor, in place of every rank's. CPU."""
        if self.size > 1:
            self._collective(lambda: dist.broadcast(tensor, 0))

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """Every rank's value, in the order of ranks. `kind`: what msgspec decodes it as."""
        if self.size == 1:
            return [value]
        body = bytearray(msgspec.msgpack.encode(value))
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(lengths, torch.tensor([len(body)])))
        longest = max(int(length) for length in lengths)
        bodies = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        own = torch.frombuffer(body.ljust(longest, b"\0"), dtype=torch.uint8)
        self._collective(lambda: dist.all_gather(bodies, own))
        return [
            msgspec.msgpack.decode(each[: int(length)].numpy().tobytes(), type=kind)
            for each, length in zip(bodies, lengths, strict=True)
        ]

    def clock(self) -> float:
        """Rank 0's time (seconds), so that all ranks decide alike by what they measure."""
        return self.gather(time.perf_counter(), float)[0]

    def _anybody(self, failed: bool) -> bool:
        flag = torch.tensor([int(failed)])
        self._collective(lambda: dist.all_reduce(flag, op=dist.ReduceOp.MAX))
        return bool(flag.item())

    def _first_error(self, own: Exception | None) -> Exception:
        failed = own is not None and not isinstance(own, FailedElsewhere)
        trouble = _Trouble(failure_of(own), is_out_of_memory(own)) if own is not None and failed else None
        troubles = self.gather(trouble, _Trouble | None)  # type: ignore[arg-type]  # a union is no type to mypy
        first, found = next((rank, each) for rank, each in enumerate(troubles) if each is not None)
        if own is not None and first == self.rank:
            return own
        log.info("rank %d failed: %s", first, found.failure.message)
        return torch.OutOfMemoryError(found.failure.message) if found.out_of_memory else error_of(found.failure)

    def _collective(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except RuntimeError as error:  # of which torch's DistError is one
            self._lost(error)

    def _lost(self, error: Exception) -> NoReturn:
        log.critical("rank %d has lost the others and ends: %s", self.rank, error)
        if self._on_lost is not None:
            self._on_lost()
        if self._meeting is not None:
            self._meeting.forget()
        logging.shutdown()
        os._exit(EXIT_RANK_LOST)
