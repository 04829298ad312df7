"""GSM8K (Cobbe et al., 2021, arXiv:2110.14168): grade school mathematics, answered with calculator and final_answer.

Rows are those of the published data: `question`, and an `answer` that works the problem out, with calculations as
<<48/2=24>>, and ends in `#### 72`. The annotations become the calculator turns of demonstrations; the prose is left
out. The longest published solutions take 9 calculations and so, with the final answer, 10 turns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from clora_engine.environments.arguments import refuse_unknown
from clora_engine.environments.calculator import parse_number
from clora_engine.environments.protocol import Example
from clora_engine.environments.questions import Problem, QuestionFactory, answers_malformed, text_field

_ANNOTATION = re.compile(r"<<([^<>=]*)=[^<>]*>>")


def build(arguments: Mapping[str, str]) -> QuestionFactory:
    """The factory of environment GSM8K.

    Args:
        arguments: `malformedCalls`, Answer (the default) or End; see questions.py.

    Raises:
        UserError: an argument is unknown or wrong.
    """
    refuse_unknown("GSM8K", arguments, ("malformedCalls",))
    return QuestionFactory(read_row, answers_malformed=answers_malformed(arguments, "Answer"))


def read_row(example: Example) -> Problem:
    """A GSM8K row as a problem.

    Raises:
        ValueError: a field is missing, or `answer` does not end in `#### <number>`.
    """
    question = text_field(example, "question")
    worked = text_field(example, "answer")
    _, found, final = worked.rpartition("####")
    answer = parse_number(final.strip()) if found else None
    if answer is None:
        raise ValueError("'answer' must end in '#### <number>'")
    return Problem(question, answer, tuple(match.strip() for match in _ANNOTATION.findall(worked)))
