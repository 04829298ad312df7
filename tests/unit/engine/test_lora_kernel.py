"""The compiled LoRA kernel against the plain loop over rows, for any mix of adapters, ranks and rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clora_engine.errors import EngineError
from clora_engine.vllm_plugin import lora_kernel
from clora_engine.vllm_plugin.lora_kernel import BatchRows, LoraKernel, PackedLayer, Stacked

SLOTS = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SHAPES = [
    (6, (5, 2, 2), 3),  # smaller than a vector
    (64, (64, 32, 32), 8),
    (90, (130, 130), 7),  # no multiple of anything
    (48, (80,), 1),
]


@pytest.fixture(scope="module", params=["native", "x86-64-v3", "x86-64-v2"])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoraKernel:
    """For this machine's CPU, and for such as have narrower vectors, and fewer."""
    if request.param == "native":
        return LoraKernel(lora_kernel.library())
    flags = [f"-march={request.param}" if flag == "-march=native" else flag for flag in lora_kernel.FLAGS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_kernel, "FLAGS", flags)
        return LoraKernel(lora_kernel.build(tmp_path_factory.mktemp(request.param)))


def stacked(
    seed: int, inputs: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32
) -> tuple[Stacked, Stacked]:
    """vLLM's tensors of one layer; slot s has true rank 1 + s % rank, slot 3 nothing on the first projection."""
    generator = torch.Generator().manual_seed(seed)
    a = tuple((torch.randn(SLOTS, 1, rank, inputs, generator=generator) / inputs**0.5).to(dtype) for _ in outputs)
    b = tuple((torch.randn(SLOTS, 1, out, rank, generator=generator) / rank**0.5).to(dtype) for out in outputs)
    for slot in range(SLOTS):
        for tensor in a:
            tensor[slot, :, 1 + slot % rank :] = 0
        for tensor in b:
            tensor[slot, :, :, 1 + slot % rank :] = 0
    a[0][3] = 0
    b[0][3] = 0
    return a, b


def by_rows(x: torch.Tensor, a: Stacked, b: Stacked, scale: float, slot_of_row: list[int]) -> torch.Tensor:
    """float64 [T, sum of outputs]: what the adapters add."""
    rows = []
    for row, slot in zip(x.double(), slot_of_row, strict=True):
        deltas = [b_j[slot, 0].double() @ (a_j[slot, 0].double() @ row) for a_j, b_j in zip(a, b, strict=True)]
        rows.append(torch.cat(deltas) * (scale if slot >= 0 else 0))
    return torch.stack(rows)


def batch(slots: list[int]) -> BatchRows:
    return BatchRows(np.array(slots, dtype=np.int64))


@settings(max_examples=120, deadline=None)
@given(
    slot_of_row=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=20),
    repeat=st.sampled_from([1, 3, 70]),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1.0, 0.5]),
    seed=st.integers(0, 9),
)
def test_every_row_gets_its_own_adapter(
    kernel: LoraKernel,
    slot_of_row: list[int],
    repeat: int,
    shape: tuple[int, tuple[int, ...], int],
    dtype: torch.dtype,
    scale: float,
    seed: int,
) -> None:
    """Decode (few rows) and prefill (many), contiguous and scattered rows, with and without base-model rows."""
    inputs, outputs, rank = shape
    slots = [slot for slot in slot_of_row for _ in range(repeat)]
    a, b = stacked(seed, inputs, outputs, rank, dtype)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(slots), inputs, generator=generator).to(dtype)
    y = torch.randn(len(slots), sum(outputs), generator=generator).to(dtype)
    before = y.clone()
    expected = y.double() + by_rows(x, a, b, scale, slots)
    kernel.add(y, x, PackedLayer(a, b), scale, batch(slots))
    torch.testing.assert_close(y.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    of_base = torch.tensor(slots) < 0
    assert torch.equal(y[of_base], before[of_base])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(kernel: LoraKernel, dtype: torch.dtype) -> None:
    """Bit for bit: alone, beside others of its own adapter or of others, at any place in the batch."""
    inputs, outputs, rank = 90, (130, 70), 7
    layer = PackedLayer(*stacked(0, inputs, outputs, rank, dtype))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, inputs, generator=generator).to(dtype)
    slots = torch.randint(-1, SLOTS, (200,), generator=generator).tolist()
    together = torch.zeros(200, sum(outputs), dtype=dtype)
    kernel.add(together, x, layer, 1.0, batch(slots))
    for row, slot in enumerate(slots):
        alone = torch.zeros(1, sum(outputs), dtype=dtype)
        kernel.add(alone, x[row : row + 1], layer, 1.0, batch([slot]))
        assert torch.equal(alone[0], together[row])


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, outputs, rank = 576, (576, 192, 192), 8
    layer = PackedLayer(*stacked(0, inputs, outputs, rank))
    x = torch.randn(64, inputs, generator=torch.Generator().manual_seed(0))
    results = []
    monkeypatch.setattr(lora_kernel, "FORK_FROM_BYTES", 0)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        y = torch.zeros(64, sum(outputs))
        LoraKernel(lora_kernel.library()).add(y, x, layer, 1.0, batch([0, 1, 2, 3] * 16))
        results.append(y)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_layer_keeps_the_weights_and_sees_what_is_loaded_later(kernel: LoraKernel) -> None:
    """Also an adapter of a higher rank than the one before it in the slot."""
    inputs, outputs, rank = 64, (64, 32, 32), 8
    a, b = stacked(0, inputs, outputs, rank)
    before = [t.clone() for t in a + b]
    layer = PackedLayer(a, b)
    for tensor, old in zip(a + b, before, strict=True):
        assert torch.equal(tensor, old)
    x = torch.randn(4, inputs, generator=torch.Generator().manual_seed(0))
    kernel.add(torch.zeros(4, sum(outputs)), x, layer, 1.0, batch([1] * 4))
    full_a, full_b = stacked(1, inputs, outputs, rank)
    for j in range(len(outputs)):
        a[j][1] = full_a[j][3]
        b[j][1] = full_b[j][3]
    layer.forget([1])
    y = torch.zeros(4, sum(outputs))
    kernel.add(y, x, layer, 1.0, batch([1] * 4))
    torch.testing.assert_close(y.double(), by_rows(x, full_a, full_b, 1.0, [3] * 4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [4, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_adapters_overflow_stays_in_its_own_rows(kernel: LoraKernel, rows: int, dtype: torch.dtype) -> None:
    """x @ A of slot 0 is infinite, and its B holds a NaN: rows of slot 1 and of the base model must stay finite."""
    inputs, outputs, rank = 64, (64, 32, 32), 8
    a, b = stacked(1, inputs, outputs, rank, dtype)
    a[0][0] = 3e38
    b[1][0, 0, 0, 0] = float("nan")
    slots = [0, 1, -1, 1] * (rows // 4)
    x = torch.full((rows, inputs), 10.0, dtype=dtype)
    y = torch.zeros(rows, sum(outputs), dtype=dtype)
    kernel.add(y, x, PackedLayer(a, b), 1.0, batch(slots))
    others = torch.tensor(slots) != 0
    assert torch.isfinite(y[others]).all()
    assert not torch.isfinite(y[~others, :64]).any()
    assert torch.isnan(y[~others, 64]).all()


def test_rows_that_the_batch_does_not_know_keep_their_values(kernel: LoraKernel) -> None:
    """vLLM may pad a batch."""
    inputs, outputs, rank = 64, (64, 32, 32), 8
    y = torch.zeros(6, sum(outputs))
    kernel.add(y, torch.ones(6, inputs), PackedLayer(*stacked(2, inputs, outputs, rank)), 1.0, batch([1, 2, 1, 2]))
    assert torch.equal(y[4:], torch.zeros(2, sum(outputs)))
    assert bool((y[:4] != 0).any())


def test_a_library_that_was_tidied_away_is_made_again() -> None:
    first = lora_kernel.library()
    assert lora_kernel.library() == first
    shutil.rmtree(first.parent)
    again = lora_kernel.library()
    assert again.exists()
    LoraKernel(again)


@pytest.mark.parametrize("shape", [(3, 64), (5, 63)])
def test_rows_or_features_that_do_not_match_are_never_computed(kernel: LoraKernel, shape: tuple[int, int]) -> None:
    layer = PackedLayer(*stacked(0, 64, (64, 32, 32), 8))
    with pytest.raises(AssertionError):
        kernel.add(torch.zeros(5, 128), torch.zeros(shape), layer, 1.0, batch([0] * 5))


def test_without_a_compiler_the_sampler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EngineError, match=r"no C\+\+ compiler 'no-such-compiler'.*install g\+\+") as caught:
        lora_kernel.build(tmp_path)
    assert caught.value.reason == "SamplerUnavailable"


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(EngineError, match="could not compile the LoRA kernel: it is broken"):
        lora_kernel.build(tmp_path)
