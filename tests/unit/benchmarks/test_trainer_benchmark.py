"""The trainer's benchmark, on times that are written down, and its arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import trainer, trainer_table
from benchmarks.trainer_contenders import PROMPT, ROW, rows
from clora_engine.trainer_cost import Choice
from clora_engine.trainer_packing import micro_batches, plain_tokens

SUBJECT = trainer.Subject(trainer.HEADLINE, None, torch.float32, torch.device("cpu"), 16, ((1, 64), (8, 64), (8, 256)))
# Seconds by case and contender, two rounds.
TAKEN = {
    (1, 64): {"fused": [1.0, 1.0], "swap": [1.0, 1.0], "peft": [1.25, 1.25]},
    (8, 64): {"fused": [4.0, 5.0], "swap": [8.0, 8.0], "peft": [10.0, 10.0]},
    (8, 256): {"fused": [20.0, 20.0], "swap": [16.0, 16.0], "peft": [24.0, 24.0]},
}
SAVINGS = {
    "case": "savings", "model": trainer.HEADLINE, "prompts": 8, "group": 8, "plain_tokens": 6000,
    "computed_tokens": 1500, "token_ratio": 4.0, "seconds": 5.0, "plain_seconds": 15.0, "time_ratio": 3.0,
    "loss_difference": 1e-6,
}  # fmt: skip


def records(choice: Choice) -> list[dict[str, Any]]:
    found = [trainer._record(SUBJECT, n, t, case, products=0.5) for (n, t), case in TAKEN.items()]
    return [*found, *trainer._auto(SUBJECT, choice, TAKEN), SAVINGS, trainer._modelled_swap()]


def test_headlines() -> None:
    assert trainer._headlines(records(Choice(8, 100))) == {
        "fused_over_swap_best": pytest.approx(1.8),  # the median of 8/4 and 8/5
        "over_peft_serial_n8": 1.5,  # at 256 tokens Auto takes turns
        "savings_token_ratio": 4.0,
    }


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [(Choice(8, 100), ["fused", "swap"]), (Choice(1, 0), ["swap", "swap"]), (Choice(8, 4096), ["fused", "fused"])],
)
def test_auto_is_compared_with_both_ways(choice: Choice, chosen: list[str]) -> None:
    found = [record for record in records(choice) if record["case"] == "auto"]
    assert [record["chosen"] for record in found] == chosen
    for record in found:
        assert record[f"over_{record['chosen']}"]["median"] == 1.0


def test_the_table_has_every_case() -> None:
    swap = {
        "case": "swap", "model": trainer.HEADLINE, "device": "cpu", "bytes": 60_000_000, "gigabytes_per_second": 3.0,
        "milliseconds": {"median": 20.0, "low": 19.0, "high": 21.0}, "share_of_step_by_tokens": {"64": 0.05},
    }  # fmt: skip
    found = [*records(Choice(8, 100)), swap]
    document = {
        "command": "x", "commit": "abc", "versions": {"torch": "2"}, "headlines": trainer._headlines(found),
        "machine": {"cores": 2, "cpu": "c", "features": [], "memory_gib": 1.0}, "records": found,
        "settings": {"row_tokens": ROW, "prompt_tokens": PROMPT, "threads": 2, "rounds": 2},
    }  # fmt: skip
    text = trainer_table.render(document)
    assert "| 8 × 64 | 115 | 64 | 51 | 1.80 (1.60–2.00) |" in text
    assert "a copy within memory, which overlaps nothing. Share of a tenant's step, by its tokens: 5.0 % at 64" in text
    assert "Modelled, not measured (Qwen3-4B rank 32, PCIe 5 x16): 793 MB each way" in text
    assert "(ratio 4)" in text
    assert f"Left out ({trainer.HEADLINE}): 1 × 256 tenants × tokens, for beyond 2048 tokens in a case" in text
    assert "whose clock is simulated" in text


def test_batches_share_nothing_and_have_no_padding() -> None:
    batch = rows(256, 0)
    (whole,) = micro_batches([batch], 4096)
    assert whole.tokens == plain_tokens(batch) == 256
