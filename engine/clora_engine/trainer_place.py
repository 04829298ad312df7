"""A trainer process's place among the ranks, as its command line says it, and where the ranks come together.

On one machine that is a file, and ranks speak over the loopback interface, so that no port is opened for them. Ranks of
several nodes (trainer_nodes.py) meet at a port of rank 0's, and speak over the interface by which they reach it.
"""

from __future__ import annotations

import argparse
import ipaddress
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from clora_engine.errors import EngineError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True)
class FileMeeting:
    """At a file that does not exist yet, in a folder of the trainer's own, the same for all ranks."""

    path: Path
    apart = False

    @classmethod
    def anywhere(cls) -> FileMeeting:
        return cls(Path(tempfile.mkdtemp(prefix="clora-ranks-"), "rendezvous"))

    def interface(self) -> str:
        return "lo"

    def store(self, rank: int, size: int, timeout: timedelta) -> Store:
        import torch.distributed as dist

        return dist.FileStore(str(self.path), size)  # type: ignore[attr-defined]

    def forget(self) -> None:
        """Removes it; whichever of the ranks ends first does."""
        shutil.rmtree(self.path.parent, ignore_errors=True)

    def arguments(self) -> list[str]:
        return ["--rendezvous", str(self.path)]


@dataclass(frozen=True, slots=True)
class PortMeeting:
    """At a port of rank 0's. address: this node's, by which the others reach it. listener: rank 0's socket that listens
    there, a file descriptor."""

    host: str
    port: int
    address: str
    listener: int | None = None
    apart = True

    def interface(self) -> str:
        """Raises EngineError when no interface has the address."""
        return interface_of(self.address)

    def store(self, rank: int, size: int, timeout: timedelta) -> Store:
        import torch.distributed as dist

        return dist.TCPStore(  # type: ignore[attr-defined]
            self.host,
            self.port,
            size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=self.listener,
        )

    def forget(self) -> None:
        """Nothing remains of it."""

    def arguments(self) -> list[str]:
        return ["--meet", self.host, str(self.port), "--address", self.address]


Meeting = FileMeeting | PortMeeting


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """threads: CPU threads of torch. rank: of `processes`, of which `node_processes` are on each node. model,
    spill_directory: this node's own, None where the leader's are."""

    threads: int = 1
    rank: int = 0
    processes: int = 1
    node_processes: int = 1
    meeting: Meeting | None = None
    model: str | None = None
    spill_directory: str | None = None

    @property
    def node(self) -> int:
        return self.rank // self.node_processes

    @property
    def local_rank(self) -> int:
        """The rank among those of this node, and its device's number."""
        return self.rank % self.node_processes

    def forget(self) -> None:
        if self.meeting is not None:
            self.meeting.forget()

    def arguments(self) -> list[str]:
        """As `add_arguments` takes them."""
        flags: dict[str, object] = {
            "threads": self.threads,
            "rank": self.rank,
            "processes": self.processes,
            "node-processes": self.node_processes,
            "model": self.model,
            "spill-directory": self.spill_directory,
        }
        given = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
        return [*given, *([] if self.meeting is None else self.meeting.arguments())]

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--threads", type=int, required=True, help="CPU threads of torch in each process")
        add("--processes", type=int, default=1, help="ranks, each with a device of its own")
        add("--node-processes", type=int, default=None, help="how many of them each node has (default: all)")
        add("--rank", type=int, default=0, help="which of them this is; rank 0 starts the others of its node")
        add("--rendezvous", type=Path, default=None, help="file at which the ranks of one machine meet")
        add("--meet", nargs=2, metavar=("HOST", "PORT"), default=None, help="port at which ranks of several nodes meet")
        add("--address", default="", help="by which other nodes reach this one")
        add("--store-fd", type=int, default=None, help="inherited socket that listens there")
        add("--model", default=None, help="this node's folder of the base model")
        add("--spill-directory", default=None, help="this node's folder for idle adapters")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Place:
        meeting: Meeting | None = None
        if options.meet is not None:
            host, port = options.meet
            meeting = PortMeeting(host, int(port), options.address, options.store_fd)
        elif options.rendezvous is not None:
            meeting = FileMeeting(options.rendezvous)
        return cls(
            threads=options.threads,
            rank=options.rank,
            processes=options.processes,
            node_processes=options.node_processes or options.processes,
            meeting=meeting,
            model=options.model,
            spill_directory=options.spill_directory,
        )


def interface_of(address: str) -> str:
    """The network interface that has this IP address. Raises EngineError when none has it."""
    import psutil

    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address) and wanted.ipv4_mapped is not None:
        wanted = wanted.ipv4_mapped  # as a socket that listens on :: shows who came over IPv4
    if wanted.is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if wanted in _parsed([one.address for one in addresses]):
            return name
    raise EngineError(f"no network interface of this node has the address {address}", reason="TrainerError")


def _parsed(texts: Sequence[str]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_address(text.partition("%")[0]))
        except ValueError:
            continue  # a hardware address
    return found
