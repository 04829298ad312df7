"""The part of OpenAI's API that tenants get: what a request may say, and what the answers look like.

A request is refused by the name of its field rather than answered in another way than it asks for. null is as good as
absent; a value that asks for nothing (top_p 1, no tools) passes; so do fields that change no answer (user, metadata).

Left out: streaming, for the sampler gives whole samples; tools; several prompts in one request; stop strings;
log-probs; truncating samplers (top_p, top_k), with which no experiment was trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clora_engine.environments.protocol import Message
from clora_engine.types import Sample, Version

MAX_CHOICES = 16
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's; a chat completion ends with the context
HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}


class RequestError(Exception):
    """Becomes OpenAI's error object, {"error": {message, type, param, code}}."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.kind = status, param, code, kind

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class _Request(BaseModel):
    """Strict: true is no number, "1" neither."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str = Field(max_length=320)
    temperature: float = Field(1.0, ge=0, le=2)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=0, le=2**63 - 1 - MAX_CHOICES)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None  # of who speaks; no template is told

    def message(self) -> Message:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message("system" if self.role == "developer" else self.role, text)


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)  # the former's older name

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]
    max_tokens: int = Field(DEFAULT_COMPLETION_TOKENS, ge=1)

    @property
    def limit(self) -> int | None:
        return self.max_tokens


R = TypeVar("R", ChatRequest, CompletionRequest)


def parse(kind: type[R], body: bytes) -> R:
    """A request's body. Raises RequestError, which names the field."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, "the body is not JSON") from None
    if not isinstance(given, dict):
        raise RequestError(400, "the body is no JSON object")
    kept = {}
    for name, value in given.items():
        if value is None or name in HARMLESS:
            continue
        if name not in NEUTRAL:
            kept[name] = value
        elif value not in NEUTRAL[name]:
            raise RequestError(400, _unsupported(name), param=name, code="unsupported_parameter")
    try:
        return kind.model_validate_json(json.dumps(kept))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            name = str(first["loc"][-1])
            raise RequestError(400, f"{path} is not supported", param=name, code="unsupported_parameter") from None
        # without a place: of a body that is JSON to Python alone, which lets half a surrogate pair pass
        param = str(first["loc"][0]) if first["loc"] else None
        where = f"{path}: " if path else ""
        raise RequestError(400, f"{where}{first['msg']}", param=param, code="invalid_value") from None


def _unsupported(name: str) -> str:
    if name == "stream":
        return "streaming is not supported: leave stream out, and the whole answer comes at once"
    if name in ("top_p", "top_k", "min_p"):
        return f"{name} is not supported: experiments are trained, and answer, with the whole distribution"
    return f"{name} is not supported: leave it out"


# ------------------------------------------------------------------------------------------------ answers


def model_object(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "clora"}


def chat_choice(index: int, text: str, sample: Sample) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "finish_reason": _finish(sample), "logprobs": None}


def completion_choice(index: int, text: str, sample: Sample) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": _finish(sample), "logprobs": None}


def answer(
    kind: Literal["chat.completion", "text_completion"],
    *,
    identifier: str,
    created: int,
    version: Version,
    name: str,
    choices: list[dict[str, Any]],
    prompt_tokens: int,
    samples: Sequence[Sample],
) -> dict[str, Any]:
    """`system_fingerprint` says which step of the experiment has answered."""
    generated = sum(len(sample.ids) for sample in samples)
    prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
    return {
        "id": f"{prefix}-{identifier}",
        "object": kind,
        "created": created,
        "model": name,
        "system_fingerprint": f"{name}@{version.step}",
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        },
    }


def _finish(sample: Sample) -> str:
    return "length" if sample.truncated else "stop"
