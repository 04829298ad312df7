"""LoRA with few large matrix products per layer, for any mix of adapters in one batch (CPU).

vLLM's stock CPU kernel gathers A and B once per token, and reads the index -1 of a base-model row as the last slot.
Here rows that belong to no adapter keep their values. Notation: T rows of the batch, S slots, n the span of slots in
use, J packed projections of a layer (3 for qkv, 2 for gate and up), R the padded rank, I and O input and output
features.

Two ways through a layer, chosen by the batch:

masked   (decode, many adapters) one product x @ A for all slots in use at once, the parts that belong to another slot
         than a row's own are set to 0 by selection, then one product with B per projection: 1 + J products.
grouped  (prefill, or one adapter) 2 products per adapter and projection over that adapter's rows only.

Selection, never multiplication by 0: an overflow under one tenant's adapter must not become a NaN in another's row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUPED_FROM_ROWS = 256
"""Rows from which the products over each adapter's own rows replace one product for all slots: many rows of one adapter
are not worth computing for every slot."""


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Which rows of the batch belong to which slot.

    slots    slots in use, ascending
    rows     per slot in use: a slice where its rows are contiguous, else their int64 indices
    foreign  bool [T, n, 1, 1] over the span of slots: True where the row is not the slot's; None when grouped
    """

    size: int
    slots: tuple[int, ...]
    rows: tuple[slice | torch.Tensor, ...]
    foreign: torch.Tensor | None

    @property
    def span(self) -> slice:
        return slice(self.slots[0], self.slots[-1] + 1)

    @classmethod
    def of(cls, slot_of_row_T: torch.Tensor) -> BatchRows:
        """slot_of_row_T: int64 [T], -1 for rows of the base model."""
        size = slot_of_row_T.shape[0]
        slots = tuple(s for s in torch.unique(slot_of_row_T).tolist() if s >= 0)
        rows = tuple(_as_slice((slot_of_row_T == s).nonzero()[:, 0]) for s in slots)
        foreign = None
        if len(slots) > 1 and size < GROUPED_FROM_ROWS:
            span_n = torch.arange(slots[0], slots[-1] + 1)
            foreign = (slot_of_row_T[:, None] != span_n[None])[:, :, None, None]
        return cls(size, slots, rows, foreign)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A layer's LoRA weights of all slots in the layouts that the products want: a [S, J, R, I], b per projection
    [S, R, O]. vLLM's own stacked tensors become views of them, so loading an adapter writes straight into these."""

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]

    @classmethod
    def take_over(cls, a_stacked: tuple[torch.Tensor, ...], b_stacked: tuple[torch.Tensor, ...]) -> PackedLayer:
        """a_stacked: J tensors [S, 1, R, I]; b_stacked: J tensors [S, 1, O, R]. Their contents are kept."""
        a = torch.cat(a_stacked, dim=1)
        slots, projections, rank, inputs = a.shape
        for j, stacked in enumerate(a_stacked):
            strides = (projections * rank * inputs, rank * inputs, inputs, 1)
            stacked.set_(a.untyped_storage(), j * rank * inputs, (slots, 1, rank, inputs), strides)
        b = tuple(stacked.squeeze(1).transpose(1, 2).contiguous() for stacked in b_stacked)
        for stacked, packed in zip(b_stacked, b, strict=True):
            rank, outputs = packed.shape[1:]
            strides = (rank * outputs, rank * outputs, 1, outputs)
            stacked.set_(packed.untyped_storage(), 0, (slots, 1, outputs, rank), strides)
        return cls(a, b)


def add_lora(
    y: torch.Tensor, x: torch.Tensor, layer: PackedLayer, scale: float, outputs: tuple[int, ...], batch: BatchRows
) -> None:
    """y [T, sum of outputs] += scale · x [T, I] @ A @ B, each row with its own slot's A and B, in place."""
    y_J = torch.split(y[: batch.size], list(outputs), dim=1)
    if batch.foreign is None:
        _add_grouped(y_J, x[: batch.size], layer, scale, batch)
    else:
        _add_masked(y_J, x[: batch.size], layer, scale, batch.span, batch.foreign)


def _add_masked(
    y_J: tuple[torch.Tensor, ...],
    x_TI: torch.Tensor,
    layer: PackedLayer,
    scale: float,
    span: slice,
    foreign: torch.Tensor,
) -> None:
    a = layer.a[span]
    n, projections, rank, inputs = a.shape
    hidden = (x_TI @ a.view(-1, inputs).t()).view(-1, n, projections, rank)
    hidden.masked_fill_(foreign, 0)
    for j, (y, b) in enumerate(zip(y_J, layer.b, strict=True)):
        y.addmm_(hidden[:, :, j].reshape(-1, n * rank), b[span].view(n * rank, -1), alpha=scale)


def _add_grouped(
    y_J: tuple[torch.Tensor, ...], x_TI: torch.Tensor, layer: PackedLayer, scale: float, batch: BatchRows
) -> None:
    for slot, rows in zip(batch.slots, batch.rows, strict=True):
        rank, inputs = layer.a.shape[2:]
        x = x_TI[rows] if isinstance(rows, slice) else x_TI.index_select(0, rows)
        hidden = x @ layer.a[slot].view(-1, inputs).t()
        for j, (y, b) in enumerate(zip(y_J, layer.b, strict=True)):
            hidden_j = hidden[:, j * rank : (j + 1) * rank]
            if isinstance(rows, slice):
                y[rows].addmm_(hidden_j, b[slot], alpha=scale)
            else:
                y.index_add_(0, rows, hidden_j @ b[slot], alpha=scale)


def _as_slice(rows: torch.Tensor) -> slice | torch.Tensor:
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == rows.shape[0] else rows
