"""A frozen base model that does not fit one device: FSDP2 over the decoder layers, the adapters outside it.

Each rank keeps a part of every decoder layer and gathers a whole layer just before it is computed, forward and backward
(Zhao et al. 2023, arXiv:2304.11277; torch.distributed.fsdp.fully_shard). Nothing is reduced, for nothing of the base
model has a gradient. Embeddings, norms outside the layers and the output head stay whole on every rank: the head is
read directly (trainer_logprobs.py).

To gather a layer is a collective, so ranks must come to the same layers in the same order. Every rank computes as many
micro-batches (trainer_packing.EMPTY), and every backward pass goes through all layers, whichever are trained: the
embeddings' output asks for a gradient. Before each layer all ranks check that none has failed; when one has, none waits
for it in a collective. The exception: memory that runs out in gathering itself, between the check and the collective,
leaves the others waiting until the collective's time-out, which ends the trainer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from clora_engine.errors import UserError
from clora_engine.trainer_ranks import Ranks


def shard(model: Any, ranks: Ranks, device: torch.device) -> None:
    """Shards a transformers causal LM over all ranks, in place, and moves it to their devices layer by layer.

    Raises UserError when its decoder layers cannot be told.
    """
    layers = decoder_layers(model)
    if not layers:
        raise UserError("the base model's architecture cannot be sharded", field="trainer.shardBase")
    model.requires_grad_(False)
    model.enable_input_require_grads()
    mesh = init_device_mesh(device.type, (ranks.size,))

    def check(*_: object) -> None:
        ranks.check()

    def check_backward(_: nn.Module, __: object, output: Any) -> None:
        # A hook of an output runs before those that were registered after it: here before FSDP gathers the layer.
        hidden: Tensor = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(check)  # type: ignore[no-untyped-call]

    for layer in layers:
        layer.register_forward_hook(check_backward)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        layer.register_forward_pre_hook(check, prepend=True)
    decoder = model.base_model
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    whole = {parameter for parameter in decoder.parameters() if id(parameter) not in inside}
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    model.to(device)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model that are computed one after another."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recover(decoder: nn.Module) -> None:
    """After a pass that raised: frees gathered layers, so that the next pass begins as the first did."""
    if isinstance(decoder, FSDPModule):
        decoder.reset_iter_state()
