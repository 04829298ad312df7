"""Target modules by PEFT's rules, the flat layout and the initialisation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model

from clora_engine.errors import UserError
from clora_engine.lora import (
    ALIGNMENT,
    Layout,
    ModuleShape,
    initialise,
    match_targets,
    rank_bucket,
    target_names,
)
from clora_engine.trainer_lora import Pass, shapes, wrap_linears
from clora_engine.types import LoraConfig
from tests.numerics.tiny import tiny_model


def available() -> tuple[ModuleShape, ...]:
    model = tiny_model()
    return shapes(wrap_linears(model, model.get_output_embeddings(), Pass()))


def names_by_peft(targets: Any) -> set[str]:
    model = get_peft_model(tiny_model(), PeftConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    return set(model.base_model.targeted_module_names)


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        ["q_proj"],
        ["self_attn.v_proj", "down_proj"],
        ["model.layers.1.mlp.up_proj"],
        r".*\.(q|o)_proj",
        r"model\.layers\.0\.mlp\..*_proj",
    ],
)
def test_targets_are_those_of_peft(targets: Any) -> None:
    ours = match_targets(targets if isinstance(targets, str) else tuple(targets), available())
    assert {module.name for module in ours} == names_by_peft(targets)
    assert list(ours) == [module for module in available() if module in ours], "not in the model's order"
    names = target_names(ours, available())
    assert set(match_targets(names, available())) == set(ours)
    assert names_by_peft(names) == {module.name for module in ours}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "q_porj"), "'q_porj' matches no linear layer"),
        (("lm_head",), "output head cannot be trained"),
        (("embed_tokens",), "embeddings"),
        ("nothing.*", "match no linear layer"),
        ("(unclosed", "not a regular expression"),
        ((), "match no linear layer"),
    ],
)
def test_targets_without_meaning_are_refused(targets: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        match_targets(targets, available())
    assert caught.value.field == "lora.targetModules"


def test_a_hostile_regular_expression_is_stopped() -> None:
    names = (ModuleShape("a" * 60 + ".proj", 1, 1),) * 50
    with pytest.raises(UserError, match="takes too long"):
        match_targets(r"((a|a)+)+b\.x", names)


@pytest.mark.parametrize(("rank", "bucket"), [(1, 8), (8, 8), (9, 16), (16, 16), (33, 64)])
def test_rank_bucket(rank: int, bucket: int) -> None:
    assert rank_bucket(rank) == bucket


def test_matrices_of_a_layout_are_aligned_and_do_not_overlap() -> None:
    layout = Layout((ModuleShape("x", 5, 7), ModuleShape("y", 33, 3)), 8)
    flat = torch.zeros(layout.numel)
    for number, pair in enumerate(layout.matrices(flat).values(), start=1):
        for part, matrix in enumerate(pair):
            assert matrix.storage_offset() % ALIGNMENT == 0
            assert not matrix.any()
            matrix.fill_(10 * number + part)
    a, b = layout.matrices(flat)["y"]
    assert (a.shape, b.shape) == ((8, 33), (3, 8))
    assert (a == 20).all()
    assert (b == 21).all()
    assert layout.parameters(3) == 3 * (5 + 7 + 33 + 3)
    cut_a, cut_b = layout.matrices(flat, 3)["x"]
    assert (cut_a.shape, cut_b.shape) == ((3, 5), (7, 3))


def test_initialisation_is_kaiming_uniform_by_the_adapters_own_seed() -> None:
    layout = Layout((ModuleShape("x", 400, 30), ModuleShape("y", 100, 30)), 8)

    def start(seed: int) -> torch.Tensor:
        flat = torch.zeros(layout.numel)
        initialise(layout, LoraConfig(rank=6, alpha=12, seed=seed), flat)
        return flat

    torch.manual_seed(0)
    first = start(1)
    torch.manual_seed(123)
    assert torch.equal(first, start(1)), "depends on the global generator"
    assert not torch.equal(first, start(2))
    for name, (a, b) in layout.matrices(first).items():
        bound = 1 / math.sqrt(a.shape[1])  # kaiming-uniform with a = sqrt 5
        assert not b.any(), name
        assert not a[6:].any(), "padding rows"
        assert a[:6].abs().max() <= bound
        assert a[:6].abs().max() > 0.95 * bound
        assert abs(float(a[:6].std()) - bound / math.sqrt(3)) < 0.05 * bound
