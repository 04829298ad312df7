"""Drawing tokens on a CPU: each with its probability, by its row and its number alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clora_engine.vllm_plugin.cpu_sampling import BLOCK, _in_place_of, draw

LAST = 1 - 2.0**-53  # the largest number that a generator gives
SIZES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17]


def rows(count: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(count, vocabulary, generator=generator)).log_softmax(-1)


@pytest.mark.parametrize("vocabulary", SIZES)
def test_a_token_is_drawn_where_its_cumulative_probability_lies(vocabulary: int) -> None:
    logprobs = rows(1, vocabulary)
    uniform = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1]
    drawn = draw(logprobs.expand(len(uniform), -1), uniform).numpy()
    ends = np.cumsum(logprobs[0].exp().double().numpy())
    ends /= ends[-1]
    starts = np.concatenate([[0.0], ends[:-1]])
    slack = 1e-6  # the sums of blocks are float32
    assert (starts[drawn] - slack <= uniform.numpy()).all()
    assert (uniform.numpy() <= ends[drawn] + slack).all()
    assert (np.diff(drawn) >= 0).all()


@pytest.mark.parametrize("vocabulary", SIZES)
def test_what_is_impossible_is_never_drawn(vocabulary: int) -> None:
    """Not by the least number, nor by the largest, wherever the possible tokens are."""
    for possible in {0, vocabulary // 2, vocabulary - 1}:
        logprobs = torch.full((3, vocabulary), -torch.inf)
        logprobs[:, possible] = 0.0
        assert draw(logprobs, torch.tensor([0.0, 0.5, LAST], dtype=torch.float64)).tolist() == [possible] * 3
    logprobs = rows(2, vocabulary)
    logprobs[:, ::2] = -torch.inf
    if vocabulary > 1:
        drawn = draw(logprobs.log_softmax(-1), torch.tensor([0.0, LAST], dtype=torch.float64))
        assert (drawn % 2 == 1).all()


def test_frequencies_are_the_probabilities() -> None:
    """Chi-square over 50 tokens that share almost all of the probability; 99.9th percentile of 49 degrees: 85.4."""
    vocabulary, count = 2 * BLOCK + 5, 40_000
    logits = torch.full((vocabulary,), -20.0)
    logits[::11][:50] = torch.linspace(-2, 2, len(logits[::11][:50]))
    logprobs = logits.log_softmax(-1)
    uniform = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = draw(logprobs.expand(count, -1), uniform)
    observed = torch.bincount(drawn, minlength=vocabulary).double()
    expected = logprobs.exp().double() * count
    likely = expected > 5
    assert 40 < likely.sum() <= 50
    assert ((observed - expected)[likely] ** 2 / expected[likely]).sum() < 85.4


def test_a_row_gives_the_same_beside_any_others() -> None:
    logprobs = rows(7, 3 * BLOCK + 17)
    uniform = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    alone = [draw(logprobs[i : i + 1], uniform[i : i + 1]).item() for i in range(7)]
    assert draw(logprobs, uniform).tolist() == alone


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    logprobs = rows(3, BLOCK + 1)
    uniform = torch.full((3,), 0.5, dtype=torch.float64)
    before = draw(logprobs, uniform)
    logprobs[1] = torch.nan
    after = draw(logprobs, uniform)
    assert after[[0, 2]].tolist() == before[[0, 2]].tolist()
    assert 0 <= after[1] <= BLOCK


def test_a_seeded_row_draws_from_its_own_generator() -> None:
    forward = _in_place_of(stock)
    sampler = SimpleNamespace(logprobs_mode="processed_logprobs", use_fp64_gumbel=False)
    logits = rows(4, 1000)
    generators = [torch.Generator().manual_seed(9) for _ in range(2)]
    first, logprobs = forward(sampler, logits, {1: generators[0]}, None, None)
    second, _ = forward(sampler, logits[1:2], {0: generators[1]}, None, None)
    assert first[1] == second[0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1))
    assert first.dtype == torch.int64


def test_other_modes_are_left_to_vllm() -> None:
    forward = _in_place_of(stock)
    for mode, fp64 in (("raw_logprobs", False), ("processed_logprobs", True)):
        sampler = SimpleNamespace(logprobs_mode=mode, use_fp64_gumbel=fp64)
        assert forward(sampler, rows(2, 10), {}, None, None) == ("stock", mode)


def stock(sampler: Any, *_: Any) -> tuple[Any, Any]:
    return "stock", sampler.logprobs_mode
