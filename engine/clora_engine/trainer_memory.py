"""What a trainer will take, in bytes, known from the checkpoint's configuration before anything is loaded.

Left out: activations, which depend on the batches; the trainer cuts those smaller when memory runs out. Of a sampler on
the same host, what is not said here: the versions that it holds, and its own activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from clora_engine.adapter_files import BaseShapes
from clora_engine.adapter_state import state_bytes
from clora_engine.errors import UserError
from clora_engine.lora import Layout, ModuleShape, rank_bucket

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """base: the frozen model. adapter: the largest that is admitted (rank max_rank, all linear layers), on the host and
    in a slot alike. slots: how many the device holds. store: what the adapters may take on the host, where each
    experiment has one and, with a KL term, one more that is frozen. together: adapters that are there at the same time
    while a pass uses them. sampler_base, sampler_kv: vLLM's copies of the base model and its KV cache, where they take
    this host's memory; it loads beside the trainer, so neither is missing yet from the memory that is free."""

    base: int
    adapter: int
    slots: int
    store: int
    together: int = 1
    sampler_base: int = 0
    sampler_kv: int = 0

    @classmethod
    def of(
        cls,
        base: BaseShapes,
        *,
        bytes_per_parameter: int,
        max_rank: int,
        slots: int,
        adapters: int,
        host_limit: int,
        shards: int = 1,
        sampler_copies: int = 0,
        sampler_kv: int = 0,
        processes: int = 1,
    ) -> MemoryPlan:
        """shards: devices over which the decoder layers are spread; the model's ends are whole on each.
        sampler_copies: of the base model, that vLLM will have on this host. processes: of the trainer there, each of
        which answers for its part of what vLLM takes."""
        modules = tuple(ModuleShape(name, *sizes) for name, sizes in base.linear.items())
        layout = Layout(modules, rank_bucket(max_rank))
        adapter, start = state_bytes(layout), state_bytes(layout, frozen=True)
        held = base.ends + -(-(base.parameters - base.ends) // shards)
        store = min(host_limit, adapters * (adapter + start))
        return cls(
            base=held * bytes_per_parameter,
            adapter=adapter,
            slots=slots,
            store=store,
            together=min(slots, adapters),
            sampler_base=-(-sampler_copies * base.parameters * bytes_per_parameter // processes),
            sampler_kv=-(-sampler_kv // processes),
        )

    @property
    def device(self) -> int:
        return self.base + self.slots * self.adapter

    @property
    def beside(self) -> int:
        """What the host must hold beside base model and slots."""
        return self.store + self.sampler_base + self.sampler_kv

    def check(self, *, device_free: int | None, host_free: int) -> None:
        """Raises UserError, with the numbers, when it does not fit. device_free None: the device is the host."""
        if self.together * self.adapter > self.store:
            several = f", {self.together} of them are used at once" if self.together > 1 else ""
            raise UserError(
                f"an adapter of the highest rank takes {_gib(self.adapter)}{several}, and the trainer's host limit is"
                f" {_gib(self.store)}: raise --host-memory or lower capacity.maxRank or trainer.slots",
                field="capacity.maxRank",
            )
        on_device = f"{_gib(self.base)} for the base model and {self.slots} x {_gib(self.adapter)} for its slots"
        if device_free is not None and self.device > device_free:
            raise UserError(
                f"the trainer's GPU has {_gib(device_free)} free, and the trainer needs {on_device}: lower"
                " trainer.slots or capacity.maxRank, or choose a smaller model",
                field="trainer.slots",
            )
        needed = self.beside + (self.device if device_free is None else 0)
        if needed > host_free:
            also, lower = f" beside {on_device}" if device_free is None else "", ""
            if self.sampler_base or self.sampler_kv:
                also += (
                    f", and the sampler {_gib(self.sampler_base)} for its base model and {_gib(self.sampler_kv)} for"
                    " its KV cache"
                )
                lower = "set or lower sampler.kvCacheMemory, or "
            raise UserError(
                f"{_gib(host_free)} of memory are free, and the trainer needs {_gib(self.store)} for adapters{also}:"
                f" {lower}lower --host-memory, capacity.maxRank, capacity.maxExperiments or trainer.slots",
                field="capacity.maxExperiments",
            )

    def slots_that_fit(self, wanted: int, *, device_free: int, share: float) -> int:
        """At most `wanted`, at least one: as many as take no more than `share` of what the base model leaves free, and
        whose adapters the host holds."""
        spare = share * (device_free - self.base)
        return max(1, min(wanted, int(spare // self.adapter), self.store // self.adapter))


def host_memory() -> tuple[int, int]:
    """Total and available memory for this process's container, in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    info = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}
    total, available = info["MemTotal"], info["MemAvailable"]
    for path in map(Path, _CGROUP_LIMITS):
        limit = path.read_text().strip() if path.is_file() else "max"
        if limit.isdigit():
            total, available = min(total, int(limit)), min(available, int(limit))
    return total, available


def device_free(device: torch.device) -> int | None:
    """Free memory of a GPU, None for the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def is_out_of_memory(error: Exception) -> bool:
    """Of the device, or of the host: torch has no type for the latter."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
