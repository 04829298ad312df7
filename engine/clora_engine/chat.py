"""From messages to tokens and back, by the model's own chat template.

A Renderer belongs to one model and one set of tools. It makes the prompt, reads what the model sampled, and makes the
tokens that follow the model's own: an episode's tokens are only ever appended to, and what was sampled is never decoded
and encoded again. That the template agrees with such appending is checked once, at admission.

The tool format is found by asking the template: it is shown a tool and a call and its output is read. What knows no
tools, or writes calls in a way that clora does not read, uses the text protocol of tool_formats.Text. Left out:
images, templates with options (a template runs with its defaults), several calls a turn in the text protocol.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from clora_engine.environments.protocol import Message, Tool, ToolCall
from clora_engine.errors import UserError
from clora_engine.tool_formats import FormatName, Hermes, Llama3, Plain, Text, ToolFormat

# Llama's templates print today's date unless they are given one; a prompt must depend on its messages alone.
_DATE = "26 Jul 2024"

_PROBE_QUESTION = "clora-probe-question"
_PROBE_TURN = "clora-probe-turn"
_PROBE_RESULT = "clora-probe-result"
_PROBE_THOUGHT = "<think>\nclora-probe-thought\n</think>\n\n"
_PROBE_ANSWER = Message("user", _PROBE_RESULT)
_PROBE_TOOL = Tool(
    "clora_probe",
    "probe",
    {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
)
_PROBE_CALL = ToolCall("clora_probe", {"value": "1"})


# Tags that models write within their turns; some tokenizers have them as special tokens.
_WITHIN_TURNS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


class MessagesError(ValueError):
    """Messages that this model's template cannot hold. Starts with a reason: `BadMessages: ` or `SpecialToken: `."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation as tokens: `ids` follow the prompt; `mask` (of the same length) is 1 where the assistant
    speaks."""

    prompt: list[int]
    ids: list[int]
    mask: list[int]


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a local checkpoint; runs no code from the checkpoint and asks no hub.

    Raises:
        UserError: the folder has no usable tokenizer (field `model`).
    """
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"the model has no usable tokenizer: {error}", reason="InvalidModel", field="model") from error


class Renderer:
    """Messages <-> tokens for one model and one set of tools.

    Args:
        tokenizer: a transformers tokenizer with a chat template; shared, never changed.
        tools: declared to the model in every prompt; without any, a turn is plain text.

    Attributes:
        longest_token: characters that a token of the vocabulary stands for at most.

    Raises:
        UserError: the tokenizer has no chat template, or one that cannot hold a conversation (field `model`); a tool's
        description holds a special token (field `environment`).
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Tool] = ()) -> None:
        if not tokenizer.chat_template:
            raise _unsupported("the model's tokenizer has no chat template; use an instruction-tuned model")
        self._tokenizer = tokenizer
        self._tools = tuple(tools)
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = tuple(sorted(special.difference(_WITHIN_TURNS)))
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        self._check_tools()
        self._end_of_turn = self._find_end_of_turn()
        self._end_text: str = tokenizer.convert_ids_to_tokens(self._end_of_turn)
        self._format = self._find_format()
        self._stop_token_ids = self._find_stop_tokens()
        native = self._format.name in ("Hermes", "Llama3")
        self._declared = [_tool_dict(tool) for tool in self._tools] if native else None
        self._keeps_system = self._holds([Message("system", _PROBE_TURN), Message("user", _PROBE_QUESTION)])
        self._tool_role = "tool" if self._holds_result("tool") else "user"
        if self._tool_role == "user" and self._tools and not self._holds_result("user"):
            raise _unsupported("the chat template renders no message after the model's first turn")

    @property
    def format_name(self) -> FormatName:
        """How this model writes tool calls."""
        return self._format.name

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn of the model; each is part of the turn's ids."""
        return self._stop_token_ids

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens before the model's first turn. Raises MessagesError."""
        self._check_contents(messages)
        return self._encode(self._render(self._with_instructions(messages)))

    def parse(self, ids: Sequence[int]) -> Message:
        """The model's turn. Malformed tool calls give a Message with `parse_error`; this never raises."""
        body = ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
        text: str = self._tokenizer.decode(list(body), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._format.parse(text)

    def observation(self, messages: Sequence[Message]) -> list[int]:
        """The tokens between the end of the model's turn and the start of its next. Raises MessagesError."""
        self._check_contents(messages)
        return self._encode(self._observation_text(messages))

    def demonstration(self, messages: Sequence[Message]) -> Demonstration:
        """A whole conversation, built exactly as an episode of it would be.

        Raises:
            ValueError: the assistant does not speak last, speaks first, or writes what the tool format cannot hold.
            MessagesError: the template refuses it, or a special token is in it.
        """
        if not messages or messages[-1].role != "assistant" or messages[0].role == "assistant":
            raise ValueError("a demonstration starts with another's message and ends with the assistant's")
        first = next(i for i, message in enumerate(messages) if message.role == "assistant")
        ids: list[int] = []
        mask: list[int] = []
        others: list[Message] = []
        for message in messages[first:]:
            if message.role != "assistant":
                others.append(message)
                continue
            if ids:
                between = self.observation(others)
                ids, mask, others = ids + between, mask + [0] * len(between), []
            written = self._format.write(message)
            self.check_text(written)
            turn = [*self._encode(written), self._end_of_turn]
            ids, mask = ids + turn, mask + [1] * len(turn)
        return Demonstration(self.prompt(messages[:first]), ids, mask)

    def check_text(self, text: str) -> None:
        """Raises MessagesError for text that holds one of the tokenizer's special tokens: encoded, it would end the
        turn, or begin another's."""
        found = next((token for token in self._special if token in text), None)
        if found is not None:
            raise MessagesError(f"SpecialToken: {found} is a special token of the model: leave it out of the text")

    def check_appends(self) -> None:
        """Checks that the template's rendering of a longer conversation extends that of a shorter one.

        To be called at admission of an experiment with more than one turn. What it catches: templates that drop the
        model's reasoning from earlier turns, or open a turn with text that they later leave out. Their histories in
        training would differ from those that the trained model meets when it is served.

        Raises:
            UserError: with field `environment` and what the template does.
        """
        question = [Message("user", _PROBE_QUESTION)]
        thinks = "</think>" in str(self._tokenizer.chat_template)
        turn = self._probe_turn(_PROBE_THOUGHT if thinks else "")
        result = [Message("tool", _PROBE_RESULT, name=_PROBE_TOOL.name) if self._tools else _PROBE_ANSWER]
        try:
            before = self._render(self._with_instructions(question))
            after = self._render(self._with_instructions([*question, turn, *result]))
        except MessagesError as error:
            raise _unsupported(str(error)) from None
        problem = ""
        if not after.startswith(before):
            problem = "changes what came before the model's turn once the conversation goes on"
        elif thinks and _PROBE_THOUGHT.strip() not in after:
            problem = "drops the model's reasoning from earlier turns"
        elif not after.endswith(self._end_text + self._observation_text(result)):
            problem = "renders a later message differently according to what came before it"
        if problem:
            raise UserError(
                f"the model's chat template {problem}, so a conversation cannot be trained on as one sequence; "
                "use an environment with one turn, or a model whose template only appends",
                reason="ChatTemplateUnsupported",
                field="environment",
            )

    # ------------------------------------------------------------------------------------------ the template, asked

    def _find_end_of_turn(self) -> int:
        try:
            text = self._apply([_user(_PROBE_QUESTION), {"role": "assistant", "content": _PROBE_TURN}])
        except MessagesError as error:
            raise _unsupported(str(error)) from None
        _, found, rest = text.partition(_PROBE_TURN)
        special = set(self._tokenizer.added_tokens_decoder) | set(self._tokenizer.all_special_ids)
        end = next((token for token in self._encode(rest) if token in special), None)
        if not found or end is None:
            raise _unsupported("the chat template ends an assistant's message with no special token")
        return int(end)

    def _find_stop_tokens(self) -> tuple[int, ...]:
        vocabulary = self._tokenizer.get_vocab()
        extra = [vocabulary[token] for token in self._format.stop_tokens if token in vocabulary]
        eos = self._tokenizer.eos_token_id
        return tuple(sorted({self._end_of_turn, *extra, *([] if eos is None else [eos])}))

    def _find_format(self) -> ToolFormat:
        if not self._tools:
            return Plain()
        probe = [_tool_dict(_PROBE_TOOL)]
        try:
            before = self._apply([_user(_PROBE_QUESTION)], tools=probe, generate=True)
            call = _message_dict(Message("assistant", "", (_PROBE_CALL,)), "assistant")
            after = self._apply([_user(_PROBE_QUESTION), call], tools=probe)
        except MessagesError:
            return Text(self._tools)
        if _PROBE_TOOL.name in before and after.startswith(before):
            turn = after.removeprefix(before).partition(self._end_text)[0]
            for native in (Hermes(), Llama3()):
                if native.parse(turn).tool_calls == (_PROBE_CALL,):
                    return native
        return Text(self._tools)

    def _holds(self, messages: Sequence[Message]) -> bool:
        """Whether the template renders the content of every message."""
        try:
            text = self._apply([_message_dict(message, message.role) for message in messages])
        except MessagesError:
            return False
        return all(message.content in text for message in messages)

    def _holds_result(self, role: str) -> bool:
        result = Message("tool", _PROBE_RESULT, name=_PROBE_TOOL.name) if role == "tool" else _PROBE_ANSWER
        return self._holds([Message("user", _PROBE_QUESTION), Message("assistant", _PROBE_TURN), result])

    def _probe_turn(self, thought: str) -> Message:
        if not self._tools:
            return Message("assistant", thought + _PROBE_TURN)
        call = ToolCall(self._tools[0].name, dict.fromkeys(self._tools[0].parameters.get("properties", {}), "1"))
        if isinstance(self._format, Text):
            return Message("assistant", thought + self._format.write(Message("assistant", "", (call,))))
        return Message("assistant", thought, (call,))

    # ------------------------------------------------------------------------------------------ rendering

    def _with_instructions(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the text protocol's instructions, and without a system message if the template has none."""
        found = list(messages)
        if isinstance(self._format, Text):
            instructions = self._format.instructions()
            if found and found[0].role == "system":
                found[0] = Message("system", f"{found[0].content}\n\n{instructions}")
            else:
                found.insert(0, Message("system", instructions))
        if len(found) > 1 and found[0].role == "system" and not self._keeps_system:
            found[:2] = [Message(found[1].role, f"{found[0].content}\n\n{found[1].content}")]
        return found

    def _observation_text(self, messages: Sequence[Message]) -> str:
        history = [Message("user", _PROBE_QUESTION), Message("assistant", _PROBE_TURN)]
        text = self._render([*history, *messages])
        return text.partition(_PROBE_TURN)[2].partition(self._end_text)[2]

    def _render(self, messages: Sequence[Message]) -> str:
        dicts = [_message_dict(m, self._tool_role if m.role == "tool" else m.role) for m in messages]
        return self._apply(dicts, tools=self._declared, generate=True)

    def _apply(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, generate: bool = False
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generate, tokenize=False, date_string=_DATE
            )
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise MessagesError(f"BadMessages: the chat template refuses the conversation: {error}") from error
        return text

    def _check_contents(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.check_text(message.content)
            self.check_text(message.name)

    def _check_tools(self) -> None:
        try:
            self.check_text(json.dumps([_tool_dict(tool) for tool in self._tools], ensure_ascii=False))
        except MessagesError as error:
            raise UserError(f"a tool of the environment: {error}", field="environment") from None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _unsupported(message: str) -> UserError:
    return UserError(message, reason="ChatTemplateUnsupported", field="model")


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _message_dict(message: Message, role: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": role, "content": message.content}
    if message.name:
        found["name"] = message.name
    if message.tool_calls:  # the key's mere presence means something to Llama's template
        found["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    return found


def _tool_dict(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
