"""The grouped LoRA products (`grouped.py`) in the place where vLLM's CPU platform looks for its LoRA kernel.

Left out, because the sampler keeps vLLM from wrapping such layers: LoRA on embeddings and on the output head, fully
sharded LoRA. They raise.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from clora_engine.vllm_plugin.grouped import BatchRows, PackedLayer, add_lora


class GroupedPunicaWrapper(PunicaWrapperCPU):
    """vLLM's per-model LoRA kernel object: told once per batch which row uses which slot, then called by each layer."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._batch = BatchRows(0, (), (), None)
        self._layers: dict[int, PackedLayer] = {}

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        self._batch = BatchRows.of(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """y [T, sum of O] += scale · x [T, I] @ A @ B, each row with its own slot's A and B, in place."""
        batch = self._batch
        if not batch.slots:
            return
        layer = self._layers.get(lora_b_stacked[0].data_ptr())
        if layer is None:
            layer = PackedLayer.take_over(lora_a_stacked, lora_b_stacked)
            self._layers[lora_b_stacked[0].data_ptr()] = layer
        add_lora(y, x, layer, scale, output_slices, batch)

    def add_shrink(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("fully sharded LoRA is not supported on the CPU")

    def add_expand(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("fully sharded LoRA is not supported on the CPU")

    def add_lora_embedding(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("LoRA on embeddings is not supported on the CPU")

    def add_lora_logits(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("LoRA on the output head is not supported on the CPU")
