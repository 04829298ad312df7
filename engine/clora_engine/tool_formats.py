"""How a tool call is written in text: a pair of functions per format, tokens and templates left to chat.py.

Hermes  `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes models do it.
Llama3  one JSON object, `{"name": ..., "parameters": {...}}`, as Llama 3.1 and later do it.
Text    clora's own protocol for models whose template knows no tools: a turn is one JSON object with the tool's name as
        its only key, `{"calculator": "100-7*4"}`; a tool with one parameter takes the bare value, any other an object.
        The system message names the tools by example. Small models learn it from a few dozen demonstrations.

Parsing never raises: what a model wrote is data, and a Message with `parse_error` says what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from clora_engine.environments.protocol import Message, Tool, ToolCall

FormatName = Literal["Hermes", "Llama3", "Text", "Plain"]


class ToolFormat(Protocol):
    """One way to write tool calls. `stop_tokens` end a turn besides the template's own end-of-turn token."""

    name: FormatName
    stop_tokens: tuple[str, ...]

    def write(self, message: Message) -> str:
        """The text of an assistant's message, without its end-of-turn token. Raises ValueError if it cannot be
        written."""
        ...

    def parse(self, text: str) -> Message:
        """The assistant's message that `text` is."""
        ...


class Plain:
    """No tools: a turn is its text."""

    name: FormatName = "Plain"
    stop_tokens: tuple[str, ...] = ()

    def write(self, message: Message) -> str:
        if message.tool_calls:
            raise ValueError("a tool call, but no tools are declared")
        return message.content

    def parse(self, text: str) -> Message:
        return Message("assistant", text)


class Hermes:
    """JSON between <tool_call> tags, any number of calls, text before them."""

    name: FormatName = "Hermes"
    stop_tokens: tuple[str, ...] = ()

    def write(self, message: Message) -> str:
        calls = [f"<tool_call>\n{_call_json(call, 'arguments')}\n</tool_call>" for call in message.tool_calls]
        return "\n".join([message.content, *calls] if message.content else calls)

    def parse(self, text: str) -> Message:
        # a call that the model only thinks about is not made
        thought, end, spoken = text.rpartition("</think>")
        # no regular expression: a model can write what makes one take quadratic time
        before, *rest = spoken.split("<tool_call>")
        if not rest:
            return Message("assistant", text)
        bodies = [part.partition("</tool_call>") for part in rest]
        if not all(closed for _, closed, _ in bodies):
            return Message("assistant", text, parse_error="a <tool_call> that is not closed")
        try:
            calls = tuple(_named_call(_decode(body.strip()), ("arguments",)) for body, _, _ in bodies)
        except ValueError as error:
            return Message("assistant", text, parse_error=str(error))
        return Message("assistant", (thought + end + before).strip(), calls)


class Llama3:
    """One JSON object as the whole turn, or plain text."""

    name: FormatName = "Llama3"
    stop_tokens: tuple[str, ...] = ("<|eom_id|>",)

    def write(self, message: Message) -> str:
        if not message.tool_calls:
            return message.content
        if len(message.tool_calls) > 1 or message.content:
            raise ValueError("the model's tool format holds one call a turn and no text beside it")
        return _call_json(message.tool_calls[0], "parameters")

    def parse(self, text: str) -> Message:
        body = text.strip().removeprefix("<|python_tag|>")
        if not body.startswith("{"):
            return Message("assistant", text)
        try:
            return Message("assistant", "", (_named_call(_decode(body), ("parameters", "arguments")),))
        except ValueError as error:
            return Message("assistant", text, parse_error=str(error))


class Text:
    """clora's text protocol; it needs the tools to know the name of a bare value's parameter."""

    name: FormatName = "Text"
    stop_tokens: tuple[str, ...] = ()

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._parameters = {tool.name: _properties(tool) for tool in tools}

    def instructions(self) -> str:
        """The system message's text: `Use one tool per turn: {"calculator": "expression"} or ...`."""
        return "Use one tool per turn: " + " or ".join(
            f"{{{json.dumps(name)}: {_placeholder(properties)}}}" for name, properties in self._parameters.items()
        )

    def write(self, message: Message) -> str:
        if not message.tool_calls:
            return message.content
        if len(message.tool_calls) > 1 or message.content:
            raise ValueError("a turn of the text protocol holds one call and no text beside it")
        call = message.tool_calls[0]
        bare = len(self._parameters.get(call.name, ())) == 1 and len(call.arguments) == 1
        value = next(iter(call.arguments.values())) if bare else dict(call.arguments)
        return json.dumps({call.name: value}, ensure_ascii=False)

    def parse(self, text: str) -> Message:
        try:
            found = _decode(text)
        except ValueError as error:
            return Message("assistant", text, parse_error=str(error))
        if not isinstance(found, dict) or len(found) != 1:
            return Message("assistant", text, parse_error="not a JSON object with one tool's name as its only key")
        ((name, value),) = found.items()
        return Message("assistant", "", (ToolCall(name, self._arguments(name, value)),))

    def _arguments(self, name: str, value: Any) -> dict[str, Any]:
        names = list(self._parameters.get(name, ()))
        if isinstance(value, dict) and (len(names) != 1 or list(value) == names):
            return value
        return {names[0] if len(names) == 1 else "value": value}


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    return properties


def _placeholder(properties: Mapping[str, Any]) -> str:
    """What stands for a tool's value in the instructions: a text's name in quotes, any other value's JSON type."""
    shown = {
        name: json.dumps(name) if schema.get("type") == "string" else str(schema.get("type", "value"))
        for name, schema in properties.items()
    }
    if len(shown) == 1:
        return next(iter(shown.values()))
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in shown.items()) + "}"


def _call_json(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: dict(call.arguments)}, ensure_ascii=False)


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None


def _named_call(found: Any, keys: Sequence[str]) -> ToolCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError("not a JSON object with a 'name'")
    for key in keys:
        if isinstance(found.get(key), dict):
            return ToolCall(found["name"], found[key])
    raise ValueError(f"no object {keys[0]!r}")
