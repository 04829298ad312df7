"""Qwen's and Llama's turns as their own chat templates write them.

TURNS was taken from the templates of the models named there, for one conversation: what follows the prompt, up to the
end. The templates of chat_fixtures.py are shorter, but must write these very turns, and the formats must read them.
vLLM brings the template of a model that is built on Qwen3 and opens its turns with an empty thought; it is read as it
is installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from clora_engine.chat import Renderer
from clora_engine.environments import Message, ToolCall, create
from clora_engine.errors import UserError
from clora_engine.tool_formats import Hermes, Llama3, ToolFormat
from tests.unit.engine.chat_fixtures import HERMES, LLAMA3, tiny_tokenizer

FACTORY = create("WordProblems", {})
EXAMPLE = {"question": "How many?", "answer": "72", "expressions": ["100-7*4"]}
CALL, ANSWER = ToolCall("calculator", {"expression": "100-7*4"}), ToolCall("final_answer", {"answer": 72})

QWEN = """\
<tool_call>
{"name": "calculator", "arguments": {"expression": "100-7*4"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
72
</tool_response><|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "final_answer", "arguments": {"answer": 72}}
</tool_call><|im_end|>"""
LLAMA = """\
{"name": "calculator", "parameters": {"expression": "100-7*4"}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>

"72"<|eot_id|><|start_header_id|>assistant<|end_header_id|>

{"name": "final_answer", "parameters": {"answer": 72}}<|eot_id|>"""
TURNS: dict[str, tuple[str, str, ToolFormat]] = {
    "Qwen2.5-7B-Instruct": (QWEN, HERMES, Hermes()),
    "Qwen3-0.6B": (QWEN, HERMES, Hermes()),
    "Llama-3.1-8B-Instruct": (LLAMA, LLAMA3, Llama3()),
    "Llama-3.2-3B-Instruct": (LLAMA, LLAMA3, Llama3()),
    "Llama-3.3-70B-Instruct": (LLAMA, LLAMA3, Llama3()),
}
ENDS = ("<|im_end|>", "<|eot_id|>")


@pytest.mark.parametrize("model", TURNS)
def test_an_episode_reads_as_the_models_own_template_writes_it(model: str) -> None:
    turns, template, tool_format = TURNS[model]
    tokenizer = tiny_tokenizer(template)
    found = Renderer(tokenizer, FACTORY.tools).demonstration(FACTORY.demonstration(EXAMPLE))
    assert tokenizer.decode(found.ids) == turns
    assert Renderer(tokenizer, FACTORY.tools).format_name == tool_format.name


@pytest.mark.parametrize("model", TURNS)
def test_the_models_own_turns_are_read_and_written(model: str) -> None:
    turns, _, tool_format = TURNS[model]
    end = next(end for end in ENDS if end in turns)
    first, last = turns.partition(end)[0], turns.removesuffix(end).rpartition("assistant")[2]
    last = last.removeprefix("<|end_header_id|>").lstrip("\n")
    for text, call in ((first, CALL), (last, ANSWER)):
        assert tool_format.parse(text) == Message("assistant", "", (call,))
        assert tool_format.write(Message("assistant", "", (call,))) == text


MALFORMED: tuple[tuple[ToolFormat, str, str], ...] = (
    (Hermes(), '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}', "not closed"),
    (Hermes(), "<tool_call>\n{'name': 'calculator'}\n</tool_call>", "not JSON"),
    (Hermes(), '<tool_call>\n{"name": "calculator", "arguments": "1+1"}\n</tool_call>', "no object 'arguments'"),
    (Hermes(), "<tool_call>\n<function=calculator>\n</tool_call>", "not JSON"),
    (Llama3(), '{"name": "calculator", "parameters": {"expression": "1"}}; {"name": "final_answer"}', "not JSON"),
    (Llama3(), '{"name": "calculator", "parameters": "1+1"}', "no object 'parameters'"),
    (Llama3(), '{"type": "function", "function": {}}', "with a 'name'"),
    (Llama3(), "<|python_tag|>{", "not JSON"),
)


@pytest.mark.parametrize(("tool_format", "written", "what"), MALFORMED, ids=lambda value: str(value)[:24])
async def test_a_malformed_call_is_told_and_ends_no_process(tool_format: ToolFormat, written: str, what: str) -> None:
    message = tool_format.parse(written)
    assert what in message.parse_error
    assert (message.content, message.tool_calls) == (written, ())
    environment = FACTORY.new()
    await environment.reset(EXAMPLE)
    assert (await environment.step(message)).done


def test_an_installed_template_that_rewrites_its_turns_is_refused_at_admission() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "transformers_utils" / "chat_templates"
    renderer = Renderer(tiny_tokenizer((folder / "template_minicpmv45.jinja").read_text()), FACTORY.tools)
    assert renderer.format_name == "Hermes"
    call = renderer.demonstration([Message("user", "Hi"), Message("assistant", "", (CALL,))])
    assert renderer.parse(call.ids).tool_calls == (CALL,)
    with pytest.raises(UserError, match="changes what came before the model's turn") as caught:
        renderer.check_appends()
    assert (caught.value.field, caught.value.reason) == ("environment", "ChatTemplateUnsupported")
