"""A tiny byte-level tokenizer and chat templates in the formats of the families that clora knows."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
)

CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Tools in the system message, calls in tags, results within a user turn, reasoning only kept after the last question.
HERMES = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}{% for t in tools %}{{ '\\n' + (t | tojson) }}{% endfor %}\
{{ '\\nCall as <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}{% endif %}
{%- set last = namespace(question=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{%- set content = m.content %}
{%- if '</think>' in content and loop.index0 < last.question %}\
{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + content }}
{%- if m.tool_calls %}{% for c in m.tool_calls %}{% if content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Tools and date before the first question, one call a turn as bare JSON, results with a role of their own.
LLAMA3 = """\
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{{- bos_token }}{% set date = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{{- head('system') + 'Today: ' + date + '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ head('ipython') + (m.content | tojson) + '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set c = m.tool_calls[0].function %}
{{- head('assistant') + '{"name": "' + c.name + '", "parameters": ' + (c.arguments | tojson) }}
{{- '}<|eot_id|>' }}
{%- else %}{{ head(m.role) }}
{%- if loop.first and tools %}{% for t in tools %}{{ (t | tojson) + '\\n\\n' }}{% endfor %}{% endif %}
{{- m.content + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

# Neither system nor tool messages; turns alternate.
ALTERNATING = """\
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# Declares tools, but writes calls in a way of its own.
FOREIGN_CALLS = """\
{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '<function=' + c.function.name + '>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Opens the turn that is to be written with a tag that is missing once the turn is history.
REWRITING = CHATML.replace("assistant\\n'", "assistant\\n<think>\\n'")

# Numbers the conversation at its head, so that every message changes the first line.
COUNTING = "{{ '<|im_start|>' + (messages | length | string) + '<|im_end|>\\n' }}" + CHATML


def tiny_tokenizer(template: str | None) -> Any:
    """256 bytes, a few merges, the special tokens, and `template`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(['{"calculator": "12*5-3"}', '{"final_answer": 57}', "How many are left?"], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin_of_text|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL),
        clean_up_tokenization_spaces=False,
    )
    if template is not None:
        wrapped.chat_template = template
    return wrapped
