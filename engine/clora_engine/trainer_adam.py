"""AdamW over one adapter's flat vectors, with clipping by the global norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from clora_engine.errors import UserError
from clora_engine.types import AdamParams

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def check_adam(adam: AdamParams) -> None:
    """Raises UserError for AdamW settings without meaning."""
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        value = getattr(adam, name)
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"adam.{name} is {value}; it must be a finite number of at least 0", field=f"adam.{name}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(adam, name) < 1:
            raise UserError(f"adam.{name} is {getattr(adam, name)}; it must be in [0, 1)", field=f"adam.{name}")
    if not (math.isfinite(adam.eps) and adam.eps > 0):
        # At 0 the padding's update would be 0/0.
        raise UserError(f"adam.eps is {adam.eps}; it must be a finite number above 0", field="adam.eps")


@torch.no_grad()
def adam_step(
    master_P: Tensor, grad_P: Tensor, exp_avg_P: Tensor, exp_avg_sq_P: Tensor, step: int, adam: AdamParams
) -> tuple[float, bool]:
    """One step in place (FP32; Loshchilov and Hutter 2019, 1711.05101): the gradient's norm before clipping, and
    whether it was finite. Otherwise nothing is changed. `step`: steps made so far. The gradient is spent."""
    norm = float(torch.linalg.vector_norm(grad_P))
    if not math.isfinite(norm):
        return norm, False
    if 0 < adam.grad_clip_norm < norm:
        grad_P.mul_(adam.grad_clip_norm / (norm + CLIP_EPS))
    adamw(
        [master_P],
        [grad_P],
        [exp_avg_P],
        [exp_avg_sq_P],
        [],
        [torch.tensor(float(step), device=master_P.device)],
        fused=True,
        amsgrad=False,
        maximize=False,
        lr=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
    )
    return norm, True
