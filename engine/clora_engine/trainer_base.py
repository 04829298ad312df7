"""The frozen base model of a trainer: loaded from safetensors, wrapped for LoRA, checked to be one we train rightly.

The trainer runs the decoder and the output head apart and hands the decoder a mask of its own. Both are right for plain
full-attention decoders and wrong for models that window their attention, keep recurrent state or scale their logits
after the head, so such models are refused by what their configuration says, and every model has to pass a comparison
of the two ways of computing before it is used.

Left out: quantised bases. Models that are spread over several devices: trainer_shard.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clora_engine.errors import UserError
from clora_engine.lora import ModuleShape
from clora_engine.trainer_logprobs import token_logprobs
from clora_engine.trainer_lora import Live, LoraLinear, Pass, bind, shapes, wrap_linears
from clora_engine.trainer_packing import MicroBatch, micro_batches
from clora_engine.trainer_ranks import Ranks
from clora_engine.trainer_shard import decoder_layers, recover, shard
from clora_engine.types import Completion, Row

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Largest difference of log-probs between the two ways of computing that rounding explains.
SELF_TEST_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class BaseModel:
    """A frozen causal LM whose linear layers are wrapped. Shared by all adapters; its weights never change."""

    model: nn.Module
    decoder: nn.Module
    head: nn.Linear
    layers: dict[str, LoraLinear]
    modules: tuple[ModuleShape, ...]
    vocabulary: int
    max_positions: int
    device: torch.device
    current: Pass

    @classmethod
    def wrap(cls, model: Any, *, gradient_checkpointing: bool = False) -> BaseModel:
        """Takes over a transformers causal LM: freezes it, wraps its linear layers and tests it.

        gradient_checkpointing: keeps only the input of each decoder layer and computes the layer again in the backward
        pass (Chen et al. 2016, arXiv:1604.06174): a third more work, the same numbers, far less memory.

        Raises UserError when the model is of a kind that this trainer would train wrongly.
        """
        check_supported(model.config)
        model.requires_grad_(False).eval()
        model.config.use_cache = False
        head = model.get_output_embeddings()
        plain = _SelfTest.plain_logprobs(model)
        if gradient_checkpointing:
            _checkpoint_layers(model)
        current = Pass()
        layers = wrap_linears(model, head, current)
        base = cls(
            model=model,
            decoder=model.base_model,
            head=head,
            layers=layers,
            modules=shapes(layers),
            vocabulary=model.config.vocab_size,
            max_positions=model.config.max_position_embeddings,
            device=head.weight.device,
            current=current,
        )
        _SelfTest.compare(plain, base)
        return base

    def bind(self, adapters: Sequence[Live]) -> None:
        """The adapters of the passes to come; call n of a micro-batch is computed with adapter n."""
        bind(self.layers, adapters)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Around forward and backward passes: after one that raises, the model is as before it."""
        try:
            yield
        except Exception:
            recover(self.decoder)
            raise

    def keep_step(self, batch: MicroBatch) -> None:
        """Computes an EMPTY batch forward and backward, beside ranks that compute theirs."""
        torch.autograd.backward(self.hidden_states(batch).sum())

    def hidden_states(self, batch: MicroBatch) -> Tensor:
        """The decoder's last hidden states, flattened to (B·L, D), under the batch's block mask."""
        self.current.set(batch, self.device)
        output = self.decoder(
            input_ids=batch.ids_BL.to(self.device),
            position_ids=batch.positions_BL.to(self.device),
            attention_mask=batch.visible_BLL[:, None].to(self.device),
        )
        hidden: Tensor = output.last_hidden_state
        return hidden.flatten(0, 1)

    def logprobs(self, batch: MicroBatch, wanted_H: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        """log p and entropy (H) of the tokens `wanted_H` (indices into the batch's T); only these pass the head.
        temperature: one for all, or one for each of them (H, on the CPU)."""
        hidden_HD = self.hidden_states(batch)[batch.source_T[wanted_H].to(self.device)]
        return token_logprobs(hidden_HD, self.head, batch.target_T[wanted_H].to(self.device), temperature)


def load_base(
    path: str, *, dtype: str, device: torch.device, gradient_checkpointing: bool = False, ranks: Ranks | None = None
) -> BaseModel:
    """Loads a checkpoint directory: safetensors only, none of its code run, nothing fetched. ranks: over which the
    model is sharded, if they are in step; every one of them must call this.

    Raises UserError when there is no such checkpoint, or it is of a kind that cannot be trained here.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    check_checkpoint(path, dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES[dtype],
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"the checkpoint {path} cannot be loaded: {error}", field="model") from error
    if ranks is not None and ranks.apart:
        check_same(model, ranks)
    if ranks is not None and ranks.in_step:
        shard(model, ranks, device)
    return BaseModel.wrap(model.to(device), gradient_checkpointing=gradient_checkpointing)


def check_same(model: nn.Module, ranks: Ranks) -> None:
    """Raises UserError, on all ranks, when one has loaded other weights than rank 0: its node may have another revision
    of the model. Called by all, within `together`."""
    ranks.check()
    found = ranks.gather(fingerprint(model), str)
    others = [str(rank) for rank, one in enumerate(found) if one != found[0]]
    if others:
        raise UserError(
            f"rank {', '.join(others)} of the trainer has loaded another base model than rank 0: give every node the"
            " same files, or the same revision on the hub",
            field="model",
        )


def fingerprint(model: nn.Module) -> str:
    """Of the names, shapes, dtypes and bits of all weights, which are on the CPU: a digest of sums, exact and fast."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        raw = weight.detach().contiguous().view(-1).view(torch.uint8)
        raw = raw.clone() if raw.storage_offset() % 8 else raw  # or it could not be read as int64
        whole = raw.numel() // 8 * 8
        total = int(raw[:whole].view(torch.int64).sum()) + int(raw[whole:].sum())
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {total}\n".encode())
    return digest.hexdigest()


def check_checkpoint(path: str, dtype: str) -> None:
    """Raises UserError for what can be seen to be wrong without loading anything."""
    if not Path(path, "config.json").is_file():
        raise UserError(f"{path} holds no config.json: not a checkpoint directory", field="model")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", field="trainer.dtype")


def _checkpoint_layers(model: Any) -> None:
    layers = decoder_layers(model)
    if not layers:
        raise UserError(
            "layers of this architecture cannot be computed again in the backward pass",
            field="trainer.gradientCheckpointing",
        )
    # No random number is drawn in a frozen layer, so no generator's state has to be kept.
    settings = {"use_reentrant": False, "preserve_rng_state": False}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    for layer in layers:
        layer.training = True  # transformers checkpoints only then; what is inside (dropout) stays in eval mode


def check_supported(config: Any) -> None:
    """Raises UserError for configurations whose forward pass differs from head(decoder(ids)) under a causal mask, or
    whose linear layers are no plain matrices."""
    if getattr(config, "quantization_config", None):
        raise UserError("a quantised model cannot be trained; serve its unquantised form", field="model")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UserError(f"layers of kind {sorted(kinds)} cannot be trained; only full attention can", field="model")
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        raise UserError("a model with sliding-window attention cannot be trained", field="model")


class _SelfTest:
    """Packed and split into decoder and head, or plain through the whole model: the log-probs must agree."""

    PROMPT, COMPLETIONS = [3, 1, 4, 1, 5], [[9, 2, 6], [5, 3, 5, 8, 9]]

    @classmethod
    @torch.no_grad()
    def plain_logprobs(cls, model: Any) -> Tensor:
        parts = []
        for ids in cls.COMPLETIONS:
            input_ids = torch.tensor([cls.PROMPT + ids], device=model.device)
            logits_LV = model(input_ids=input_ids).logits[0, len(cls.PROMPT) - 1 : -1]
            logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
            parts.append(logits_LV.log_softmax(-1).gather(1, input_ids[0, len(cls.PROMPT) :, None])[:, 0])
        return torch.cat(parts)

    @classmethod
    @torch.no_grad()
    def compare(cls, plain_T: Tensor, base: BaseModel) -> None:
        completions = [Completion(ids=ids, weights=[], logprobs=[], advantages=[]) for ids in cls.COMPLETIONS]
        (batch,) = micro_batches([[Row(prompt=cls.PROMPT, completions=completions)]], len(cls.PROMPT) * 10)
        packed_T, _ = base.logprobs(batch, torch.arange(len(batch.target_T)), 1.0)
        worst = float((plain_T - packed_T).abs().max())
        if not worst <= SELF_TEST_TOLERANCE[base.head.weight.dtype]:
            raise UserError(
                f"the base model computes other log-probs when completions share a prompt (off by {worst:.3g}); "
                "models of this architecture cannot be trained",
                field="model",
            )
