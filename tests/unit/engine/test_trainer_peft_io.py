"""Adapter directories: what is written, and every kind of damaged or foreign directory that is refused."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from clora_engine.errors import CheckpointError, EngineError, UserError
from clora_engine.peft_files import CONFIG_FILE, WEIGHTS_FILE
from clora_engine.peft_io import OPTIMIZER_FILE, read_config
from clora_engine.trainer import Trainer
from clora_engine.types import AdamParams, LoraConfig
from tests.numerics.tiny import tiny_trainer

KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    trainer = tiny_trainer()
    trainer.create("a", LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj")))
    return trainer


@pytest.fixture
def saved(trainer: Trainer, tmp_path: Path) -> Path:
    trainer.save("a", tmp_path / "state", optimizer=True)
    return tmp_path / "state"


def test_what_is_written(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE, OPTIMIZER_FILE]
    tensors = load_file(saved / WEIGHTS_FILE)
    assert len(tensors) == 8
    assert (tensors[KEY].shape, tensors[KEY].dtype) == ((4, 48), torch.float32)
    optimizer = load_file(saved / OPTIMIZER_FILE)
    assert len(optimizer) == 17
    assert int(optimizer["step"]) == 0
    config = PeftConfig.from_pretrained(saved)
    assert (config.r, config.lora_alpha, sorted(config.target_modules)) == (4, 8, ["q_proj", "v_proj"])
    assert config.base_model_name_or_path == "clora/tiny"
    assert str(saved) not in (saved / CONFIG_FILE).read_text()


def test_saving_without_the_optimizer(trainer: Trainer, tmp_path: Path) -> None:
    trainer.save("a", tmp_path / "weights", optimizer=False)
    assert not (tmp_path / "weights" / OPTIMIZER_FILE).exists()
    with pytest.raises(CheckpointError, match=f"{OPTIMIZER_FILE} is missing"):
        trainer.load("b", tmp_path / "weights", optimizer=True)
    assert "b" not in trainer.store


def edit(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_dora": True}, UserError, "use_dora is set"),
        ({"use_rslora": True}, UserError, "use_rslora is set"),
        ({"modules_to_save": ["embed_tokens"]}, UserError, "modules_to_save is set"),
        ({"rank_pattern": {"q_proj": 2}}, UserError, "rank_pattern is set"),
        ({"trainable_token_indices": [1]}, UserError, "trainable_token_indices is set"),
        ({"a_later_feature": True}, UserError, "a_later_feature is set"),
        ({"bias": "lora_only"}, UserError, "bias is 'lora_only'"),
        ({"init_lora_weights": "pissa"}, UserError, "changes the base model"),
        ({"peft_type": "IA3"}, UserError, "only LORA"),
        ({"lora_alpha": 0.5}, UserError, "lora_alpha is 0.5"),
        ({"lora_alpha": math.nan}, UserError, "lora_alpha is nan"),
        ({"r": 64}, UserError, "lora.rank is 64; this engine takes 1 to 32"),
        ({"r": "4"}, CheckpointError, "r is '4'"),
        ({"r": 3}, CheckpointError, r"has shape \(4, 48\); \(3, 48\) is needed"),
        ({"target_modules": ["q_proj"]}, CheckpointError, "v_proj.lora_A.weight belongs to no target module"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, CheckpointError, "k_proj.lora_A.weight is missing"),
        ({"target_modules": ["q_proj", "w_proj"]}, UserError, "'w_proj' matches no linear layer"),
        ({"target_modules": None}, CheckpointError, "target_modules is None"),
    ],
)
def test_configurations_that_are_refused(
    trainer: Trainer, saved: Path, change: dict[str, Any], error: type[EngineError], message: str
) -> None:
    edit(saved / CONFIG_FILE, change)
    with pytest.raises(error, match=message):
        trainer.load("b", saved, optimizer=False)
    assert "b" not in trainer.store


def test_every_default_of_peft_is_accepted(tmp_path: Path) -> None:
    PeftConfig(r=4, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM").save_pretrained(
        tmp_path
    )
    assert read_config(tmp_path) == LoraConfig(rank=4, alpha=8, target_modules=("q_proj",))


def change_tensor(path: Path, key: str, value: Tensor | None) -> None:
    tensors = load_file(path)
    if value is None:
        del tensors[key]
    else:
        tensors[key] = value
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        (WEIGHTS_FILE, KEY, None, f"tensor {KEY} is missing"),
        (WEIGHTS_FILE, "foreign", torch.zeros(1), "tensor foreign belongs to no target module"),
        (WEIGHTS_FILE, KEY, torch.zeros(4, 47), "has shape"),
        (WEIGHTS_FILE, KEY, torch.zeros(4, 48, dtype=torch.int8), "has dtype I8"),
        (WEIGHTS_FILE, KEY, torch.full((4, 48), math.nan), f"tensor {KEY} is not finite"),
        (OPTIMIZER_FILE, f"exp_avg.{KEY}", torch.full((4, 48), math.inf), "is not finite"),
        (OPTIMIZER_FILE, f"exp_avg_sq.{KEY}", None, "is missing"),
        (OPTIMIZER_FILE, f"grad.{KEY}", torch.zeros(4, 48), "tensor grad.*is missing"),
        (OPTIMIZER_FILE, "step", torch.tensor(-1), "step is negative"),
        (OPTIMIZER_FILE, "step", torch.tensor(1.5), "step has dtype F32"),
    ],
)
def test_damaged_tensors_are_named(
    trainer: Trainer, saved: Path, file: str, key: str, value: Tensor | None, message: str
) -> None:
    change_tensor(saved / file, key, value)
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer.load("b", saved, optimizer=True)
    assert str(saved / file) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (WEIGHTS_FILE, None, "is missing"),
        (WEIGHTS_FILE, b"\x80\x05pickled", "not a readable safetensors file"),
        (CONFIG_FILE, None, "is missing"),
        (CONFIG_FILE, b"{", "is not JSON"),
        (CONFIG_FILE, b"[]", "not a JSON object"),
        (CONFIG_FILE, b"[" * 100_000, "is not JSON"),
        (CONFIG_FILE, b" " * (1 << 20) + b"{}", "larger than"),
    ],
)
def test_files_that_are_missing_or_torn(
    trainer: Trainer, saved: Path, file: str, content: bytes | None, message: str
) -> None:
    if content is None:
        (saved / file).unlink()
    else:
        (saved / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        trainer.load("b", saved, optimizer=False)


@pytest.mark.parametrize("file", [WEIGHTS_FILE, CONFIG_FILE])
def test_what_is_no_plain_file_is_not_opened(trainer: Trainer, saved: Path, tmp_path: Path, file: str) -> None:
    """A link could lead to another tenant's adapter; a pipe would be waited on for ever."""
    elsewhere = (saved / file).rename(tmp_path / "elsewhere")
    (saved / file).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=f"{file} is a link"):
        trainer.load("b", saved, optimizer=False)
    (saved / file).unlink()
    os.mkfifo(saved / file)
    with pytest.raises(CheckpointError, match=f"{file} is not a file"):
        trainer.load("b", saved, optimizer=False)


def test_a_failed_load_leaves_the_adapter_that_had_the_name(saved: Path) -> None:
    trainer = tiny_trainer()
    trainer.create("b", LoraConfig(rank=8, alpha=8))
    change_tensor(saved / OPTIMIZER_FILE, "step", torch.tensor(-1))
    with pytest.raises(CheckpointError):
        trainer.load("b", saved, optimizer=True)
    assert trainer.store.state("b").config.rank == 8
    assert trainer.load("b", saved, optimizer=False).step == 0
    assert trainer.store.state("b").config.rank == 4


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (LoraConfig(rank=8, alpha=8, target_modules=("q_proj", "v_proj")), "lora.rank"),
        (LoraConfig(rank=4, alpha=4, target_modules=("q_proj", "v_proj")), "lora.alpha"),
        (LoraConfig(rank=4, alpha=8), "lora.targetModules"),
    ],
)
def test_an_adapter_that_is_not_what_the_experiment_asks_for(
    trainer: Trainer, saved: Path, config: LoraConfig, field: str
) -> None:
    with pytest.raises(UserError) as caught:
        trainer.load("b", saved, optimizer=False, config=config)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (LoraConfig(rank=0, alpha=8), "lora.rank"),
        (LoraConfig(rank=33, alpha=8), "lora.rank"),
        (LoraConfig(rank=8, alpha=0), "lora.alpha"),
        (LoraConfig(rank=8, alpha=8, target_modules="none"), "lora.targetModules"),
    ],
)
def test_configs_that_cannot_be_created(trainer: Trainer, config: LoraConfig, field: str) -> None:
    with pytest.raises(UserError) as caught:
        trainer.create("b", config)
    assert caught.value.field == field


def test_a_name_is_created_once(trainer: Trainer) -> None:
    with pytest.raises(EngineError, match="already has an adapter 'a'"):
        trainer.create("a", LoraConfig(rank=4, alpha=8))


@pytest.mark.parametrize(
    ("adam", "field"),
    [
        (AdamParams(learning_rate=math.nan), "adam.learning_rate"),
        (AdamParams(learning_rate=1e-3, beta1=1.0), "adam.beta1"),
        (AdamParams(learning_rate=1e-3, eps=0.0), "adam.eps"),
        (AdamParams(learning_rate=1e-3, grad_clip_norm=-1.0), "adam.grad_clip_norm"),
    ],
)
def test_optimizer_settings_without_meaning(trainer: Trainer, adam: AdamParams, field: str) -> None:
    with pytest.raises(UserError) as caught:
        trainer.optim_step("a", adam)
    assert caught.value.field == field
