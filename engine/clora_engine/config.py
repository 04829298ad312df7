"""The engine's settings: one frozen dataclass, one argument parser.

No setting has a second way in (no environment variables, no file); the control API's token comes as a file so that it
stands in no process list.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from clora_api.v1alpha1.engine import MAX_TRAINER_GPUS, MAX_TRAINER_SLOTS, Scheduling
from clora_api.v1alpha1.experiment import MAX_OFF_POLICY_STEPS, EnvironmentName
from clora_engine.environments.http_addresses import AllowedHost

SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Environment of sampler and trainer on a CPU, where both have all cores: their OpenMP threads (GNU's, or Intel's in
vLLM) must sleep while they wait. By default they spin, and ruin the other process: on 2 cores, two experiments were 1.6
times as fast so as with one core each."""

TRAINER_PORT = 29400


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes in bytes, lengths in tokens."""

    model: str  # folder of the model, or its name on the hub
    storage: Path  # commits, rollouts and metrics of all experiments
    token_file: Path  # bearer token of the control API
    model_name: str = ""  # name it is served under; default: `model`
    revision: str | None = None
    host: str = "0.0.0.0"  # noqa: S104 - a pod is reached by its own address
    port: int = 8080
    tenant_port: int | None = None  # where tenants reach their adapters (serving.py); None: nowhere
    max_experiments: int = 8
    max_rank: int = 32
    max_off_policy_steps: int = 2  # of an experiment
    data_volumes: dict[str, Path] = field(default_factory=dict)  # name -> folder that experiments may read
    hub_datasets: tuple[str, ...] = ()  # that experiments may have it download: owner/name or owner/*
    environments: tuple[str, ...] = ()  # that experiments may name; none: all
    environment_hosts: tuple[str, ...] = ()  # that environment HTTP may reach
    tracking_hosts: tuple[str, ...] = ()  # that trackers may send metrics to
    loopback_environments: bool = False  # whether both may reach this machine's loopback, for development
    # sampler
    sampler_gpus: int = 0  # 0: the CPU
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    max_model_len: int = 8192
    max_num_seqs: int = 256
    kv_cache_bytes: int | None = None
    scheduling: Scheduling = Scheduling.FAIR_SHARE  # whose turn it is while several wait
    sampler_threads: int = 1  # of a sampler on the CPU
    # trainer
    trainer_gpus: int = 0  # of each node; 0: the CPU
    trainer_processes: int = 1  # of a trainer on the CPU
    trainer_nodes: int = 1  # this one included; the others run `clora-engine follow`
    trainer_port: int = TRAINER_PORT  # where the others come to; their ranks meet at the next one
    other_nodes: tuple[str, ...] = ()  # addresses of the others, once they are there
    shard_base: bool = False  # over the trainer's GPUs or processes
    tokens_per_microbatch: int = 16384
    trainer_threads: int = 1  # of a trainer on the CPU
    trainer_slots: int | None = None  # adapters in one pass; None: what a measurement says
    gradient_checkpointing: bool = False
    host_memory_bytes: int | None = None  # limit of the AdapterStore
    dtype: str = "auto"  # of the base model; auto: bfloat16 on GPUs, float32 on CPUs
    versions_root: Path = Path("/dev/shm")  # noqa: S108 - tmpfs: versions are read once and removed

    @property
    def served_name(self) -> str:
        return self.model_name or self.model

    @property
    def resolved_dtype(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.sampler_gpus or self.trainer_gpus else "float32"

    @property
    def served_versions(self) -> int:
        """Versions of one experiment that tenants' requests may hold besides those that its training needs."""
        return 0 if self.tenant_port is None else 2

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its answer: no more than the trainer computes in one piece."""
        return min(self.max_model_len, self.tokens_per_microbatch)

    @property
    def node_ranks(self) -> int:
        """Processes of the trainer on each node."""
        return self.trainer_gpus or self.trainer_processes

    @property
    def trainer_ranks(self) -> int:
        """Processes of the trainer."""
        return self.trainer_nodes * self.node_ranks

    @property
    def sampler_slots(self) -> int:
        """Versions that the sampler may have to hold at once. For every experiment: the one being published, the
        newest, those that its trajectories may be older by, and those that tenants' requests have begun with; so that
        whoever has a slot has room for its versions."""
        return (self.max_off_policy_steps + 2 + self.served_versions) * self.max_experiments


_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity such as 4Gi. Raises ArgumentTypeError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 4Gi or 500M, for example")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _slots(text: str) -> int | None:
    if text == "Auto":
        return None
    if not text.isdigit() or not 1 <= int(text) <= MAX_TRAINER_SLOTS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither Auto nor a number from 1 to {MAX_TRAINER_SLOTS}")
    return int(text)


def _steps(text: str) -> int:
    if not text.isdigit() or int(text) > MAX_OFF_POLICY_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {MAX_OFF_POLICY_STEPS}")
    return int(text)


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def _volume(text: str) -> tuple[str, Path]:
    name, sep, path = text.partition("=")
    if not sep or not name or not Path(path).is_absolute():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=/ABSOLUTE/PATH")
    return name, Path(path)


def _host(text: str) -> str:
    try:
        AllowedHost.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _dataset(text: str) -> str:
    owner, _, name = text.partition("/")
    if not owner or "*" in owner or not name or "/" in name or ("*" in name and name != "*"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither OWNER/NAME nor OWNER/*")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `clora-engine serve`."""
    cores = os.cpu_count() or 2
    add = parser.add_argument
    add("--model", required=True, help="folder of the base model, or its name on the hub")
    add("--model-name", default="", help="name that it is served under (default: --model)")
    add("--revision", default=None, help="revision on the hub")
    add("--storage", type=Path, required=True, help="folder for commits, rollouts and metrics")
    add("--token-file", type=Path, required=True, help="file with the control API's bearer token")
    add("--host", default="0.0.0.0", help="address to listen on")  # noqa: S104
    add("--port", type=int, default=8080, help="port of the control API")
    add("--tenant-port", type=int, default=None, help="port on which tenants reach their adapters (default: none)")
    add("--max-experiments", type=int, default=8, help="experiments attached at once")
    add("--max-rank", type=int, default=32, help="highest LoRA rank")
    add(
        "--max-off-policy-steps", type=_steps, default=2, metavar="N", help="highest maxOffPolicySteps of an experiment"
    )
    add("--data-volume", type=_volume, action="append", default=[], metavar="NAME=PATH", dest="data_volumes")
    add(
        "--hub-dataset",
        type=_dataset,
        action="append",
        default=[],
        metavar="OWNER/NAME",
        dest="hub_datasets",
        help="data set of the hub that experiments may name, OWNER/* for all of one owner; may be repeated"
        " (default: none)",
    )
    add(
        "--environment",
        action="append",
        default=[],
        choices=get_args(EnvironmentName),
        metavar="NAME",
        dest="environments",
        help="environment that experiments may use; may be repeated (default: all)",
    )
    add(
        "--environment-host",
        type=_host,
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        dest="environment_hosts",
        help="host that the environment HTTP may reach, *.suffix for all below one; may be repeated (default: none)",
    )
    add(
        "--tracking-host",
        type=_host,
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        dest="tracking_hosts",
        help="host that experiments may send their metrics to (spec.tracking), *.suffix for all below one; may be"
        " repeated (default: none)",
    )
    add(
        "--loopback-environments",
        action="store_true",
        help="let the environment HTTP and trackers reach this machine's own loopback, for development",
    )
    add("--sampler-gpus", type=int, default=0, help="GPUs that sample; 0: the CPU")
    add("--tensor-parallel-size", type=int, default=1)
    add("--data-parallel-size", type=int, default=1)
    add("--max-model-len", type=int, default=8192, help="longest prompt and answer together, in tokens")
    add("--max-num-seqs", type=int, default=256, help="sequences decoded in one batch")
    add("--kv-cache-memory", type=quantity, default=None, dest="kv_cache_bytes", help="size of the KV cache, e.g. 4Gi")
    add(
        "--scheduling",
        type=Scheduling,
        default=Scheduling.FAIR_SHARE,
        choices=list(Scheduling),
        metavar="{" + ",".join(Scheduling) + "}",
        help="whose turn it is at sampler and trainer while several wait",
    )
    add("--sampler-threads", type=int, default=cores, help="threads of a sampler on the CPU")
    gpus = range(MAX_TRAINER_GPUS + 1)
    add("--trainer-gpus", type=int, default=0, choices=gpus, help="GPUs that train, on each node; 0: the CPU")
    add("--trainer-processes", type=int, default=1, help="processes of a trainer on the CPU, one a socket for example")
    add("--trainer-nodes", type=int, default=1, help="nodes that train; all but this one run `clora-engine follow`")
    add("--trainer-port", type=int, default=TRAINER_PORT, help="where the other nodes come; the next one is used too")
    add(
        "--shard-base",
        type=_switch,
        default=False,
        metavar="true|false",
        help="spread the base model over the trainer's GPUs or processes instead of copying it to each",
    )
    add("--tokens-per-microbatch", type=int, default=16384)
    add("--trainer-slots", type=_slots, default=None, metavar="N|Auto", help="adapters trained in one pass")
    add(
        "--gradient-checkpointing",
        type=_switch,
        default=False,
        metavar="true|false",
        help="compute layers again in the backward pass, for less memory",
    )
    add("--trainer-threads", type=int, default=cores, help="threads of a trainer on the CPU, all processes together")
    add("--host-memory", type=quantity, default=None, dest="host_memory_bytes", help="limit of the AdapterStore")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of the base model")


def from_arguments(args: argparse.Namespace) -> EngineConfig:
    """The parsed flags as a config. Raises ValueError for flags that contradict each other."""
    values = {k: v for k, v in vars(args).items() if k in EngineConfig.__dataclass_fields__}
    values["data_volumes"] = dict(args.data_volumes)
    lists = ("hub_datasets", "environments", "environment_hosts", "tracking_hosts")
    values |= {name: tuple(values[name]) for name in lists}
    config = EngineConfig(**values)
    if config.tenant_port == config.port:
        raise ValueError(f"--tenant-port {config.port} is the control API's: give tenants another")
    if config.sampler_gpus and config.tensor_parallel_size * config.data_parallel_size != config.sampler_gpus:
        raise ValueError(
            f"--sampler-gpus {config.sampler_gpus} must equal --tensor-parallel-size {config.tensor_parallel_size}"
            f" times --data-parallel-size {config.data_parallel_size}"
        )
    if config.trainer_processes < 1 or (config.trainer_gpus and config.trainer_processes > 1):
        raise ValueError("--trainer-processes is for a trainer on the CPU, at least 1; on GPUs there is one for each")
    if config.shard_base and config.trainer_ranks < 2:
        raise ValueError("--shard-base spreads the model over several: give more --trainer-gpus or --trainer-processes")
    _check_nodes(config)
    return config


def check_trainer_port(port: int) -> None:
    """Raises ValueError for one that is none, or has none after it."""
    if not 1 <= port <= 65534:
        raise ValueError(f"--trainer-port {port} and the next one are no ports")


def _check_nodes(config: EngineConfig) -> None:
    if config.trainer_nodes < 1:
        raise ValueError(f"--trainer-nodes {config.trainer_nodes}: this node is one, give at least 1")
    if config.trainer_nodes == 1:
        return
    if config.trainer_processes > 1:
        raise ValueError("--trainer-processes is for one node: of several on CPUs each has one process")
    check_trainer_port(config.trainer_port)
    if {config.port, config.tenant_port} & {config.trainer_port, config.trainer_port + 1}:
        raise ValueError(
            f"--trainer-port {config.trainer_port} and the next one are the trainer's: give others to --port and"
            " --tenant-port"
        )
