"""The grouped LoRA products against the plain loop over rows, for any mix of adapters, ranks and rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clora_engine.vllm_plugin.grouped import GROUPED_FROM_ROWS, BatchRows, PackedLayer, add_lora

SLOTS, RANK, INPUTS, OUTPUTS = 4, 3, 6, (5, 2, 2)

Stacked = tuple[torch.Tensor, ...]


def stacked(seed: int) -> tuple[Stacked, Stacked]:
    """vLLM's tensors of one layer: three packed projections, slot s with true rank 1 + s % 3."""
    generator = torch.Generator().manual_seed(seed)
    a = tuple(torch.randn(SLOTS, 1, RANK, INPUTS, generator=generator) for _ in OUTPUTS)
    b = tuple(torch.randn(SLOTS, 1, out, RANK, generator=generator) for out in OUTPUTS)
    for slot in range(SLOTS):
        for tensor in a:
            tensor[slot, :, 1 + slot % 3 :] = 0
        for tensor in b:
            tensor[slot, :, :, 1 + slot % 3 :] = 0
    return a, b


def by_rows(x: torch.Tensor, a: Stacked, b: Stacked, scale: float, slot_of_row: list[int]) -> torch.Tensor:
    rows = []
    for row, slot in zip(x, slot_of_row, strict=True):
        deltas = [b[j][slot, 0] @ (a[j][slot, 0] @ row) for j in range(len(OUTPUTS))]
        rows.append(torch.cat(deltas) * (scale if slot >= 0 else 0))
    return torch.stack(rows)


@settings(max_examples=80, deadline=None)
@given(
    slot_of_row=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=12),
    repeat=st.sampled_from([1, GROUPED_FROM_ROWS]),
    scale=st.sampled_from([1.0, 0.5]),
    seed=st.integers(0, 9),
)
def test_every_row_gets_its_own_adapter(slot_of_row: list[int], repeat: int, scale: float, seed: int) -> None:
    """Decode (few rows) and prefill (many), contiguous and scattered rows, with and without base-model rows."""
    slots = [slot for slot in slot_of_row for _ in range(repeat)]
    a, b = stacked(seed)
    x = torch.randn(len(slots), INPUTS, generator=torch.Generator().manual_seed(seed))
    y = torch.ones(len(slots), sum(OUTPUTS))
    expected = y + by_rows(x, a, b, scale, slots)
    layer = PackedLayer.take_over(a, b)
    add_lora(y, x, layer, scale, OUTPUTS, BatchRows.of(torch.tensor(slots)))
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(y[torch.tensor(slots) < 0], torch.ones_like(y)[torch.tensor(slots) < 0])


def test_the_layer_keeps_the_weights_and_sees_what_is_loaded_later() -> None:
    a, b = stacked(0)
    before = [t.clone() for t in a + b]
    layer = PackedLayer.take_over(a, b)
    for tensor, old in zip(a + b, before, strict=True):
        assert torch.equal(tensor, old)
    a[1][2] = 7.0
    b[2][2, 0, 1] = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(layer.a[2, 1], torch.full((RANK, INPUTS), 7.0))
    assert torch.equal(layer.b[2][2, :, 1], torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("rows", [4, 4 * GROUPED_FROM_ROWS])
def test_one_adapters_overflow_stays_in_its_own_rows(rows: int) -> None:
    """x @ A of slot 0 is infinite: rows of slot 1 and of the base model must not become NaN."""
    a, b = stacked(1)
    a[0][0] = 3e38
    slots = [0, 1, -1, 1] * (rows // 4)
    x = torch.full((rows, INPUTS), 10.0)
    y = torch.zeros(rows, sum(OUTPUTS))
    layer = PackedLayer.take_over(a, b)
    add_lora(y, x, layer, 1.0, OUTPUTS, BatchRows.of(torch.tensor(slots)))
    others = torch.tensor(slots) != 0
    assert torch.isfinite(y[others]).all()
    assert not torch.isfinite(y[~others]).all()


def test_rows_that_the_batch_does_not_know_keep_their_values() -> None:
    """vLLM may pad a batch."""
    a, b = stacked(2)
    y = torch.zeros(6, sum(OUTPUTS))
    layer = PackedLayer.take_over(a, b)
    add_lora(y, torch.ones(6, INPUTS), layer, 1.0, OUTPUTS, BatchRows.of(torch.tensor([1, 2, 1, 2])))
    assert torch.equal(y[4:], torch.zeros(2, sum(OUTPUTS)))
    assert bool((y[:4] != 0).any())
