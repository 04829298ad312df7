"""What a sampler is made of, and how vLLM is told: its arguments, and the environment of its processes."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from vllm import AsyncEngineArgs
from vllm.config.lora import MaxLoRARanks
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from clora_api.v1alpha1.engine import Scheduling
from clora_engine.config import SLEEPING_THREADS
from clora_engine.errors import UserError
from clora_engine.vllm_plugin import ENGINE_PID, KERNEL, lora_kernel

CPU_BLOCK_SIZE = 32
"""Tokens of a KV block: the smallest that vLLM's CPU attention wants, so that short prompts hit the prefix cache."""

_ENVIRONMENT = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """What a sampler is made of.

    model           directory of the base model
    versions_root   directory for adapter versions, on a tmpfs; made with mode 0700, emptied at start and end
    dtype           of weights and KV cache: "auto", "float32", "bfloat16", ...
    slots           LoRA versions held at once: maxOffPolicySteps + 2 for every experiment, and those served
    kv_cache_bytes  per data-parallel rank; None leaves it to vLLM
    threads         OpenMP threads per rank on a CPU; None leaves it to vLLM
    shares_cores    whether these threads sleep while they wait, for others need the cores too
    scheduling      who samples first when the sampler is saturated (gate_queue.py)
    max_queued      sequences of one experiment that may wait at the gate of one rank; what is beyond is refused
    queue_timeout_seconds    after which, if no sequence was begun on a rank, all that wait for it are given up
    request_timeout_seconds  after which a sequence that vLLM still holds is aborted (for every 4096 tokens of it)
    extra_args      further arguments of vLLM's AsyncEngineArgs, except those that the sampler sets itself
    start_attempts  consecutive failures to start vLLM's core after which the sampler gives up
    """

    model: Path
    versions_root: Path
    max_model_len: int
    max_lora_rank: int
    slots: int
    served_name: str = "base"
    dtype: str = "auto"
    max_num_seqs: int = 64
    kv_cache_bytes: int | None = None
    threads: int | None = None
    shares_cores: bool = True
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    scheduling: Scheduling = Scheduling.FAIR_SHARE
    max_queued: int = 8192
    queue_timeout_seconds: float = 3600.0
    request_timeout_seconds: float = 3600.0
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    start_attempts: int = 3
    backoff_seconds: float = 1.0


def engine_args(config: SamplerConfig, lora_modules: tuple[str, ...]) -> AsyncEngineArgs:
    """vLLM's arguments. Raises UserError for extra arguments that the sampler sets itself."""
    ranks = [r for r in get_args(MaxLoRARanks) if r >= config.max_lora_rank]
    if not ranks:
        raise UserError(f"maxRank {config.max_lora_rank} is above vLLM's maximum", field="capacity.maxRank")
    args: dict[str, Any] = {
        "model": str(config.model),
        "served_model_name": config.served_name,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # no sampling defaults from the model's files
        "trust_remote_code": False,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from, temperature included
        "enable_lora": True,
        "max_loras": config.slots,
        "max_cpu_loras": config.slots,
        "max_lora_rank": ranks[0],
        "lora_target_modules": list(lora_modules),
        "worker_extension_cls": "clora_engine.vllm_plugin.read_ahead.ReadAhead",
        "tensor_parallel_size": config.tensor_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    clash = sorted(set(args) & set(config.extra_args))
    if clash:
        raise UserError(f"{', '.join(clash)} is set by the sampler itself", field="sampler.extraArgs")
    unknown = sorted(set(config.extra_args) - {known.name for known in fields(AsyncEngineArgs)})
    if unknown:
        raise UserError(f"vLLM has no argument {', '.join(unknown)}", field="sampler.extraArgs")
    if current_platform.is_cpu():
        # A request seed with a prompt prefilled in pieces crashes vLLM's CPU runner: it rewinds the request's
        # generator by an offset, which CPU generators don't have. Whole prompts need a budget of a whole context.
        args |= {
            "enforce_eager": True,
            "block_size": CPU_BLOCK_SIZE,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.max_model_len, 2048),
        }
        if config.tensor_parallel_size == 1:
            # No worker process beside the core's: it starts sooner, and nothing spins on a queue between the two.
            args["distributed_executor_backend"] = UniProcExecutor
    return AsyncEngineArgs(**(args | dict(config.extra_args)))


def share_of_host(config: SamplerConfig, total: int) -> tuple[int, int]:
    """What a sampler on the CPU takes of a host with `total` bytes: copies of the base model, and bytes of KV cache of
    all ranks together. Without kv_cache_bytes, each of vLLM's ranks there fills a fixed share of the host's memory (its
    gpu_memory_utilization, 92 % by default) with model and cache together, whatever others need: all of it counts as
    cache then."""
    ranks = config.data_parallel_size
    if config.kv_cache_bytes is None:
        return 0, ranks * math.ceil(total * AsyncEngineArgs.gpu_memory_utilization)
    return ranks, ranks * config.kv_cache_bytes


@contextmanager
def process_environment(config: SamplerConfig) -> Iterator[None]:
    """The environment that vLLM's processes inherit; restored afterwards, with whatever vLLM itself added. One sampler
    of this process at a time, or the later would take the earlier's environment for the one to restore: blocks."""
    with _ENVIRONMENT:
        before = dict(os.environ)
        try:
            _set_environment(config)
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def _set_environment(config: SamplerConfig) -> None:
    os.environ |= {ENGINE_PID: str(os.getpid()), "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if current_platform.is_cpu():
        os.environ[KERNEL] = str(lora_kernel.library())
        if config.threads is not None:
            os.environ |= {"OMP_NUM_THREADS": str(config.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            if config.shares_cores:
                os.environ |= SLEEPING_THREADS
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
