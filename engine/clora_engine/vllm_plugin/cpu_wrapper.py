"""clora's LoRA kernel (`lora_kernel.py`) in the place where vLLM's CPU platform looks for one.

Left out, because the sampler keeps vLLM from wrapping such layers: LoRA on embeddings and on the output head, fully
sharded LoRA. They raise.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from clora_engine.vllm_plugin import KERNEL
from clora_engine.vllm_plugin.lora_kernel import BatchRows, LoraKernel, PackedLayer


class KernelPunicaWrapper(PunicaWrapperCPU):
    """vLLM's per-model LoRA kernel object: told once per batch which row uses which slot, then called by each layer."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._kernel = LoraKernel(Path(os.environ[KERNEL]))
        self._batch = BatchRows(np.empty(0, dtype=np.int64))
        self._layers: dict[int, PackedLayer] = {}
        self._slots: list[int | None] = []

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        if lora_index_to_id != self._slots:
            self._forget_changed(lora_index_to_id)
        self._batch = BatchRows(self.token_lora_indices.numpy())

    def _forget_changed(self, slots: list[int | None]) -> None:
        """An id stands for the same weights for ever, so only a slot with another id holds others."""
        before = self._slots or [None] * len(slots)
        changed = [i for i, (old, new) in enumerate(zip(before, slots, strict=True)) if old != new]
        for layer in self._layers.values():
            layer.forget(changed)
        self._slots = list(slots)

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
        if not self._batch.struct.count:
            return
        layer = self._layers.get(lora_b_stacked[0].data_ptr())
        if layer is None:
            layer = PackedLayer(lora_a_stacked, lora_b_stacked)
            self._layers[lora_b_stacked[0].data_ptr()] = layer
        self._kernel.add(y, x, layer, scale, self._batch)

    def add_shrink(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("fully sharded LoRA is not supported on the CPU")

    def add_expand(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("fully sharded LoRA is not supported on the CPU")

    def add_lora_embedding(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("LoRA on embeddings is not supported on the CPU")

    def add_lora_logits(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("LoRA on the output head is not supported on the CPU")
