"""How the engine starts its trainer's process, and a node's ranks theirs (follow.py)."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from clora_engine.config import SLEEPING_THREADS
from clora_engine.trainer_place import Place, PortMeeting


@dataclass(frozen=True, slots=True)
class OtherNodes:
    """The ranks of other nodes, as they wait for the trainer: a connection to each, by rank. meeting_place: the socket
    that listens where all ranks will meet; address: this node's, by which the others reach it."""

    connections: Mapping[int, socket.socket]
    meeting_place: socket.socket
    address: str

    def close(self) -> None:
        """Gives them up, or leaves them to the process that has inherited them."""
        for one in (*self.connections.values(), self.meeting_place):
            one.close()


async def launch(
    device: str, threads: int, processes: int, others: OtherNodes | None = None
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """Rank 0's process and the stream to it. device, processes: as TrainerClient.start's. threads: of each process."""
    ours, theirs = socket.socketpair()
    inherited = [theirs]
    place, words = Place(threads=threads, processes=processes, node_processes=processes), list[str]()
    if others is not None:
        meeting = PortMeeting(others.address, others.meeting_place.getsockname()[1], others.address)
        place = Place(
            threads=threads,
            processes=processes + len(others.connections),
            node_processes=processes,
            meeting=meeting,
        )
        words = ["--store-fd", str(others.meeting_place.fileno())]
        words += [word for rank, one in others.connections.items() for word in ("--follower", f"{rank}={one.fileno()}")]
        inherited += [*others.connections.values(), others.meeting_place]
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "clora_engine.trainer_process", "--fd", str(theirs.fileno())),
            *place.arguments(),
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=[one.fileno() for one in inherited],
            env=environment(device, threads, processes),
        )
    if others is not None:
        others.close()
    return process, *await asyncio.open_connection(sock=ours)


def environment(device: str, threads: int, processes: int) -> dict[str, str]:
    """The parent's environment with the devices and the threads that torch reads at import."""
    environment = dict(os.environ)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if device.startswith("cuda"):
        first = int(device.partition(":")[2] or 0)
        every = visible.split(",") if visible else [str(index) for index in range(first + processes)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(every[first : first + processes])
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic cuBLAS
    else:
        environment |= {"CUDA_VISIBLE_DEVICES": ""} | SLEEPING_THREADS
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["HF_HUB_OFFLINE"] = "1"
    return environment
