"""Trackio's own server on this machine's loopback, in a process of its own, and Trackio's own reader of a store."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

REQUESTS = "requests.jsonl"
ALL_STEPS = "SELECT step, metrics FROM metrics ORDER BY id"


@dataclass(frozen=True)
class Server:
    port: int
    store: Path

    def requests(self) -> list[tuple[str, tuple[str, ...]]]:
        """(path, names of the headers that held the key) of every request."""
        lines = (self.store / REQUESTS).read_text().splitlines()
        return [(noted["path"], tuple(noted["keys"])) for noted in map(json.loads, lines)]


@asynccontextmanager
async def serving(store: Path, key: str, *, port: int = 0, space: bool = False) -> AsyncIterator[Server]:
    """space: as on Hugging Face's machines, where the key is the Space's token and the hub is not asked about it."""
    environment = {"TRACKIO_DIR": str(store), "HOME": str(store), "PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    environment |= {"SYSTEM": "spaces"} if space else {}
    with socket.create_server(("127.0.0.1", port)) as listening:  # who connects early waits in its queue
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, str(listening.fileno())),
            env=environment,
            pass_fds=[listening.fileno()],
            stdin=asyncio.subprocess.PIPE,  # for the key, which tests look for in what others see of processes
        )
        assert process.stdin is not None
        process.stdin.write(key.encode() + b"\n")
        bound = listening.getsockname()[1]
    try:
        yield Server(bound, store)
    finally:
        process.kill()
        await process.wait()


async def read(store: Path, sql: str = ALL_STEPS) -> list[dict[str, Any]]:
    """Rows that Trackio's own command line finds in a copy of a store, such as a person makes."""
    with TemporaryDirectory() as copy:
        shutil.copytree(store, copy, dirs_exist_ok=True)
        query = ("query", "project", "--project", "p", "--sql", sql, "--json")
        process = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("trackio")), *query),
            env={"TRACKIO_DIR": copy, "HOME": copy, "HF_HUB_OFFLINE": "1"},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
    assert process.returncode == 0
    rows: list[dict[str, Any]] = json.loads(out)["rows"]
    return rows


async def steps(store: Path) -> list[tuple[int, dict[str, float]]]:
    """Every step of every run, in the order in which they came."""
    return [(row["step"], json.loads(row["metrics"])) for row in await read(store)]


def _serve(fd: int, key: str) -> None:
    os.environ["HF_TOKEN" if "SYSTEM" in os.environ else "TRACKIO_WRITE_TOKEN"] = key
    import uvicorn
    from trackio.server import build_starlette_app_only

    app, _ = build_starlette_app_only()
    store = Path(os.environ["TRACKIO_DIR"])
    store.mkdir(exist_ok=True)
    notes = (store / REQUESTS).open("a")

    async def noted(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            keys = [name.decode() for name, value in scope["headers"] if key.encode() in value]
            print(json.dumps({"path": scope["path"], "keys": keys}), file=notes, flush=True)
        await app(scope, receive, send)

    uvicorn.run(noted, fd=fd, log_level="warning")


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.stdin.readline().strip())
