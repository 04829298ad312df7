"""Episodes with calculator and final_answer, played message by message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clora_engine.environments import EnvironmentFactory, Example, Generates, Message, StepResult, ToolCall, create

GSM8K_ROWS = Path(__file__).parents[3] / "data" / "gsm8k" / "train.jsonl"
EXAMPLE = {"question": "How many?", "answer": "72", "expressions": ["100-7*4"]}


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", (ToolCall(name, arguments),))


async def play(*turns: Message) -> list[StepResult]:
    environment = create("WordProblems", {}).new()
    assert await environment.reset(EXAMPLE) == [Message("user", "How many?")]
    results = [await environment.step(turn) for turn in turns]
    await environment.close()
    return results


async def test_an_episode() -> None:
    first, last = await play(call("calculator", expression="100-7*4"), call("final_answer", answer=72))
    assert first == StepResult(messages=(Message("tool", "72", name="calculator"),))
    assert last == StepResult(reward=1.0, done=True)


@pytest.mark.parametrize("answer", [72, 72.0, "72", "$72.00", " 72 ", "144/2"])
async def test_right_answers_in_any_spelling(answer: object) -> None:
    assert await play(call("final_answer", answer=answer)) == [StepResult(reward=1.0, done=True)]


@pytest.mark.parametrize("answer", [71, "", "seventy-two", None, True, [72], {"a": 72}, "72 apples", 10**100])
async def test_wrong_answers_end_the_episode_without_reward(answer: object) -> None:
    assert await play(call("final_answer", answer=answer)) == [StepResult(reward=0.0, done=True)]


@pytest.mark.parametrize(
    "turn",
    [
        Message("assistant", "The answer is 72."),
        Message("assistant", "{", parse_error="not JSON"),
        call("final_answer"),
        call("final_answer", answer=72, unit="apples"),
    ],
)
async def test_only_a_proper_final_answer_earns_the_reward(turn: Message) -> None:
    assert await play(turn) == [StepResult(reward=0.0, done=True)]


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        (call("calculator", expression="9**9**9"), "error: exponents are whole numbers up to 64"),
        (call("calculator", expression=""), "error: empty expression"),
        (call("calculator", expression="٣"), "error: only numbers and + - * / ** % ( ) are allowed"),
        (call("calculator", expression="[" * 10_000_000), "error: longer than 200 characters"),
        (call("calculator", expression=["1"]), "error: calculator takes one expression"),
        (call("calculator", expression=None), "error: calculator takes one expression"),
        (call("calculator", expression=True), "error: calculator takes one expression"),
        (call("calculator", expression=10**100), "error: number too large"),
        (call("calculator", expression=1e300), "error: number too large"),
        (call("calculator"), "error: calculator takes one expression"),
        (call("calculator", a="1", b="2"), "error: calculator takes one expression"),
        (call("search", query="72"), "error: the tools are calculator and final_answer"),
    ],
)
async def test_calls_that_cannot_be_carried_out_are_answered(turn: Message, answer: str) -> None:
    failed, recovered = await play(turn, call("final_answer", answer=72))
    assert failed.messages[0].content == answer
    assert (failed.done, failed.tool_errors, failed.reward) == (False, 1, 0.0)
    assert recovered.reward == 1.0


@pytest.mark.parametrize(("expression", "answer"), [(72, "72"), (0.5, "0.5"), (1e-7, "0"), (-3, "-3")])
async def test_a_bare_number_is_an_expression(expression: float, answer: str) -> None:
    (result,) = await play(call("calculator", expression=expression))
    assert result == StepResult(messages=(Message("tool", answer, name="calculator"),))


async def test_several_calls_of_one_turn_are_answered_in_order() -> None:
    calls = tuple(ToolCall("calculator", {"expression": text}) for text in ("1+1", "x", "2+2"))
    (result,) = await play(Message("assistant", "", calls))
    assert [message.content[:6] for message in result.messages] == ["2", "error:", "4"]
    assert result.tool_errors == 1


async def earned(factory: EnvironmentFactory, example: Example) -> float:
    """Plays the demonstration; the environment must answer it exactly as the demonstration says."""
    messages = list(factory.demonstration(example))
    environment = factory.new()
    said = list(await environment.reset(example))
    reward = 0.0
    for message in messages:
        if message.role == "assistant":
            result = await environment.step(message)
            said += [message, *result.messages]
            reward += result.reward
    assert said == messages
    assert result.done
    return reward


async def test_demonstrations_earn_the_reward() -> None:
    problems = create("WordProblems", {"families": "OneStep,TwoStep"})
    assert isinstance(problems, Generates)
    assert [await earned(problems, problems.generate(3, "train", i)) for i in range(96)] == [1.0] * 96
    gsm8k = create("GSM8K", {})
    rows = [json.loads(line) for line in GSM8K_ROWS.read_text().splitlines()]
    assert [await earned(gsm8k, row) for row in rows] == [1.0] * 40


async def test_a_demonstration_leaves_out_what_the_calculator_cannot_do() -> None:
    factory = create("GSM8K", {})
    row = {"question": "Q?", "answer": "<<50%=0.5>>, then <<0.5*3=1.5>>\n#### 1.5"}
    assert [message.content for message in factory.demonstration(row)] == ["Q?", "", "1.5", ""]
    assert await earned(factory, row) == 1.0


def test_tools_are_declared_with_json_schemas() -> None:
    for tool in create("GSM8K", {}).tools:
        assert tool.parameters["type"] == "object"
        assert set(tool.parameters["required"]) == set(tool.parameters["properties"])
        assert tool.description
