"""`clora-engine follow`: the ranks that another node of an engine adds to its trainer.

It finds the model, connects to the leader (trainer_nodes.py), as long as that takes, and starts a trainer's process for
each of its ranks, with its connection. When one of these ends, as all do with the leader's trainer, it ends the others
and connects again: the leader's next epoch meets the same node. It needs no vLLM, opens no port and has no storage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from clora_api.v1alpha1.engine import MAX_TRAINER_GPUS
from clora_engine import trainer_handshake as handshake
from clora_engine.config import TRAINER_PORT, check_trainer_port
from clora_engine.model_folder import model_folder
from clora_engine.server.auth import TokenFile
from clora_engine.trainer_handshake import Claim, HandshakeError, Repeated
from clora_engine.trainer_launch import environment
from clora_engine.trainer_place import Place, PortMeeting

log = logging.getLogger("clora.trainer")

CONNECT_SECONDS = 10.0
FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0  # seconds between two attempts
REFUSED_WAIT = 15.0  # after a refusal that somebody has to do something about
SAID_AGAIN_SECONDS = 60.0
LEAVE_SECONDS = 105  # somewhat longer than an engine takes to bring its steps to their commits, and to end


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowConfig:
    """Settings of one node; gpus: of each node, 0 for a trainer on CPUs."""

    leader: str
    trainer_port: int
    node: int
    nodes: int
    gpus: int
    model: str
    token_file: Path
    model_name: str = ""
    revision: str | None = None

    @property
    def ranks(self) -> range:
        """Of this node."""
        here = max(1, self.gpus)
        return range(self.node * here, (self.node + 1) * here)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `clora-engine follow`."""
    add = parser.add_argument
    add("--leader", required=True, help="host of the engine that this node belongs to")
    add("--trainer-port", type=int, default=TRAINER_PORT, help="its port for nodes; the next one is used too")
    add("--node", type=int, required=True, help="this node's number; the leader is 0")
    add("--trainer-nodes", type=int, required=True, dest="nodes", help="nodes of the trainer, the leader included")
    gpus = range(MAX_TRAINER_GPUS + 1)
    add("--trainer-gpus", type=int, default=0, choices=gpus, dest="gpus", help="GPUs of each node; 0: the CPU")
    add("--model", required=True, help="folder of the base model, or its name on the hub")
    add("--model-name", default="", help="name that it is served under (default: --model)")
    add("--revision", default=None, help="revision on the hub")
    add("--token-file", type=Path, required=True, help="file with the engine's token")


def from_arguments(args: argparse.Namespace) -> FollowConfig:
    """The parsed flags as a config. Raises ValueError for flags that contradict each other."""
    config = FollowConfig(**{k: v for k, v in vars(args).items() if k in FollowConfig.__dataclass_fields__})
    if not 1 <= config.node < config.nodes:
        raise ValueError(
            f"--node {config.node} is none of --trainer-nodes {config.nodes}: give 1 to {config.nodes - 1}, for the"
            " leader itself is node 0"
        )
    check_trainer_port(config.trainer_port)
    return config


def follow(config: FollowConfig) -> int:
    """Runs until SIGTERM or SIGINT, then ends with 0: see Node.leave. Raises UserError or ValueError when there is no
    model, or no token."""
    token = TokenFile(config.token_file)
    node = Node(config, token.secret)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, lambda number, _frame: node.leave(at_once=number != signal.SIGTERM))
    model = model_folder(config.model, config.revision)
    log.info("node %d of %d, with %s", config.node, config.nodes, config.model_name or config.model)
    asyncio.run(node.live(model))
    return 0


class Node:
    """This node's connections and processes. token: as it is now."""

    def __init__(self, config: FollowConfig, token: Callable[[], bytes]) -> None:
        self._config, self._token = config, token
        self._processes: list[asyncio.subprocess.Process] = []
        self._said = Repeated(SAID_AGAIN_SECONDS)
        self._leaving = False

    def leave(self, *, at_once: bool) -> None:
        """Ends the processes and this one, whatever it is waiting for; unless `at_once`, and this is the first time,
        only when the leader's trainer has ended: all pods of an engine are told to end at the same moment, and the
        leader needs this node to bring its steps to their commits."""
        if not at_once and not self._leaving and self._processes:
            self._leaving = True
            log.info("told to end: this node does so with the leader's trainer, in %d s at the latest", LEAVE_SECONDS)
            signal.alarm(LEAVE_SECONDS)
            return
        self._kill()
        os._exit(0)

    async def live(self, model: Path) -> None:
        """Meets the leader, and serves it until it, or a rank, has ended; again and again, until it is to leave."""
        wait = FIRST_WAIT
        while not self._leaving:
            try:
                connections, threads = await self._connect()
                wait = FIRST_WAIT
                self._said.forget()
                await self._serve(connections, threads, model)
            except HandshakeError as error:
                self._say(str(error))
                wait = min(2 * wait, LONGEST_WAIT) if error.later else REFUSED_WAIT
            except (OSError, TimeoutError) as error:
                why = str(error) or "it does not answer in time"
                self._say(f"cannot reach {self._config.leader} at port {self._config.trainer_port}: {why}")
                wait = min(2 * wait, LONGEST_WAIT)
            if not self._leaving:
                await asyncio.sleep(wait)

    def _say(self, why: str) -> None:
        if self._said.due(why):
            log.warning("%s; tried again", why)

    async def _connect(self) -> tuple[list[socket.socket], int]:
        """A connection for each rank, and the threads of its process."""
        config, threads = self._config, 1
        with contextlib.ExitStack() as stack:
            connections = []
            for rank in config.ranks:
                connection = stack.enter_context(await _open(config.leader, config.trainer_port))
                claim = Claim(version("clora"), config.node, config.nodes, config.gpus, rank, handshake.nonce())
                threads = (await handshake.ask(connection, self._token(), claim)).threads
                connections.append(connection)
            stack.pop_all()
        return connections, threads

    async def _serve(self, connections: list[socket.socket], threads: int, model: Path) -> None:
        """Until one of the processes has ended, and with it all."""
        log.info("the leader has taken this node; its trainer starts when all nodes are there")
        lifeline, ours = os.pipe()  # closed with this process, however it ends
        try:
            for rank, connection in zip(self._config.ranks, connections, strict=True):
                with connection:
                    self._processes.append(await self._start(rank, connection, threads, model, lifeline))
            waits = [asyncio.create_task(process.wait()) for process in self._processes]
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            codes = sorted({task.result() for task in done})
            then = "this node ends" if self._leaving else "the leader is met again"
            log.warning("a trainer's process of this node ended with status %s; %s", codes, then)
            self._kill()
            await asyncio.wait(waits)
        finally:
            self._kill()
            self._processes = []
            for one in (lifeline, ours):
                os.close(one)
            for connection in connections:
                connection.close()

    async def _start(
        self, rank: int, connection: socket.socket, threads: int, model: Path, lifeline: int
    ) -> asyncio.subprocess.Process:
        config, here = self._config, len(self._config.ranks)
        connection.setblocking(True)
        meeting = PortMeeting(connection.getpeername()[0], config.trainer_port + 1, connection.getsockname()[0])
        place = Place(
            threads=threads,
            rank=rank,
            processes=config.nodes * here,
            node_processes=here,
            meeting=meeting,
            model=str(model),
            spill_directory=tempfile.gettempdir(),
        )
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "clora_engine.trainer_process", "--fd", str(connection.fileno())),
            *("--lifeline-fd", str(lifeline), *place.arguments()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=(connection.fileno(), lifeline),
            env=environment("cuda:0" if config.gpus else "cpu", threads, here),
        )

    def _kill(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()


async def _open(host: str, port: int) -> socket.socket:
    """A connection to the first of the host's addresses that answers. Raises OSError."""
    loop = asyncio.get_running_loop()
    last: OSError = OSError(f"no address of {host} is known")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            handshake.prepare(connection)
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.sock_connect(connection, address)
        except (OSError, TimeoutError) as error:
            connection.close()
            late = isinstance(error, TimeoutError) and error.errno is None  # ours, and not the system's
            last = OSError("it does not answer in time" if late else os.strerror(error.errno or 0))
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise last
