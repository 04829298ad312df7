"""Generated problems: deterministic, balanced, disjoint, and solvable."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clora_engine.environments import create
from clora_engine.environments.calculator import evaluate, same_number
from clora_engine.environments.word_problems import WordProblems, build, read_row, split_of
from clora_engine.environments.word_templates import FAMILIES, ONE_STEP, SETS, TWO_STEP
from clora_engine.errors import UserError


def test_a_resumed_run_sees_the_same_questions() -> None:
    """A change of these rows breaks every run that is under way: its data would change in the middle."""
    maker = build({"families": "errands, trips, shop"})
    rows = [maker.generate(7, "train", index) for index in (0, 1, 5)]
    assert [(row["question"], row["answer"], row["expressions"]) for row in rows] == [
        ("Paul has 14 pens and gets 7 more. How many pens does Paul have now?", "21", ["14+7"]),
        ("Ivy walks 36 km and then rides 5 km. How many km is that?", "41", ["36+5"]),
        (
            "A shop sells hats at $4 and plums at $7. Ivy buys 3 hats and 9 plums. How much does Ivy pay?",
            "75",
            ["3*4+9*7"],
        ),
    ]


@given(st.integers(0, 2**31 - 1), st.sampled_from(["train", "test"]), st.integers(0, 10**9), st.sampled_from([*SETS]))
def test_every_problem_is_sound(seed: int, split: str, index: int, families: str) -> None:
    maker = build({"families": families})
    row = maker.generate(seed, "train" if split == "train" else "test", index)
    problem = read_row(row)
    assert split_of(problem.question) == split
    (expression,) = problem.expressions
    assert evaluate(expression) == problem.answer > 0
    assert problem.answer.denominator == 1
    assert not set("{}") & set(problem.question)
    assert row["family"] == SETS[families][index % len(SETS[families])]


def test_splits_share_no_question_whatever_the_seeds() -> None:
    maker = WordProblems(("errands",))
    train = {maker.generate(seed, "train", index)["question"] for seed in range(20) for index in range(200)}
    test = {maker.generate(seed, "test", index)["question"] for seed in range(20) for index in range(200)}
    assert not train & test
    assert len(test) > 100


def test_held_out_templates_are_evaluated_on_and_never_trained_on() -> None:
    maker = build({"families": "errands,trips", "heldOutTemplates": "2"})
    kinds: dict[str, set[str]] = {}
    for split in ("train", "test"):
        rows = [maker.generate(3, "train" if split == "train" else "test", index) for index in range(240)]
        kinds[split] = {" ".join(word for word in row["question"].split() if word.islower()) for row in rows}
        assert Counter(row["family"] for row in rows) == {"errands": 120, "trips": 120}
    assert not kinds["train"] & kinds["test"]
    assert maker.generate(3, "test", 0)["expressions"][0].count("*") == 1  # pages read in some days
    assert build({}).held_out_templates == 0


def test_templates_and_families_come_in_turn() -> None:
    maker = WordProblems(("errands", "trips"))
    rows = [maker.generate(1, "train", index) for index in range(24)]
    assert Counter(row["family"] for row in rows) == {"errands": 12, "trips": 12}
    signs = Counter(next(sign for sign in "+-*/" if sign in row["expressions"][0]) for row in rows)
    assert signs == {"+": 4, "-": 8, "*": 8, "/": 4}  # two subtractions and two products among six templates


def test_seeds_give_different_questions() -> None:
    maker = WordProblems(("kitchen",))
    first, second = ([maker.generate(seed, "train", i)["question"] for i in range(30)] for seed in (1, 2))
    assert len(set(first) & set(second)) < 5


def test_families_share_no_template() -> None:
    texts = [template.text for templates in FAMILIES.values() for template in templates]
    assert len(set(texts)) == len(texts)
    assert set(ONE_STEP) | set(TWO_STEP) == set(FAMILIES)
    assert {len(templates) for templates in FAMILIES.values()} == {6}


def test_one_step_families_have_one_operation() -> None:
    def operations(family: str) -> set[int]:
        return {sum(template.expression.count(sign) for sign in "+-*/") for template in FAMILIES[family]}

    assert all(operations(family) == {1} for family in ONE_STEP)
    assert all(min(operations(family)) >= 2 for family in TWO_STEP)


@pytest.mark.parametrize(
    ("arguments", "field", "what"),
    [
        ({"families": "bakery"}, "families", "unknown family 'bakery'; known: OneStep, TwoStep, errands"),
        ({"families": ""}, "families", "unknown family ''"),
        ({"families": "shop,"}, "families", "unknown family ''"),
        ({"families": "shop,shop"}, "families", "named twice"),
        ({"families": "OneStep,errands"}, "families", "named twice"),
        ({"family": "shop"}, "family", "WordProblems takes families, heldOutTemplates, malformed"),
        ({"malformedCalls": "Ignore"}, "malformedCalls", "'Ignore' is neither Answer nor End"),
        ({"heldOutTemplates": "6"}, "heldOutTemplates", "'6' is no whole number from 0 to 5"),
        ({"heldOutTemplates": "-1"}, "heldOutTemplates", "no whole number"),
        ({"heldOutTemplates": "two"}, "heldOutTemplates", "no whole number"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, str], field: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        create("WordProblems", arguments)
    assert caught.value.field == f"environment.arguments.{field}"


def test_families_default_to_one_step() -> None:
    assert build({}).families == ONE_STEP


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({}, "'answer' must be a number"),
        ({"question": "How many?", "answer": "many"}, "'answer' must be a number"),
        ({"question": " ", "answer": 1}, "'question' must be"),
        ({"question": 5, "answer": 1}, "'question' must be"),
        ({"question": "How many?", "answer": 1, "expressions": "1"}, "list of texts"),
        ({"question": "How many?", "answer": 1, "expressions": [1]}, "list of texts"),
    ],
)
def test_rows_of_another_form_are_refused(row: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        build({}).check(row)


def test_rows_of_a_users_own() -> None:
    problem = read_row({"question": "How many?", "answer": "$1,200"})
    assert same_number(1200, str(problem.answer))
    assert problem.expressions == ()
