"""Tenants' requests, prompts and answers: bytes and text on one side, what the sampler takes and gives on the other."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

from clora_engine.chat import MessagesError, Renderer
from clora_engine.environments.protocol import Message
from clora_engine.fair_threads import FairThreads
from clora_engine.server import openai
from clora_engine.server.openai import ChatRequest, CompletionRequest, R, RequestError
from clora_engine.supervisor import Supervisor
from clora_engine.types import Sample

THREADS = 2
INLINE_BYTES = 1 << 13  # of a body that is read on the event loop: a millisecond


class Words:
    """Requests, prompts and answers as tokens, in threads of their own, with a tokenizer of their own: a long prompt
    holds up neither training nor the control API, and other tenants by one text at most. Each call names its tenant's
    experiment (`uid`)."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._threads = FairThreads(THREADS, "tenants-words")
        self._making = threading.Lock()
        self._made: tuple[Any, Renderer] | None = None

    async def parse(self, uid: str, kind: type[R], body: bytes) -> R:
        """As openai.parse."""
        if len(body) <= INLINE_BYTES:
            return openai.parse(kind, body)
        return await self._threads.run(uid, lambda: openai.parse(kind, body))

    async def prompt(self, uid: str, asked: ChatRequest | CompletionRequest) -> list[int]:
        """The tokens to sample after. Raises RequestError."""
        if isinstance(asked, ChatRequest):
            return await self.chat(uid, [message.message() for message in asked.messages])
        return await self.text(uid, asked.prompt) if isinstance(asked.prompt, str) else asked.prompt

    async def chat(self, uid: str, messages: Sequence[Message]) -> list[int]:
        """Raises RequestError for a conversation that the model's template or context does not hold."""

        def render() -> list[int]:
            self._check_length(sum(len(message.content) for message in messages))
            try:
                return self._parts()[1].prompt(messages)
            except MessagesError as error:
                raise RequestError(400, str(error), param="messages", code="invalid_value") from None

        return await self._threads.run(uid, render)

    async def text(self, uid: str, text: str) -> list[int]:
        """Raises RequestError for what cannot fit the context."""

        def encode() -> list[int]:
            self._check_length(len(text))
            ids: list[int] = self._parts()[0].encode(text)
            return ids

        return await self._threads.run(uid, encode)

    def _check_length(self, characters: int) -> None:
        """What cannot fit by its characters alone is not encoded, which takes seconds for a MiB."""
        context = self._supervisor.max_model_len
        if characters // self._parts()[1].longest_token >= context:
            message = f"the prompt has {characters} characters, which do not fit a context of {context} tokens"
            raise RequestError(400, message, code="context_length_exceeded")

    async def stop_token_ids(self, uid: str) -> tuple[int, ...]:
        return await self._threads.run(uid, lambda: self._parts()[1].stop_token_ids)

    async def texts(self, uid: str, samples: Sequence[Sample]) -> list[str]:
        """Without special tokens, the one that ends a turn among them."""

        def decode() -> list[str]:
            tokenizer = self._parts()[0]
            return [tokenizer.decode(list(sample.ids), skip_special_tokens=True) for sample in samples]

        return await self._threads.run(uid, decode)

    def _parts(self) -> tuple[Any, Renderer]:
        with self._making:
            if self._made is None:
                # Made and tried by one thread: what a first call changes in a tokenizer, no other may meet half done.
                tokenizer = copy.deepcopy(self._supervisor.tokenizer)
                renderer = Renderer(tokenizer)
                renderer.prompt([Message("user", "?")])
                self._made = tokenizer, renderer
            return self._made
