"""Log-probs of given tokens from hidden states, through a frozen output head, without keeping logits.

The head is frozen and each token needs one log-prob, so the gradient to a hidden state h is the incoming scalar times a
vector that is known in the forward pass already: d log p(t) / dh = (W[t] - Σᵥ p(v) W[v]) / temperature. The forward
pass computes it chunk by chunk and keeps only that (T x D), where autograd would keep logits and softmax (T x V) and
work through them a second time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

CHUNK_ELEMENTS = 1 << 24  # logits in flight: 64 MiB in FP32


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_T: Tensor,
        temperature_T: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        chunk = max(1, CHUNK_ELEMENTS // weight_VD.shape[0])
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        logprobs_T = torch.empty(target_T.shape, dtype=wide, device=hidden_TD.device)
        entropies_T = torch.empty_like(logprobs_T)
        directions_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        for start in range(0, len(target_T), chunk):
            part = slice(start, start + chunk)
            logits_TV = functional.linear(hidden_TD[part], weight_VD, bias_V).to(wide)
            if temperature_T is not None:
                logits_TV /= temperature_T[part, None]
            partition_T1 = logits_TV.logsumexp(-1, keepdim=True)
            chosen_T1 = target_T[part, None]
            logprobs_T[part] = (logits_TV.gather(1, chosen_T1) - partition_T1)[:, 0]
            probs_TV = (logits_TV - partition_T1).exp_()
            entropies_T[part] = partition_T1[:, 0] - torch.linalg.vecdot(probs_TV, logits_TV)
            if directions_TD is not None:
                probs_TV.scatter_add_(1, chosen_T1, torch.full_like(partition_T1, -1.0))
                torch.matmul(probs_TV.to(hidden_TD.dtype), weight_VD, out=directions_TD[part])
        if directions_TD is not None:
            divisor = -1.0 if temperature_T is None else -temperature_T[:, None]
            ctx.save_for_backward(directions_TD.div_(divisor))
        ctx.mark_non_differentiable(entropies_T)
        return logprobs_T, entropies_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        (directions_TD,) = ctx.saved_tensors
        return (grad_T[:, None] * directions_TD).to(directions_TD.dtype), None, None, None, None


def token_logprobs(
    hidden_TD: Tensor, head: nn.Linear, target_T: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p, where p = softmax(head(hidden) / temperature).

    hidden_TD in the model's dtype, target_T int64, temperature one for all or one per token (T, on the CPU). Returns
    logprobs_T (differentiable once in hidden_TD) and entropies_T (not differentiable), both nats, FP32 at least.
    """
    temperatures = torch.as_tensor(temperature, dtype=torch.promote_types(hidden_TD.dtype, torch.float32))
    # Division by one is exact: leaving it out saves a pass over the logits and changes no bit.
    ones = bool((temperatures == 1.0).all())
    temperature_T = None if ones else temperatures.expand(target_T.shape).to(hidden_TD.device)
    result: tuple[Tensor, Tensor] = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_TD, head.weight, head.bias, target_T, temperature_T
    )
    return result
