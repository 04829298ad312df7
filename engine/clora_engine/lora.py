"""One adapter's matrices: their flat layout, how they start, and which modules of the base model they belong to.

All matrices of an adapter are views of one flat FP32 vector, so that swapping an adapter, clipping its gradient and its
AdamW step are each one operation on one vector. A `Layout` says where each matrix lies in it; it depends only on the
target modules and on the rank bucket, never on the tenant. Ranks are padded to their bucket: the pads start as zero
and stay zero, because the gradient of a padded row of A is a product with the padded column of B and the other way
round; the scale uses the true rank.

Left out on purpose: dropout, biases, DoRA, rank-stabilised scaling, LoRA on embeddings and on the output head. The
sampler must compute exactly what is trained here, and it has none of these.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (arXiv:2106.09685).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import regex  # type: ignore[import-untyped]  # the standard re has no time-out
import torch
from torch import Tensor, nn

from clora_engine.errors import UserError
from clora_engine.types import LoraConfig

ALIGNMENT = 32  # floats: 128 bytes, what wide loads on CPUs and GPUs ask for
MIN_BUCKET = 8  # tensor cores want multiples of 8
MATCH_SECONDS = 1.0  # a tenant's regular expression gets no longer than this for all module names together


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """One Linear of the base model: its dotted name and its input and output features."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one module's matrices lie in the flat vector: A (bucket x I) and B (O x bucket), both row-major."""

    module: ModuleShape
    a_offset: int
    b_offset: int


@dataclass(frozen=True)
class Layout:
    """The flat layout for these modules, in the base model's own order, at this rank bucket. `numel` counts the
    alignment gaps too; they hold zeros for ever."""

    modules: tuple[ModuleShape, ...]
    bucket: int

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        offset, placements = 0, []
        for module in self.modules:
            b_offset = _aligned(offset + self.bucket * module.in_features)
            placements.append(Placement(module, offset, b_offset))
            offset = _aligned(b_offset + self.bucket * module.out_features)
        return tuple(placements)

    @cached_property
    def numel(self) -> int:
        last = self.placements[-1]
        return _aligned(last.b_offset + self.bucket * last.module.out_features)

    def parameters(self, rank: int) -> int:
        """Trainable scalars of an adapter of this true rank."""
        return sum(rank * (module.in_features + module.out_features) for module in self.modules)

    def matrices(self, flat: Tensor, rank: int | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """Views of `flat`: module name -> A (R x I) and B (O x R), cut to `rank` or, without one, the whole bucket."""
        rank = self.bucket if rank is None else rank
        views = {}
        for place in self.placements:
            inputs, outputs = place.module.in_features, place.module.out_features
            a = flat[place.a_offset : place.a_offset + self.bucket * inputs].view(self.bucket, inputs)
            b = flat[place.b_offset : place.b_offset + outputs * self.bucket].view(outputs, self.bucket)
            views[place.module.name] = (a[:rank], b[:, :rank])
        return views


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def rank_bucket(rank: int) -> int:
    """The power of two, at least 8, that holds `rank`: adapters of one bucket share a slot's buffers."""
    return max(MIN_BUCKET, 1 << (rank - 1).bit_length())


def initialise(layout: Layout, config: LoraConfig, flat: Tensor) -> None:
    """Fills `flat` (CPU, FP32, layout.numel, zeros) as PEFT starts an adapter: A kaiming-uniform (a = sqrt 5), B zero.

    The draw comes from the adapter's own seed and generator, so it depends neither on other tenants nor on the device.
    """
    generator = torch.Generator().manual_seed(config.seed)
    for a, _ in layout.matrices(flat, config.rank).values():
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)


# --------------------------------------------------------------------------------------------- target modules


def match_targets(target_modules: str | Iterable[str], available: tuple[ModuleShape, ...]) -> tuple[ModuleShape, ...]:
    """The modules that `target_modules` means, by PEFT's rules: "all-linear", one regular expression that must match a
    whole name, or a list of names and name suffixes at a dot.

    `available` is every Linear but the output head. Raises UserError when nothing matches, when an entry of a list
    matches nothing, and when a regular expression is malformed or takes too long.
    """
    if isinstance(target_modules, str):
        if target_modules.lower() == "all-linear":
            return available
        matched = _match_regex(target_modules, available)
    else:
        matched = _match_suffixes(tuple(target_modules), available)
    if not matched:
        raise UserError(
            f"target modules {target_modules!r} match no linear layer of the base model; it has {_kinds(available)}",
            field="lora.targetModules",
        )
    return matched


def _match_suffixes(entries: tuple[str, ...], available: tuple[ModuleShape, ...]) -> tuple[ModuleShape, ...]:
    for entry in entries:
        if not any(_has_suffix(module.name, entry) for module in available):
            raise UserError(
                f"target module {entry!r} matches no linear layer of the base model; it has {_kinds(available)} "
                "(embeddings and the output head cannot be trained)",
                field="lora.targetModules",
            )
    return tuple(module for module in available if any(_has_suffix(module.name, entry) for entry in entries))


def _has_suffix(name: str, entry: str) -> bool:
    return name == entry or name.endswith(f".{entry}")


def _match_regex(pattern: str, available: tuple[ModuleShape, ...]) -> tuple[ModuleShape, ...]:
    try:
        compiled = regex.compile(pattern)
        deadline = time.monotonic() + MATCH_SECONDS
        return tuple(
            module
            for module in available
            if compiled.fullmatch(module.name, timeout=max(deadline - time.monotonic(), 0.001))
        )
    except regex.error as error:
        raise UserError(f"{pattern!r} is not a regular expression: {error}", field="lora.targetModules") from error
    except TimeoutError as error:
        raise UserError(
            f"the regular expression {pattern!r} takes too long on the base model's module names; give a list of name "
            "suffixes instead",
            field="lora.targetModules",
        ) from error


def _kinds(available: tuple[ModuleShape, ...]) -> str:
    return ", ".join(_suffixes(available))


def target_names(modules: tuple[ModuleShape, ...], available: tuple[ModuleShape, ...]) -> list[str]:
    """The shortest sorted list that PEFT reads as exactly `modules` out of `available`: the distinct last components of
    their names (down_proj, gate_proj, …) if these say it, else the whole names."""
    suffixes = _suffixes(modules)
    if _match_suffixes(tuple(suffixes), available) == modules:
        return suffixes
    return sorted(module.name for module in modules)


def _suffixes(modules: tuple[ModuleShape, ...]) -> list[str]:
    return sorted({module.name.rpartition(".")[2] for module in modules})
