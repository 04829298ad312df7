"""GSM8K rows as problems, on real rows of the data."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from clora_engine.environments import create
from clora_engine.environments.calculator import evaluate, same_number
from clora_engine.environments.gsm8k import read_row
from clora_engine.errors import UserError

SAMPLE = Path(__file__).parents[3] / "data" / "gsm8k"
ROWS = [json.loads(line) for name in ("train", "test") for line in (SAMPLE / f"{name}.jsonl").read_text().splitlines()]


def test_a_row() -> None:
    problem = read_row(
        {"question": "Q?", "answer": "Half: 48/2 = <<48/2=24>>24.\nAll: 48+24 = <<48+24=72>>72 clips.\n#### 72"}
    )
    assert problem == ("Q?", Fraction(72), ("48/2", "48+24"))


@pytest.mark.parametrize(("final", "value"), [("#### 2,125", 2125), ("#### -3", -3), ("#### 7 ", 7), ("####5", 5)])
def test_final_answers(final: str, value: int) -> None:
    assert read_row({"question": "Q?", "answer": f"text\n{final}"}).answer == value


def test_real_rows_are_read_and_their_annotations_evaluate() -> None:
    assert len(ROWS) == 60
    checked = 0
    for row in ROWS:
        problem = read_row(row)
        results = [part.partition(">>")[0].rpartition("=")[2] for part in row["answer"].split("<<")[1:]]
        assert len(results) == len(problem.expressions)
        for expression, result in zip(problem.expressions, results, strict=True):
            assert same_number(result, str(evaluate(expression)))
            checked += 1
    assert checked > 150


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"question": "Q?"}, "'answer' must be a text"),
        ({"question": "Q?", "answer": 72}, "'answer' must be a text"),
        ({"answer": "#### 72"}, "'question' must be a text"),
        ({"question": "Q?", "answer": "72"}, "must end in '#### <number>'"),
        ({"question": "Q?", "answer": "#### many"}, "must end in '#### <number>'"),
        ({"question": "Q?", "answer": "#### 72\nthe end"}, "must end in '#### <number>'"),
    ],
)
def test_rows_of_another_form_are_refused(row: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        create("GSM8K", {}).check(row)


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(UserError, match="GSM8K takes malformedCalls") as caught:
        create("GSM8K", {"split": "train"})
    assert caught.value.field == "environment.arguments.split"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("tail", ["####a" + " " * 200_000 + "b\nx", "####" + " " * 200_000 + "x\ny", "####a " * 50_000])
def test_the_time_to_read_a_row_grows_with_its_length_alone(tail: str) -> None:
    with pytest.raises(ValueError, match="must end in '#### <number>'"):
        read_row({"question": "Q?", "answer": tail})
