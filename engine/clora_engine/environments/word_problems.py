"""Generated word problems: endless, deterministic data that small models can learn from in minutes.

A problem is a pure function of (seed, split, index). Index k takes family k mod n and, within it, the templates in
turn, so that a batch holds each template equally often: the mean reward of a step is then less noisy than by free
choice. The split is a property of the question itself (of its hash), so no held-out question is ever trained on,
whatever the seeds.

Only `random.Random.random` is drawn from: it is the one generator whose sequence Python promises to keep, and a resumed
run must see the same questions under a newer Python.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

from clora_engine.environments.arguments import argument_error, refuse_unknown
from clora_engine.environments.calculator import evaluate, format_number, parse_number
from clora_engine.environments.protocol import Example, Split
from clora_engine.environments.questions import (
    Problem,
    QuestionFactory,
    answers_malformed,
    checked_expressions,
    text_field,
)
from clora_engine.environments.word_templates import (
    FAMILIES,
    LARGE_NUMBERS,
    NAMES,
    ONE_STEP,
    SETS,
    THINGS,
    Template,
)

TEST_SHARE = 8  # one question in so many is held out

T = TypeVar("T")


def build(arguments: Mapping[str, str]) -> WordProblems:
    """The factory of environment WordProblems.

    Args:
        arguments: `families`, a comma-separated list of families (see word_templates.FAMILIES) or of the sets OneStep
            and TwoStep; OneStep if left out. `heldOutTemplates`, a number: so many templates of each family, its last
            ones, are evaluated on and never trained on; 0, the default: questions alone are held out.
            `malformedCalls`, Answer or End (the default); see questions.py.

    Raises:
        UserError: an argument or a family is unknown, or named twice.
    """
    refuse_unknown("WordProblems", arguments, ("families", "heldOutTemplates", "malformedCalls"))
    names = [name.strip() for name in arguments.get("families", "OneStep").split(",")]
    families: list[str] = []
    for name in names:
        if name not in FAMILIES and name not in SETS:
            known = ", ".join((*SETS, *FAMILIES))
            raise argument_error("families", f"unknown family {name!r}; known: {known}")
        for family in SETS.get(name, (name,)):
            if family in families:
                raise argument_error("families", f"family {family!r} is named twice")
            families.append(family)
    return WordProblems(
        tuple(families),
        _held_out_templates(arguments.get("heldOutTemplates", "0"), families),
        answers_malformed=answers_malformed(arguments, "End"),
    )


def _held_out_templates(text: str, families: Sequence[str]) -> int:
    most = min(len(FAMILIES[family]) for family in families) - 1
    if text not in {str(number) for number in range(most + 1)}:
        raise argument_error("heldOutTemplates", f"{text!r} is no whole number from 0 to {most}")
    return int(text)


class WordProblems(QuestionFactory):
    """The questions of some families. With `held_out_templates`, split "test" has that many last templates of each
    family and "train" the others, so that an evaluation shows what was learnt beyond the wording."""

    def __init__(
        self, families: Sequence[str] = ONE_STEP, held_out_templates: int = 0, *, answers_malformed: bool = False
    ) -> None:
        super().__init__(read_row, answers_malformed=answers_malformed)
        self.families = tuple(families)
        self.held_out_templates = held_out_templates

    def generate(self, seed: int, split: Split, index: int) -> Example:
        """Row `index` (from 0, without end) of a split: question, answer, expressions, family."""
        family = self.families[index % len(self.families)]
        templates = self._templates(family, split)
        template = templates[index // len(self.families) % len(templates)]
        rng = random.Random(f"{seed}/{split}/{family}/{index}")  # noqa: S311 - no secret
        while True:
            problem = _fill(template, rng)
            if split_of(problem.question) == split:
                return {
                    "question": problem.question,
                    "answer": format_number(problem.answer),
                    "expressions": list(problem.expressions),
                    "family": family,
                }

    def _templates(self, family: str, split: Split) -> Sequence[Template]:
        templates = FAMILIES[family]
        if not self.held_out_templates:
            return templates
        trained = len(templates) - self.held_out_templates
        return templates[:trained] if split == "train" else templates[trained:]


def split_of(question: str) -> Split:
    """The split that a question belongs to: one in TEST_SHARE is for testing, by its hash."""
    digest = hashlib.blake2b(question.encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"


def read_row(example: Example) -> Problem:
    """A row of this environment (generated, or written by a user in the same form) as a problem.

    Raises:
        ValueError: `question` or `answer` is missing, or the answer is no number.
    """
    answer = parse_number(example.get("answer"))
    if answer is None:
        raise ValueError("'answer' must be a number")
    expressions = example.get("expressions", [])
    if not isinstance(expressions, list):
        raise ValueError("'expressions' must be a list of texts")
    return Problem(text_field(example, "question"), answer, checked_expressions(expressions))


def _fill(template: Template, rng: random.Random) -> Problem:
    """Draws numbers and words until the answer is positive."""
    while True:
        a = _between(rng, 2, 9)
        first, second = _two(rng, NAMES)
        thing, other = _two(rng, THINGS)
        values = {
            "a": a,
            "b": _between(rng, 2, 9),
            "c": _between(rng, 2, 9),
            "d": _between(rng, 2, 9),
            "B": _between(rng, 11, 40),
            "C": _pick(rng, LARGE_NUMBERS),
            "D": a * _between(rng, 2, 9),
            "n": first,
            "m": second,
            "t": thing,
            "u": other,
        }
        expression = template.expression.format(**values)
        answer = evaluate(expression)
        if answer > 0:
            question = template.text.format(**values)
            return Problem(question[0].upper() + question[1:], answer, (expression,))


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _between(rng: random.Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low + 1))


def _two(rng: random.Random, items: Sequence[str]) -> tuple[str, str]:
    """Two different items."""
    first = int(rng.random() * len(items))
    second = (first + 1 + int(rng.random() * (len(items) - 1))) % len(items)
    return items[first], items[second]
