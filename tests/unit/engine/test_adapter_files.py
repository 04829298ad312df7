"""Adapters that must not reach vLLM, one fault each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from clora_engine.adapter_files import BaseShapes, check_adapter
from clora_engine.errors import UserError
from clora_engine.peft_files import CONFIG_FILE, WEIGHTS_FILE

BASE = BaseShapes({"model.layers.0.mlp.up_proj": (8, 16), "model.layers.0.self_attn.q_proj": (8, 8)}, 100, 1000)
UP = "base_model.model.model.layers.0.mlp.up_proj"


def config(**changes: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"], "bias": "none"} | changes


def weights(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{UP}.lora_A.weight": torch.ones(2, 8), f"{UP}.lora_B.weight": torch.ones(16, 2)} | changes


def write(directory: Path, settings: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(settings or config()))
    save_file(tensors if tensors is not None else weights(), directory / WEIGHTS_FILE)
    return directory


def refused(directory: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        check_adapter(directory, BASE, max_rank=4)
    assert caught.value.reason == "InvalidAdapter"


def test_a_good_adapter_passes(tmp_path: Path) -> None:
    assert check_adapter(write(tmp_path / "a"), BASE, max_rank=4).alpha == 4


@pytest.mark.parametrize("a", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("b", [torch.float32, torch.bfloat16])
def test_every_dtype_is_looked_at_whole(tmp_path: Path, a: torch.dtype, b: torch.dtype) -> None:
    """Also where the two halves differ; what is wrong is named, wherever it stands."""

    def halves(value: float) -> dict[str, torch.Tensor]:
        last = torch.ones(16, 2)
        last[-1, -1] = value
        return {f"{UP}.lora_A.weight": torch.ones(2, 8, dtype=a), f"{UP}.lora_B.weight": last.to(b)}

    check_adapter(write(tmp_path / "good", tensors=halves(-3e4)), BASE, max_rank=4)
    refused(write(tmp_path / "a", tensors=halves(math.nan)), r"up_proj\.lora_B\.weight is not finite")
    refused(write(tmp_path / "b", tensors=halves(-4e4)), r"up_proj\.lora_B\.weight holds a value that is too large")


@pytest.mark.parametrize("spaces", range(4))
def test_a_header_of_any_length_will_do(tmp_path: Path, spaces: int) -> None:
    """Writers other than safetensors' own need not align what comes behind it."""
    path = write(tmp_path / "a") / WEIGHTS_FILE
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length].rstrip() + b" " * spaces, content[8 + length :]
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    check_adapter(path.parent, BASE, max_rank=4)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[:-4] + b"\xff\xff\xff\xff")
    refused(path.parent, "lora_B.weight is not finite")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"r": 8}, "rank 8 is above"),
        ({"r": 0}, "r is 0"),
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"a_later_feature": True}, "a_later_feature is set"),
        ({"init_lora_weights": "pissa"}, "changes the base model"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"up_proj": 1}}, "rank_pattern"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"lora_alpha": 1e7}, "too large"),
    ],
)
def test_settings_that_change_the_meaning_are_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    refused(write(tmp_path / "a", config(**changes)), match)


def test_the_rank_of_every_matrix_is_the_configured_one(tmp_path: Path) -> None:
    refused(write(tmp_path / "a", config(r=3)), r"has shape .* needed")


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({}, "no tensors"),
        (weights(**{f"{UP}.lora_A.weight": torch.full((2, 8), float("nan"))}), "not finite"),
        (weights(**{f"{UP}.lora_B.weight": torch.full((16, 2), float("inf"))}), "not finite"),
        (weights(**{f"{UP}.lora_A.weight": torch.tensor([[math.inf, -math.inf] * 4] * 2)}), "not finite"),
        (weights(**{f"{UP}.lora_B.weight": torch.full((16, 2), 3e38)}), "too large"),
        (weights(**{f"{UP}.lora_B.weight": torch.ones(16, 2, dtype=torch.int32)}), "has dtype I32"),
        (weights(**{f"{UP}.lora_B.weight": torch.ones(8, 2)}), "has shape"),
        ({f"{UP}.lora_A.weight": torch.ones(2, 8)}, "lora_B.weight is missing"),
        (weights(**{"base_model.model.lm_head.lora_A.weight": torch.ones(2, 8)}), "belongs to no linear layer"),
        (weights(**{UP.replace("0", "1") + ".lora_A.weight": torch.ones(2, 8)}), "belongs to no linear layer"),
        (weights(**{f"{UP}.lora_magnitude_vector": torch.ones(16)}), "not a LoRA weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], match: str) -> None:
    refused(write(tmp_path / "a", tensors=tensors), match)


def truncate(directory: Path) -> None:
    content = (directory / WEIGHTS_FILE).read_bytes()
    (directory / WEIGHTS_FILE).write_bytes(content[:-7])


def pickled(directory: Path) -> None:
    torch.save({}, directory / "adapter_model.bin")


def linked(directory: Path) -> None:
    (directory / WEIGHTS_FILE).rename(directory.parent / "elsewhere")
    (directory / WEIGHTS_FILE).symlink_to(directory.parent / "elsewhere")


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (truncate, "truncated"),
        (pickled, "never pickles"),
        (linked, "not a plain file"),
        (lambda d: (d / WEIGHTS_FILE).unlink(), "is missing"),
        (lambda d: (d / CONFIG_FILE).unlink(), "is missing"),
        (lambda d: (d / CONFIG_FILE).write_text("{"), "is not JSON"),
        (lambda d: (d / "more").mkdir(), "not a plain file"),
    ],
)
def test_files_that_are_not_an_adapter_are_refused(tmp_path: Path, spoil: Callable[[Path], Any], match: str) -> None:
    spoil(write(tmp_path / "a"))
    refused(tmp_path / "a", match)


def test_a_directory_that_is_absent_or_a_link_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "not a directory")
    write(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    refused(tmp_path / "link", "not a directory")


def test_the_base_model_is_read_from_its_config_alone(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=64, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    base = BaseShapes.of_model(tmp_path)
    assert base.vocabulary == 64
    assert base.linear["model.layers.1.self_attn.k_proj"] == (32, 16)
    assert "lm_head" not in base.linear
    assert base.suffixes == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    with pytest.raises(UserError, match="no usable model"):
        BaseShapes.of_model(tmp_path / "absent")
