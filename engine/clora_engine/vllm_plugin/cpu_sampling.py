"""How a token is drawn on vLLM's CPU platform: by inversion of the cumulative distribution.

vLLM's own kernel draws noise for each token of the vocabulary and takes the largest sum (Gumbel-max): ten times the
work of the log-softmax that is needed anyway. Here, for a draw from the same distribution, a row costs one random
number and two passes over its probabilities. The row alone and its number decide what is drawn, whatever else is in the
batch.

Shapes: B rows of the batch, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

BLOCK = 256  # tokens whose probabilities are summed before one of them is looked for

Forward = Callable[[Any, Tensor, Mapping[int, torch.Generator], Tensor | None, Tensor | None], tuple[Any, Any]]


def install() -> None:
    """Takes the place of vLLM's own; samplers that are made afterwards draw by it."""
    TopKTopPSampler.forward_cpu = _in_place_of(TopKTopPSampler.forward_cpu)


def _in_place_of(stock: Forward) -> Forward:
    def forward_cpu(
        self: Any,
        logits: Tensor,
        generators: Mapping[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Any, Any]:
        """logits [B, V], temperature included. Tokens int64 [B], and their log-probs float32 [B, V]."""
        if self.logprobs_mode != "processed_logprobs" or self.use_fp64_gumbel:
            return stock(self, logits, generators, k, p)
        logprobs_BV = apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
        uniform_B = torch.rand(len(logits), dtype=torch.float64)
        for row, generator in generators.items():
            uniform_B[row] = torch.rand((), dtype=torch.float64, generator=generator)
        return draw(logprobs_BV, uniform_B), logprobs_BV

    return forward_cpu


def draw(logprobs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Tokens, int64 [B]: the first whose cumulative probability is above the row's number.

    logprobs_BV: float32; -inf is never drawn. uniform_B: float64 in [0, 1). A row that is not finite gives some token.
    """
    probs_BV = logprobs_BV.exp()
    vocabulary = probs_BV.shape[1]
    whole = vocabulary - vocabulary % BLOCK
    sums = [probs_BV[:, :whole].view(len(probs_BV), -1, BLOCK).sum(-1)] if whole else []
    if whole < vocabulary:
        sums.append(probs_BV[:, whole:].sum(-1, keepdim=True))
    block_B, within_B = _find(torch.cat(sums, 1), uniform_B)
    columns = block_B[:, None] * BLOCK + torch.arange(BLOCK)
    inside = probs_BV.gather(1, columns.clamp(max=vocabulary - 1)).masked_fill_(columns >= vocabulary, 0.0)
    offset_B, _ = _find(inside, within_B)
    return (block_B * BLOCK + offset_B).clamp_(max=vocabulary - 1)


def _find(weights_BN: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """The entry that a number in [0, 1) falls on, when each is as wide as its weight, and where in it, in [0, 1)."""
    ends_BN = weights_BN.double().cumsum(-1)
    total_B = ends_BN[:, -1]
    target_B = torch.minimum(uniform_B * total_B, total_B.nextafter(torch.zeros_like(total_B)))
    index_B1 = torch.searchsorted(ends_BN, target_B[:, None], right=True).clamp_(max=weights_BN.shape[1] - 1)
    end_B = ends_BN.gather(1, index_B1)[:, 0]
    start_B = torch.where(index_B1[:, 0] > 0, ends_BN.gather(1, (index_B1 - 1).clamp(min=0))[:, 0], 0.0)
    return index_B1[:, 0], (target_B - start_B) / (end_B - start_B)
