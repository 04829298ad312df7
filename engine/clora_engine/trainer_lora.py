"""LoRA layers over a frozen causal LM, for the rows of several adapters in one pass.

The product with the frozen matrix is one for all rows; each adapter's two small products touch its own rows alone. Rows
of one adapter lie together, so these are products over contiguous segments: one after the other on CPUs, where a
product per segment costs next to nothing, and grouped (torch.nn.functional.grouped_mm, one launch for all adapters) on
GPUs, where launches would cost more than the work. With one adapter in the pass both are the plain product.

Nothing is masked and nothing is multiplied by zero: a segment's numbers, infinite ones too, never enter another's.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (arXiv:2106.09685); batching adapters by segments:
Chen et al., "Punica", 2023 (arXiv:2310.18547).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from clora_engine.lora import ModuleShape
from clora_engine.trainer_packing import MicroBatch

GROUPED_ALIGNMENT = 8  # values: grouped_mm wants strides of 16 bytes, and no dtype here is narrower than 2


@dataclass(frozen=True, slots=True)
class Live:
    """An adapter in the pass: module name -> leaves A (R x I) and B (O x R), FP32 with .grad; and alpha / R."""

    matrices: Mapping[str, tuple[Tensor, Tensor]]
    scale: float


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `stop` of the flattened rows belong to adapter number `live` of the pass."""

    live: int
    start: int
    stop: int


class Pass:
    """Which tokens belong to which adapter, for all layers of a model; set anew for every micro-batch.

    `segments` lie in order and cover every token.
    """

    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()
        self.stops_G: Tensor | None = None

    def set(self, batch: MicroBatch, device: torch.device) -> None:
        length = batch.ids_BL.shape[1]
        self.segments = tuple(Segment(p.call, p.row_start * length, p.row_stop * length) for p in batch.parts)
        self.stops_G = torch.tensor([s.stop for s in self.segments], dtype=torch.int32).to(device)


class LoraLinear(nn.Module):
    """A frozen Linear plus the updates of the adapters in the pass: y = base(x) + alpha / R * (x Aᵀ) Bᵀ, each over its
    own tokens.

    Without adapters, or where none of them targets this layer, it is the base layer. Products run in the base model's
    dtype; gradients arrive in FP32. `x` must hold all tokens of the micro-batch in their order.
    """

    def __init__(self, base: nn.Linear, current: Pass) -> None:
        super().__init__()
        self.base = base
        self._current = current
        self._updates: tuple[tuple[Tensor, Tensor, float] | None, ...] = ()

    def bind(self, updates: Sequence[tuple[Tensor, Tensor, float] | None]) -> None:
        """A, B and scale of each adapter of the pass, or None where it does not target this layer."""
        self._updates = tuple(updates) if any(update is not None for update in updates) else ()

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.base.weight, self.base.bias
        parts = [(s, self._updates[s.live]) for s in self._current.segments] if self._updates else []
        if not any(update for _, update in parts):
            return functional.linear(x, weight, bias)
        assert x.numel() // x.shape[-1] == parts[-1][0].stop, "a layer that does not see every token"
        bounds = tuple((s.start, s.stop, update[2]) for s, update in parts if update)
        matrices = [matrix.to(x.dtype) for _, update in parts if update for matrix in update[:2]]
        stops_G = self._current.stops_G
        grouped = x.is_cuda and len(parts) > 1 and len(bounds) == len(parts) and can_group(x, weight)
        product = GroupedProduct if grouped else SegmentProduct
        out: Tensor = product.apply(x, weight, bias, stops_G, bounds, *matrices)  # type: ignore[no-untyped-call]
        return out


def can_group(x: Tensor, weight_OI: Tensor) -> bool:
    """Whether strides fit grouped_mm. Ranks do always: they are multiples of 8 by their buckets."""
    return x.dtype == torch.bfloat16 and all(size % GROUPED_ALIGNMENT == 0 for size in weight_OI.shape)


class SegmentProduct(torch.autograd.Function):
    """y = x Wᵀ + c, plus scale (x Aᵀ) Bᵀ over the tokens of each segment: one pass over y forward and one over the
    gradient of x backward, where separate operations would each read and write them again.

    apply(x, W (O x I), c (O) or None, unused, bounds, A₀ (R x I), B₀ (O x R), A₁, …); bounds: (start, stop, scale) of
    each pair. Tokens outside all bounds get the base product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        _: Tensor | None,
        bounds: tuple[tuple[int, int, float], ...],
        *matrices: Tensor,
    ) -> Tensor:
        x_TI = x.flatten(0, -2)
        out_TO = functional.linear(x_TI, weight_OI, bias_O)
        lows = []
        for (start, stop, scale), a_RI, b_OR in zip(bounds, matrices[::2], matrices[1::2], strict=True):
            low_TR = functional.linear(x_TI[start:stop], a_RI).mul_(scale)
            out_TO[start:stop].addmm_(low_TR, b_OR.t())
            lows.append(low_TR)
        ctx.save_for_backward(x_TI, weight_OI, *lows, *matrices)
        ctx.bounds = bounds
        return out_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, *saved = ctx.saved_tensors
        lows, matrices = saved[: len(ctx.bounds)], saved[len(ctx.bounds) :]
        grad_TO = grad.flatten(0, -2)
        grad_x_TI = grad_TO @ weight_OI if ctx.needs_input_grad[0] else None
        grads: list[Tensor] = []
        for (start, stop, scale), low_TR, a_RI, b_OR in zip(
            ctx.bounds, lows, matrices[::2], matrices[1::2], strict=True
        ):
            own_TO = grad_TO[start:stop]
            grad_low_TR = (own_TO @ b_OR).mul_(scale)
            if grad_x_TI is not None:
                grad_x_TI[start:stop].addmm_(grad_low_TR, a_RI)
            grads += [grad_low_TR.t() @ x_TI[start:stop], own_TO.t() @ low_TR]
        grad_x = None if grad_x_TI is None else grad_x_TI.view(*grad.shape[:-1], -1)
        return grad_x, None, None, None, None, *grads


class GroupedProduct(torch.autograd.Function):
    """The same in one launch for all segments, which must cover every token: apply's fourth argument is where each
    segment ends (int32, G). Matrices are stacked to [G, R, I] and [G, O, R], lower ranks padded with zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        stops_G: Tensor,
        bounds: tuple[tuple[int, int, float], ...],
        *matrices: Tensor,
    ) -> Tensor:
        x_TI = x.flatten(0, -2)
        rank = max(a_RI.shape[0] for a_RI in matrices[::2])
        a_GRI = torch.stack([functional.pad(a, (0, 0, 0, rank - a.shape[0])) for a in matrices[::2]])
        b_GOR = torch.stack([functional.pad(b, (0, rank - b.shape[1])) for b in matrices[1::2]])
        low_TR = functional.grouped_mm(x_TI, a_GRI.transpose(1, 2), offs=stops_G)
        _scale_segments(low_TR, bounds)
        out_TO = functional.linear(x_TI, weight_OI, bias_O)
        out_TO += functional.grouped_mm(low_TR, b_GOR.transpose(1, 2), offs=stops_G)
        ctx.save_for_backward(x_TI, weight_OI, stops_G, low_TR, a_GRI, b_GOR)
        ctx.bounds = bounds
        ctx.ranks = [a_RI.shape[0] for a_RI in matrices[::2]]
        return out_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, stops_G, low_TR, a_GRI, b_GOR = ctx.saved_tensors
        grad_TO = grad.flatten(0, -2).contiguous()  # an expanded gradient has strides of 0
        grad_low_TR = functional.grouped_mm(grad_TO, b_GOR, offs=stops_G)
        _scale_segments(grad_low_TR, ctx.bounds)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x_TI = grad_TO @ weight_OI
            grad_x_TI += functional.grouped_mm(grad_low_TR, a_GRI, offs=stops_G)
            grad_x = grad_x_TI.view(*grad.shape[:-1], -1)
        grad_a_GRI = functional.grouped_mm(grad_low_TR.t(), x_TI, offs=stops_G)
        grad_b_GOR = functional.grouped_mm(grad_TO.t(), low_TR, offs=stops_G)
        grads: list[Tensor] = []
        for group, rank in enumerate(ctx.ranks):
            grads += [grad_a_GRI[group, :rank], grad_b_GOR[group, :, :rank]]
        return grad_x, None, None, None, None, *grads


def _scale_segments(low_TR: Tensor, bounds: tuple[tuple[int, int, float], ...]) -> None:
    if len({scale for _, _, scale in bounds}) == 1:
        low_TR.mul_(bounds[0][2])
    else:
        for start, stop, scale in bounds:
            low_TR[start:stop].mul_(scale)


def wrap_linears(model: nn.Module, output_head: nn.Module, current: Pass) -> dict[str, LoraLinear]:
    """Replaces every Linear of `model` but the output head by a LoraLinear, in place; name -> layer in model order."""
    found = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and m is not output_head]
    layers = {}
    for name, module in found:
        layers[name] = LoraLinear(module, current)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layers[name])
    return layers


def shapes(layers: Mapping[str, LoraLinear]) -> tuple[ModuleShape, ...]:
    """The shapes of wrapped layers, in their order."""
    return tuple(ModuleShape(name, layer.base.in_features, layer.base.out_features) for name, layer in layers.items())


def bind(layers: Mapping[str, LoraLinear], adapters: Sequence[Live]) -> None:
    """Points every layer at these adapters' matrices, in their order."""
    for name, layer in layers.items():
        layer.bind([(*live.matrices[name], live.scale) if name in live.matrices else None for live in adapters])
