"""What environments say, as tokens: within the context, and off the event loop when it is long.

An environment is not trusted: a text may be a MiB, which takes a tokenizer seconds. What cannot fit by its characters
alone is refused unread; any other long text is encoded on a few threads, one text of an experiment at a time and the
experiments in turn, so that neither the other experiments' turns nor the engine's commits wait for it. (A fast
tokenizer lets go of Python's lock while it encodes.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from clora_engine.chat import MessagesError, Renderer
from clora_engine.environments.protocol import Message
from clora_engine.fair_threads import FairThreads

T = TypeVar("T")
INLINE_CHARACTERS = 1 << 13  # milliseconds on the event loop; a switch of threads would cost short ones more
INLINE_TOKENS = 1 << 11
_threads = FairThreads(2, "encode")


async def encoded_apart(experiment: str, call: Callable[[], T]) -> T:
    """What turns an experiment's texts into tokens, or back, in its turn on the threads for such."""
    return await _threads.run(experiment, call)


class TooLongError(MessagesError):
    """More tokens than there is room for."""


class Rendering:
    """Prompts, turns and observations of an experiment's episodes with at most `max_context` tokens, the model's next
    one included."""

    def __init__(self, renderer: Renderer, max_context: int, experiment: str) -> None:
        self._renderer = renderer
        self._max_context = max_context
        self._experiment = experiment

    async def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Raises MessagesError; TooLongError starts with `PromptTooLong: `."""
        return await self._encoded(self._renderer.prompt, messages, 0)

    async def observation(self, messages: Sequence[Message], history: int) -> list[int]:
        """The tokens after a history of so many. Raises MessagesError."""
        return await self._encoded(self._renderer.observation, messages, history)

    async def parse(self, ids: Sequence[int]) -> Message:
        """The model's turn (Renderer.parse)."""
        if len(ids) <= INLINE_TOKENS:
            return self._renderer.parse(ids)
        return await encoded_apart(self._experiment, lambda: self._renderer.parse(ids))

    async def _encoded(
        self, encode: Callable[[Sequence[Message]], list[int]], messages: Sequence[Message], used: int
    ) -> list[int]:
        characters = sum(len(message.content) for message in messages)
        least = characters // self._renderer.longest_token
        if used + least >= self._max_context:
            raise self._too_long(f"at least {used + least}")
        if characters <= INLINE_CHARACTERS:
            ids = encode(messages)
            await asyncio.sleep(0)  # between many short ones, others have their turn
        else:
            ids = await encoded_apart(self._experiment, lambda: encode(messages))
        if used + len(ids) >= self._max_context:
            raise self._too_long(str(used + len(ids)))
        return ids

    def _too_long(self, tokens: str) -> TooLongError:
        return TooLongError(f"PromptTooLong: {tokens} tokens, and the context holds {self._max_context}")
