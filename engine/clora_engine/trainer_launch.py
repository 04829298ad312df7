"""How the engine starts its trainer's process."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from clora_engine.config import SLEEPING_THREADS


async def launch(
    device: str, threads: int, processes: int
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """Rank 0's process and the stream to it. device, processes: as TrainerClient.start's. threads: of each process."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "clora_engine.trainer_process", "--fd", str(theirs.fileno())),
            *("--threads", str(threads), "--processes", str(processes)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=(theirs.fileno(),),
            env=_environment(device, threads, processes),
        )
    return process, *await asyncio.open_connection(sock=ours)


def _environment(device: str, threads: int, processes: int) -> dict[str, str]:
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
