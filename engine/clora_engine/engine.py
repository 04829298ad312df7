"""One life of an engine: epoch, model, trainer, sampler, supervisor, HTTP; and its end.

The epoch ends when the process ends. The trainer's death ends it too (exit code 3): every adapter's state was in that
process, and the next epoch resumes each experiment from its last commit. vLLM's core may die and come back within an
epoch; the sampler sees to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from clora_engine import last_words, tracking
from clora_engine.chat import load_tokenizer
from clora_engine.config import EngineConfig
from clora_engine.errors import EngineError, UserError
from clora_engine.journal import next_epoch
from clora_engine.model_folder import base_model, model_folder
from clora_engine.sampler import Sampler, SamplerConfig
from clora_engine.sampler_config import share_of_host
from clora_engine.server.app import create_app
from clora_engine.server.auth import TokenFile
from clora_engine.server.connections import BACKLOG, MOST_CONNECTIONS, Crowd
from clora_engine.server.metrics import EngineCollector
from clora_engine.server.tenants import create_tenant_app
from clora_engine.supervisor import Supervisor
from clora_engine.trainer_client import TrainerClient
from clora_engine.trainer_memory import host_memory
from clora_engine.trainer_nodes import TrainerNodes
from clora_engine.training import Services

log = logging.getLogger(__name__)

EXIT_TRAINER_DIED = 3
SHUTDOWN_SECONDS = 90.0
FILES_PER_CONNECTION = 4  # so many files may the engine have open for each connection of tenants
TRACKERS_SECONDS = 10.0  # after that, to bring the last steps to their trackers


async def serve(config: EngineConfig) -> int:
    """Runs an engine until SIGTERM or SIGINT (0), or its trainer's death (EXIT_TRAINER_DIED).

    Raises UserError or ValueError for settings that cannot work, EngineError when the sampler does not come up.
    """
    token = TokenFile(config.token_file)
    listener = _listen(config.host, config.port, "--port")
    tenants = None if config.tenant_port is None else _listen(config.host, config.tenant_port, "--tenant-port")
    epoch = await asyncio.to_thread(next_epoch, config.storage)
    supervisor = Supervisor(config, epoch, distribution_version("clora"))
    nodes = _trainer_nodes(config, token) if config.trainer_nodes > 1 else None
    if nodes is not None:
        supervisor.waits_for = lambda: nodes.waits_for
    registry = CollectorRegistry()
    registry.register(EngineCollector(supervisor))
    # HTTP comes up before the model, so that a liveness probe is answered while it loads.
    app = create_app(supervisor, token, registry)
    servers = [(_server(app), listener)]
    if tenants is not None:
        crowd = Crowd(_tenant_connections())
        servers.append((_server(create_tenant_app(supervisor), http=crowd.protocol, backlog=BACKLOG), tenants))
    serving = [asyncio.create_task(server.serve(sockets=[socket])) for server, socket in servers]
    try:
        return await _live(config, epoch, supervisor, nodes)
    finally:
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*serving)


def _server(app: FastAPI, **settings: Any) -> uvicorn.Server:
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=5, **settings
    )
    return _Server(config)


def _tenant_connections() -> int:
    """MOST_CONNECTIONS, or as many as leave files enough for all else that the engine has open: who fills the tenants'
    port must not keep the control API from taking connections in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS * FILES_PER_CONNECTION
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft // FILES_PER_CONNECTION)


async def _live(config: EngineConfig, epoch: int, supervisor: Supervisor, nodes: TrainerNodes | None) -> int:
    """From loading the model to the end. At SIGTERM every running step is brought to its commit first."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    async with contextlib.AsyncExitStack() as stack:
        loading = asyncio.create_task(_load(config, epoch, nodes, stack))
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await asyncio.wait({loading})
            return 0
        services = loading.result()
        services.sampler.when_lost(supervisor.version_lost)
        supervisor.open(services)
        log.info("epoch %d: ready on port %d", epoch, config.port)
        dying = asyncio.create_task(services.trainer.died.wait())
        await asyncio.wait({stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
        if services.trainer.died.is_set():
            log.error("%s: this epoch ends", services.trainer.death)
            last_words.tell(f"{services.trainer.death}: the next epoch goes on from the last commits")
            return EXIT_TRAINER_DIED
        await supervisor.stop(SHUTDOWN_SECONDS)
        await tracking.all_ended(TRACKERS_SECONDS)
        return 0


async def _load(
    config: EngineConfig, epoch: int, nodes: TrainerNodes | None, stack: contextlib.AsyncExitStack
) -> Services:
    """Starts trainer and sampler side by side. What was started is closed by `stack`, also when the other fails."""
    log.info("epoch %d: loading %s", epoch, config.served_name)
    if nodes is not None:
        stack.push_async_callback(nodes.close)
    model = await asyncio.to_thread(model_folder, config.model, config.revision)
    memory = host_memory()
    sampler_config = _sampler_config(config, model, memory[0])
    sampler = Sampler(sampler_config)
    starting = asyncio.create_task(_start_trainer(config, sampler_config, nodes, memory))
    starting.add_done_callback(_say_failure)  # at once: vLLM, which may take minutes yet, cannot be stopped

    async def close_trainer() -> None:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineError):
            await (await starting).close()

    stack.push_async_callback(close_trainer)
    stack.push_async_callback(sampler.close)
    await sampler.start()
    trainer = await starting
    if nodes is not None:
        config = replace(config, other_nodes=nodes.addresses)
    base = await asyncio.to_thread(base_model, model, config.served_name)
    return Services(config, trainer, sampler, await asyncio.to_thread(load_tokenizer, model), base)


def _say_failure(starting: asyncio.Task[TrainerClient]) -> None:
    if not starting.cancelled() and (error := starting.exception()) is not None:
        log.error("the trainer does not start: %s", error)
        last_words.tell(str(error))


def _listen(host: str, port: int, flag: str) -> socket.socket:
    """Binds first of all, so that a port in use is said at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}", field=flag) from None
    return listener


def _trainer_nodes(config: EngineConfig, token: TokenFile) -> TrainerNodes:
    """The door for the trainer's other nodes, open from the start: they may come before the model is there."""
    return TrainerNodes(
        _listen(config.host, config.trainer_port, "--trainer-port"),
        _listen(config.host, config.trainer_port + 1, "--trainer-port"),
        nodes=config.trainer_nodes,
        gpus=config.trainer_gpus,
        threads=max(1, config.trainer_threads // config.node_ranks),
        version=distribution_version("clora"),
        token=token.secret,
    )


async def _start_trainer(
    config: EngineConfig, sampler: SamplerConfig, nodes: TrainerNodes | None, memory: tuple[int, int]
) -> TrainerClient:
    """memory: the host's, in all and free, before vLLM began to load."""
    others = None if nodes is None else await nodes.all_there()
    total, free = memory
    copies, kv_bytes = (0, 0) if config.sampler_gpus else share_of_host(sampler, total)
    return await TrainerClient.start(
        str(sampler.model),
        model_name=config.served_name,
        dtype=config.resolved_dtype,
        device=f"cuda:{config.sampler_gpus}" if config.trainer_gpus else "cpu",
        threads=config.trainer_threads,
        max_rank=config.max_rank,
        tokens_per_microbatch=config.tokens_per_microbatch,
        host_limit_bytes=config.host_memory_bytes or total // 2,
        slots=config.trainer_slots,
        max_adapters=config.max_experiments,
        gradient_checkpointing=config.gradient_checkpointing,
        spill_directory=str(config.storage),
        processes=config.node_ranks,
        shard_base=config.shard_base,
        scheduling=config.scheduling,
        others=others,
        sampler_copies=copies,
        sampler_kv_bytes=kv_bytes,
        host_free_bytes=free,
    )


def _kv_cache_bytes(config: EngineConfig, total: int) -> int | None:
    """Of each of the sampler's ranks, on a host with `total` bytes. Where nothing is said, vLLM takes what a GPU has
    left, and on a CPU an eighth of the memory: its own choice there is nearly all of it, and the trainer needs some."""
    if config.kv_cache_bytes is not None or config.sampler_gpus:
        return config.kv_cache_bytes
    return total // 8 // config.data_parallel_size


def _sampler_config(config: EngineConfig, model: Path, memory: int) -> SamplerConfig:
    """memory: all of the host's, in bytes."""
    return SamplerConfig(
        model=model,
        versions_root=config.versions_root / f"clora-{config.port}",
        max_model_len=config.max_model_len,
        max_lora_rank=config.max_rank,
        slots=config.sampler_slots,
        served_name=config.served_name,
        dtype=config.resolved_dtype,
        max_num_seqs=config.max_num_seqs,
        kv_cache_bytes=_kv_cache_bytes(config, memory),
        threads=None if config.sampler_gpus else config.sampler_threads,
        shares_cores=not config.trainer_gpus,
        tensor_parallel_size=config.tensor_parallel_size,
        data_parallel_size=config.data_parallel_size,
        scheduling=config.scheduling,
    )


class _Server(uvicorn.Server):
    """Leaves signals to the engine, which has steps to bring to their commits before HTTP may go."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
