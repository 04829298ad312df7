"""The LoRA layers: products over the segments of several adapters, one after the other and grouped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clora_engine.trainer_lora import GroupedProduct, LoraLinear, Pass, Segment, SegmentProduct


def tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("input_gradient", [False, True])
def test_one_adapter(bias: bool, input_gradient: bool) -> None:
    torch.manual_seed(3)
    base = nn.Linear(5, 4, bias=bias, dtype=torch.float64).requires_grad_(False)
    current = Pass()
    current.segments = (Segment(0, 0, 6),)
    layer = LoraLinear(base, current)
    x = tensor(2, 3, 5, seed=1, grad=input_gradient)
    assert torch.equal(layer(x), base(x))
    a, b = tensor(2, 5, seed=2), tensor(4, 2, seed=3)

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        layer.bind([(a, b, 1.5)])
        out: Tensor = layer(x)
        return out

    torch.testing.assert_close(run(x, a, b), base(x) + 1.5 * (x @ a.T) @ b.T)
    assert torch.autograd.gradcheck(run, (x, a, b))
    layer.bind([None])
    assert torch.equal(layer(x), base(x))


def test_each_segment_has_its_own_adapter_and_some_have_none() -> None:
    base = nn.Linear(5, 4, dtype=torch.float64).requires_grad_(False)
    current = Pass()
    current.segments = (Segment(0, 0, 3), Segment(1, 3, 6), Segment(2, 6, 12))
    layer = LoraLinear(base, current)
    x = tensor(4, 3, 5, seed=1)
    a0, b0, a2, b2 = tensor(2, 5, seed=2), tensor(4, 2, seed=3), tensor(3, 5, seed=4), tensor(4, 3, seed=5)

    def run(x: Tensor, *matrices: Tensor) -> Tensor:
        layer.bind([(matrices[0], matrices[1], 1.5), None, (matrices[2], matrices[3], 0.5)])
        out: Tensor = layer(x)
        return out

    out = run(x, a0, b0, a2, b2)
    torch.testing.assert_close(out[0], base(x[0]) + 1.5 * (x[0] @ a0.T) @ b0.T)
    assert torch.equal(out[1], base(x)[1])
    torch.testing.assert_close(out[2:], base(x[2:]) + 0.5 * (x[2:] @ a2.T) @ b2.T)
    assert torch.autograd.gradcheck(run, (x, a0, b0, a2, b2))


def both(
    lengths: list[int], ranks: list[int], dtype: torch.dtype, device: str, *, poisoned: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of the products, first one after the other, then grouped."""
    inputs, outputs = 24, 16
    stops = torch.tensor(lengths).cumsum(0)
    bounds = tuple(
        (int(stop) - length, int(stop), 0.5 + n)
        for n, (stop, length) in enumerate(zip(stops, lengths, strict=True))
    )  # fmt: skip
    found = []
    for product in (SegmentProduct, GroupedProduct):
        weight = tensor(outputs, inputs, seed=1, dtype=dtype, grad=False).to(device)
        leaves = [tensor(1, sum(lengths), inputs, seed=2, dtype=dtype)]
        for n, rank in enumerate(ranks):
            leaves += [tensor(rank, inputs, seed=10 + n, dtype=dtype), tensor(outputs, rank, seed=20 + n, dtype=dtype)]
        if poisoned:
            leaves[-1].data.fill_(float("nan"))
        x, *matrices = (leaf.to(device) for leaf in leaves)
        out = product.apply(x, weight, None, stops.to(torch.int32).to(device), bounds, *matrices)
        grad = tensor(1, sum(lengths), outputs, seed=3, dtype=dtype, grad=False).to(device)
        found.append([out.detach(), *torch.autograd.grad(out, [x, *matrices], grad)])
    return found[0], found[1]


def assert_agree(one: list[Tensor], other: list[Tensor], dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for ours, theirs in zip(one, other, strict=True):
        scale = float(theirs.float().nan_to_num().abs().max()) + 1e-6
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=tolerance, equal_nan=True)


@settings(deadline=None, max_examples=20)
@given(
    segments=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([8, 16])), min_size=2, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_grouped_products_are_those_of_one_segment_after_the_other(
    segments: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    lengths, ranks = [length for length, _ in segments], [rank for _, rank in segments]
    assert_agree(*both(lengths, ranks, dtype, "cpu"), dtype)


@pytest.mark.parametrize("grouped", [0, 1])
def test_what_is_not_a_number_stays_in_its_segment(grouped: int) -> None:
    clean = both([5, 7], [8, 8], torch.float32, "cpu")[grouped]
    poisoned = both([5, 7], [8, 8], torch.float32, "cpu", poisoned=True)[grouped]
    assert torch.equal(poisoned[0][:, :5], clean[0][:, :5])
    assert torch.equal(poisoned[1][:, :5], clean[1][:, :5])
    assert poisoned[0][:, 5:].isnan().all()
    for ours, theirs in zip(poisoned[2:4], clean[2:4], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[64, 64, 64], [5, 130, 17, 33]])
def test_grouped_products_on_a_gpu(lengths: list[int]) -> None:
    ranks: Any = [8, 16, 8, 32][: len(lengths)]
    assert_agree(*both(lengths, ranks, torch.bfloat16, "cuda"), torch.bfloat16)
