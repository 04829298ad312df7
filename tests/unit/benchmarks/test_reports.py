"""The computed bound, and that the table in the documentation is the one of its JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning_report, operator_scale, sampler_table, throughput_report, trainer_table
from benchmarks.report import Spread, command
from benchmarks.roofline import Rates, Sizes, run_seconds

DOCS = Path(__file__).parents[3] / "docs" / "benchmarks"
SIZES = Sizes(weights=100, head=20, adapter=10, kv_per_token=1, bytes_per_value=4)


def test_few_rows_are_bound_by_reading_and_many_by_multiplying() -> None:
    rates = Rates(bytes_per_second=1000.0, flops_per_second=1000.0)
    # one row: prompt of 4 tokens: 2 * (4 * 110 + 20) flops; then one token: (130 + 5) values of 4 bytes are read
    few = run_seconds(SIZES, rates, adapters=1, rows=1, prompt=4, tokens=2, prefill_budget=100)
    assert few == pytest.approx(920 / 1000 + 540 / 1000)
    # 50 rows, 2 adapters: 2 * 50 * 130 flops for a token
    many = run_seconds(SIZES, rates, adapters=2, rows=50, prompt=4, tokens=2, prefill_budget=100)
    assert many == pytest.approx(2 * (200 * 110 + 50 * 20) / 1000 + 13000 / 1000)


def test_without_adapters_only_the_base_model_counts() -> None:
    rates = Rates(bytes_per_second=1000.0, flops_per_second=1e9)
    seconds = run_seconds(SIZES, rates, adapters=0, rows=1, prompt=4, tokens=2, prefill_budget=100)
    assert seconds == pytest.approx(4 * 120 / 1000 + 4 * 125 / 1000)


def test_a_long_prefill_reads_the_weights_more_than_once() -> None:
    rates = Rates(bytes_per_second=1000.0, flops_per_second=1e9)
    seconds = run_seconds(SIZES, rates, adapters=0, rows=3, prompt=4, tokens=1, prefill_budget=4)
    assert seconds == pytest.approx(3 * 4 * 120 / 1000)


def test_a_spread_is_median_and_range() -> None:
    assert str(Spread.of([3.0, 1.0, 2.5])) == "2.50 (1.00–3.00)"


def test_a_command_is_printed_without_this_machine_s_folders() -> None:
    given = ["--work", "/home/somebody/bench/throughput", "--parts", "a,b", "--out", "docs/x.json"]
    assert command("m", given) == "python -m m --work throughput --parts a,b --out docs/x.json"


@pytest.mark.parametrize(
    ("name", "render"),
    [
        ("sampler", sampler_table.render),
        ("sampler_avx2", sampler_table.render),
        ("trainer", trainer_table.render),
        ("operator", operator_scale.render),
        ("throughput", throughput_report.render),
        ("learning", learning_report.render),
    ],
)
def test_the_documented_table_is_rendered_from_its_measurements(
    name: str, render: Callable[[dict[str, Any]], str]
) -> None:
    document = json.loads((DOCS / f"{name}.json").read_text())
    assert render(document) + "\n" == (DOCS / f"{name}.md").read_text()
    assert not document["commit"].endswith("-dirty")
