"""The trainer against plain PEFT and torch.optim.AdamW on the same batches, and adapters that go to and fro."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from clora_engine.types import AdamParams, LoraConfig, Loss, Row
from tests.numerics.tiny import batch, tiny_model, tiny_trainer, trained_tokens

LOSSES = ["CrossEntropy", "ImportanceSampling", "PPO", "CISPO", "DRO"]


def reference_loss(model: Any, rows: list[Row], loss: Loss) -> Tensor:
    """One sequence at a time through the whole model, with the losses as their papers print them."""
    total = torch.zeros(())
    for row in rows:
        for one in row.completions:
            logits = model(input_ids=torch.tensor([row.prompt + one.ids])).logits[0, len(row.prompt) - 1 : -1]
            logp = (logits / loss.temperature).log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
            old, advantage = torch.tensor(one.logprobs), torch.tensor(one.advantages)
            ratio = torch.exp(logp - old)
            clipped = torch.clip(ratio, loss.clip_low, loss.clip_high)
            terms = {
                "CrossEntropy": -logp,
                "ImportanceSampling": -(ratio * advantage),
                "PPO": -torch.min(ratio * advantage, clipped * advantage),
                "CISPO": -(clipped.detach() * advantage * logp),
                "DRO": -(logp * advantage - 0.5 * loss.beta * (logp - old) ** 2),
            }[loss.name]
            total = total + (terms * torch.tensor(one.weights)).sum()
    return total / loss.denominator


def peft_weights(model: Any) -> dict[str, Tensor]:
    return {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize(
    ("family", "rank", "targets"),
    [("qwen3", 8, "all-linear"), ("llama", 5, ("q_proj", "v_proj", "down_proj")), ("qwen3", 12, r".*\.1\..*_proj")],
)
def test_five_steps_equal_peft_with_adamw(
    tmp_path: Path, family: str, rank: int, targets: str | tuple[str, ...], loss_name: Any
) -> None:
    # FP32 sums in another order differ in the last bits and Adam divides by the root of a gradient's square, so the
    # weights are compared to 1/200 of the distance that five steps at this rate can go.
    adam = AdamParams(learning_rate=2e-3, eps=1e-5, weight_decay=0.01, grad_clip_norm=0.5)
    trainer = tiny_trainer(family, budget=120)
    trainer.create("ours", LoraConfig(rank=rank, alpha=2 * rank, target_modules=targets, seed=3))
    trainer.save("ours", tmp_path / "start", optimizer=False)
    model = PeftModel.from_pretrained(tiny_model(family), tmp_path / "start", is_trainable=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
    )
    for step in range(5):
        rows = batch(step)
        loss = Loss(name=loss_name, denominator=trained_tokens(rows), temperature=1.2)
        ours = trainer.forward_backward("ours", rows, loss)
        theirs = reference_loss(model, rows, loss)
        theirs.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, adam.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        result = trainer.optim_step("ours", adam)
        assert ours.loss == pytest.approx(float(theirs.detach()), rel=1e-4, abs=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-3)
        assert (result.step, result.skipped) == (step + 1, False)
    trainer.save("ours", tmp_path / "end", optimizer=False)
    saved, wanted = load_file(tmp_path / "end" / "adapter_model.safetensors"), peft_weights(model)
    assert saved.keys() == wanted.keys()
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    for name, tensor in saved.items():
        assert (tensor - start[name]).abs().max() > adam.learning_rate, f"{name} hardly moved"
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=5 * adam.learning_rate / 200)


@pytest.mark.parametrize("version", [False, True], ids=["checkpoint", "version"])
@pytest.mark.parametrize("targets", ["all-linear", ("k_proj", "mlp.up_proj"), r"model\.layers\.0\..*"])
def test_peft_computes_the_same_with_our_files(tmp_path: Path, targets: str | tuple[str, ...], version: bool) -> None:
    """A checkpoint, and what the sampler is given: there, nothing is left to be scaled."""
    trainer = tiny_trainer()
    trainer.create("ours", LoraConfig(rank=6, alpha=16, target_modules=targets))
    rows = batch(1)
    trainer.forward_backward("ours", rows, Loss(name="CrossEntropy", denominator=1.0))
    trainer.optim_step("ours", AdamParams(learning_rate=0.05))
    if version:
        trainer.export("ours", tmp_path / "export")
    else:
        trainer.save("ours", tmp_path / "export", optimizer=True)
    model = PeftModel.from_pretrained(tiny_model(), tmp_path / "export")
    assert model.peft_config["default"].lora_alpha == (6 if version else 16)
    assert model.peft_config["default"].base_model_name_or_path == "clora/tiny"
    ours = trainer.forward("ours", rows)
    for r, row in enumerate(rows):
        for c, one in enumerate(row.completions):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([row.prompt + one.ids])).logits[0, len(row.prompt) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(ours[r][c]), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "o_proj"], r".*\.(gate|up)_proj"])
def test_we_compute_the_same_with_a_peft_adapter(tmp_path: Path, targets: str | list[str], dtype: torch.dtype) -> None:
    model = get_peft_model(
        tiny_model(),
        PeftConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.05, task_type="CAUSAL_LM"),
    ).eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(11)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
                parameter.data = parameter.data.to(dtype).float() if dtype != torch.float32 else parameter.data
    state = {name: tensor.to(dtype) for name, tensor in peft_weights(model).items()}
    model.save_pretrained(tmp_path)
    from safetensors.torch import save_file

    save_file(state, tmp_path / "adapter_model.safetensors")
    trainer = tiny_trainer()
    info = trainer.load("theirs", tmp_path, optimizer=False)
    assert info.parameters == sum(tensor.numel() for tensor in state.values())
    rows = batch(2)
    ours = trainer.forward("theirs", rows)
    with torch.no_grad():
        plain = tiny_trainer()
        plain.create("start", LoraConfig(rank=4, alpha=8))
        assert plain.forward("start", rows) != ours
        for r, row in enumerate(rows):
            for c, one in enumerate(row.completions):
                logits = model(input_ids=torch.tensor([row.prompt + one.ids])).logits[0, len(row.prompt) - 1 : -1]
                wanted = logits.log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(ours[r][c]), wanted, rtol=0, atol=2e-5)
