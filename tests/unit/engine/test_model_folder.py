"""Which model a folder holds, by its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from clora_engine.errors import UserError
from clora_engine.model_folder import base_model, model_folder
from tests.numerics.tiny import tiny_model


def fingerprint(folder: Path) -> str:
    return base_model(folder, "m").fingerprint


def test_the_same_weights_have_the_same_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("a mirror")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")


@pytest.mark.parametrize("part", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_fine_tune_has_another_fingerprint(tmp_path: Path, part: str) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        model.get_parameter(part).mul_(1.001)
    model.save_pretrained(tmp_path / "b")
    model.bfloat16().save_pretrained(tmp_path / "c")
    assert len({fingerprint(tmp_path / name) for name in "abc"}) == 3


def test_what_is_no_model_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="is neither a folder nor a model that the hub gives"):
        model_folder(str(tmp_path / "nowhere"), None)
