"""Tool calls as text: what models write, well-formed and not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clora_engine.environments import Message, Tool, ToolCall
from clora_engine.environments.questions import CALCULATOR, FINAL_ANSWER
from clora_engine.tool_formats import Hermes, Llama3, Plain, Text, ToolFormat

SEARCH = Tool(
    "search", "", {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}
)
PING = Tool("ping", "", {"type": "object"})
FORMATS: list[ToolFormat] = [Plain(), Hermes(), Llama3(), Text([CALCULATOR, FINAL_ANSWER, SEARCH, PING])]


@pytest.mark.parametrize(
    ("written", "name", "arguments"),
    [
        ('{"calculator": "1+1"}', "calculator", {"expression": "1+1"}),
        (' {"calculator" : "1+1"}\n', "calculator", {"expression": "1+1"}),
        ('{"calculator": {"expression": "1+1"}}', "calculator", {"expression": "1+1"}),
        ('{"calculator": {"other": 1}}', "calculator", {"expression": {"other": 1}}),
        ('{"final_answer": 72}', "final_answer", {"answer": 72}),
        ('{"final_answer": null}', "final_answer", {"answer": None}),
        ('{"search": {"query": "a", "limit": 3}}', "search", {"query": "a", "limit": 3}),
        ('{"search": "a"}', "search", {"value": "a"}),
        ('{"unknown": 1}', "unknown", {"value": 1}),
        ('{"ping": {}}', "ping", {}),
    ],
)
def test_text_protocol(written: str, name: str, arguments: dict[str, object]) -> None:
    assert FORMATS[-1].parse(written) == Message("assistant", "", (ToolCall(name, arguments),))


@pytest.mark.parametrize(
    "written",
    [
        "",
        "72",
        "The answer is 72.",
        '{"calculator": "1+1"',
        '{"calculator": "1+1"} {"final_answer": 2}',
        '{"calculator": "1+1", "final_answer": 2}',
        "{}",
        "[]",
        '{"final_answer": NaN}',
        '{"final_answer": ' + "[" * 100_000,
        '{"final_answer": ' + "{" * 5 + "}",
        '{"\ud800": 1}',
    ],
)
def test_text_protocol_says_what_is_wrong(written: str) -> None:
    message = FORMATS[-1].parse(written)
    assert message.parse_error
    assert not message.tool_calls
    assert message.content == written


def test_instructions_name_every_tool_by_example() -> None:
    text = Text([CALCULATOR, FINAL_ANSWER, SEARCH, PING]).instructions()
    assert text == (
        'Use one tool per turn: {"calculator": "expression"} or {"final_answer": number}'
        ' or {"search": {"query": "query", "limit": integer}} or {"ping": {}}'
    )


def test_hermes_reads_text_before_several_calls() -> None:
    written = (
        "<think>\nI could <tool_call> here\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>\n'
        '<tool_call>{"name": "calculator", "arguments": {"expression": "2"}}</tool_call>'
    )
    message = Hermes().parse(written)
    assert [call.arguments["expression"] for call in message.tool_calls] == ["1", "2"]
    assert message.content == "<think>\nI could <tool_call> here\n</think>\n\nLet me see."
    assert not message.parse_error


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ("<tool_call>", "not closed"),
        ('<tool_call>{"name": "x", "arguments": {}}', "not closed"),
        ("<tool_call></tool_call>", "not JSON"),
        ("<tool_call>[]</tool_call>", "with a 'name'"),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', "with a 'name'"),
        ('<tool_call>{"name": "x"}</tool_call>', "no object 'arguments'"),
        ('<tool_call>{"name": "x", "arguments": "{}"}</tool_call>', "no object 'arguments'"),
    ],
)
def test_hermes_says_what_is_wrong(written: str, what: str) -> None:
    message = Hermes().parse(written)
    assert what in message.parse_error
    assert not message.tool_calls


def test_llama3() -> None:
    call = ToolCall("calculator", {"expression": "1"})
    for written in (
        '{"name": "calculator", "parameters": {"expression": "1"}}',
        '<|python_tag|>{"name": "calculator", "arguments": {"expression": "1"}}',
    ):
        assert Llama3().parse(written).tool_calls == (call,)
    assert Llama3().parse("It is 1.") == Message("assistant", "It is 1.")
    assert Llama3().parse('{"name": "calculator"}').parse_error == "no object 'parameters'"
    assert Llama3().write(Message("assistant", "It is 1.")) == "It is 1."


def test_what_a_format_cannot_hold_is_refused() -> None:
    call = ToolCall("calculator", {"expression": "1"})
    for unwritable, tool_format in (
        (Message("assistant", "", (call,)), FORMATS[0]),
        (Message("assistant", "", (call, call)), FORMATS[2]),
        (Message("assistant", "text", (call,)), FORMATS[2]),
        (Message("assistant", "text", (call,)), FORMATS[3]),
        (Message("assistant", "", (call, call)), FORMATS[3]),
    ):
        with pytest.raises(ValueError):
            tool_format.write(unwritable)


@given(st.text())
def test_no_text_makes_a_format_raise(written: str) -> None:
    for tool_format in FORMATS:
        for text in (written, "{" + written, f"<tool_call>{written}</tool_call>"):
            assert tool_format.parse(text).role == "assistant"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text("abc", min_size=1), children, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["query", "limit"]), _JSON, min_size=2, max_size=2))
def test_calls_come_back_as_they_were_written(arguments: dict[str, object]) -> None:
    call = ToolCall("search", arguments)
    for tool_format in FORMATS[1:]:
        if isinstance(tool_format, Hermes) and any(tag in str(arguments) for tag in ("<tool_call>", "</think>")):
            continue
        assert tool_format.parse(tool_format.write(Message("assistant", "", (call,)))).tool_calls == (call,)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("written", "wrong"),
    [
        ("<tool_call>" + " " * 200_000, "not closed"),
        ("<tool_call>" * 20_000, "not closed"),
        ("<tool_call>" * 20_000 + "</tool_call>", "not closed"),
        ("<tool_call>" + " " * 200_000 + "</tool_call>", "not JSON"),
        ("</think>" * 20_000 + "<tool_call>" + "\n{" * 50_000, "not closed"),
    ],
)
def test_the_time_to_parse_grows_with_the_length_alone(written: str, wrong: str) -> None:
    message = Hermes().parse(written)
    assert wrong in message.parse_error
    assert message.content == written
