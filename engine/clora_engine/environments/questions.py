"""Questions with a number for an answer, a `calculator` and a `final_answer` tool: what GSM8K and WordProblems share.

The reward is 1.0 only when final_answer is called with the right number. A call that cannot be carried out is answered
with a short error, and the model may try again; a turn without a call ends the episode without reward. What becomes of
a turn that was to be a call and is malformed is the argument `malformedCalls`: Answer it with an error, so that a
model can mend it, or End the episode, for keeping to the format is part of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from clora_engine.environments.arguments import argument_error
from clora_engine.environments.calculator import (
    CalculatorError,
    evaluate,
    format_number,
    parse_number,
    same_number,
)
from clora_engine.environments.protocol import Example, Message, StepResult, Tool, ToolCall

CALCULATOR = Tool(
    name="calculator",
    description="Evaluates an arithmetic expression, for example 12*5-3.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "numbers, + - * / ** % and parentheses"}},
        "required": ["expression"],
    },
)
FINAL_ANSWER = Tool(
    name="final_answer",
    description="Gives the answer to the question and ends the conversation.",
    parameters={
        "type": "object",
        "properties": {"answer": {"type": "number", "description": "the answer, a number without unit"}},
        "required": ["answer"],
    },
)


MAX_ERROR = 200  # characters of an error that a model is told


def answers_malformed(arguments: Mapping[str, str], default: Literal["Answer", "End"]) -> bool:
    """The argument `malformedCalls`. Raises UserError."""
    text = arguments.get("malformedCalls", default)
    if text not in ("Answer", "End"):
        raise argument_error("malformedCalls", f"{text!r} is neither Answer nor End")
    return text == "Answer"


class Problem(NamedTuple):
    """A question, its answer and the calculator expressions that lead there (may be empty)."""

    question: str
    answer: Fraction
    expressions: tuple[str, ...] = ()


ReadProblem = Callable[[Example], Problem]
"""Reads a row; raises ValueError for a row of another form."""


class QuestionFactory:
    """An EnvironmentFactory for rows that `read` understands."""

    def __init__(self, read: ReadProblem, *, answers_malformed: bool = False) -> None:
        self.read = read
        self.answers_malformed = answers_malformed
        self.tools = (CALCULATOR, FINAL_ANSWER)

    def new(self) -> QuestionEnvironment:
        return QuestionEnvironment(self.read, answers_malformed=self.answers_malformed)

    def check(self, example: Example) -> None:
        self.read(example)

    def demonstration(self, example: Example) -> Sequence[Message]:
        """One calculator turn for every expression that the calculator can evaluate, then the final answer."""
        problem = self.read(example)
        messages = [Message("user", problem.question)]
        for expression in problem.expressions:
            try:
                result = format_number(evaluate(expression))
            except CalculatorError:  # an annotation for people, say: the answer does not depend on this turn
                continue
            messages.append(Message("assistant", "", (ToolCall("calculator", {"expression": expression}),)))
            messages.append(Message("tool", result, name=CALCULATOR.name))
        messages.append(Message("assistant", "", (ToolCall("final_answer", {"answer": _json_number(problem.answer)}),)))
        return messages


class QuestionEnvironment:
    """One question."""

    def __init__(self, read: ReadProblem, *, answers_malformed: bool = False) -> None:
        self._read = read
        self._answers_malformed = answers_malformed
        self._problem: Problem | None = None

    async def reset(self, example: Example) -> Sequence[Message]:
        assert self._problem is None, "environments are for one episode"
        self._problem = self._read(example)
        return [Message("user", self._problem.question)]

    async def step(self, message: Message) -> StepResult:
        assert self._problem is not None, "reset comes before step"
        if message.parse_error and self._answers_malformed:
            return StepResult((Message("tool", f"error: {message.parse_error}"[:MAX_ERROR]),))
        if not message.tool_calls:
            return StepResult(done=True)
        answers = []
        errors = 0
        for call in message.tool_calls:
            if call.name == FINAL_ANSWER.name:
                right = same_number(_only_value(call), format_number(self._problem.answer))
                return StepResult(reward=float(right), done=True, tool_errors=errors)
            answer, failed = _calculate(call)
            answers.append(Message("tool", answer, name=call.name))
            errors += failed
        return StepResult(messages=tuple(answers), tool_errors=errors)

    async def close(self) -> None:
        return None


def _calculate(call: ToolCall) -> tuple[str, bool]:
    """The tool's answer and whether it is an error."""
    if call.name != CALCULATOR.name:
        return "error: the tools are calculator and final_answer", True
    expression = _only_value(call)
    if isinstance(expression, bool) or not isinstance(expression, str | int | float):
        return "error: calculator takes one expression", True
    try:
        return format_number(evaluate(str(expression) if isinstance(expression, str) else _plain(expression))), False
    except CalculatorError as error:
        return f"error: {error}", True


def _plain(number: float) -> str:
    value = parse_number(number)
    if value is None:
        raise CalculatorError("number too large")
    return format_number(value)


def _only_value(call: ToolCall) -> Any:
    """The value of a call's one argument, whatever its name; None for another number of arguments."""
    values = list(call.arguments.values())
    return values[0] if len(values) == 1 else None


def _json_number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(format_number(value))


def text_field(example: Example, key: str) -> str:
    """example[key], which must be text that is not blank."""
    value = example.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key!r} must be a text that is not empty")
    return value


def checked_expressions(expressions: Iterable[Any]) -> tuple[str, ...]:
    """The expressions as a tuple of texts."""
    found = tuple(expressions)
    if not all(isinstance(expression, str) for expression in found):
        raise ValueError("'expressions' must be a list of texts")
    return found
