"""One rollout of a verifiers environment, turned inside out: the environment asks the model, and waits for clora.

The environment runs as a task of its own. Where it would call a model's API, its client calls `ask` here: the messages
that are new since the model's last turn go out as the answer of /v1/reset or /v1/step, and `ask` returns with the
model's turn when the next /v1/step brings it. What clora's protocol cannot carry ends the rollout with CannotServe.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

MAX_MESSAGES = 64  # of one answer, by the protocol
MAX_REWARD = 1e6


class CannotServe(Exception):
    """An environment, or what it does in a rollout, that clora's protocol does not know."""


@dataclass(frozen=True)
class Outcome:
    """What the environment made of a finished rollout."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    stop: str = ""


Ask = Callable[[list[dict[str, Any]], list[dict[str, Any]]], Awaitable[dict[str, Any]]]
"""Messages and tools in OpenAI's form -> the model's turn: `content`, and `tool_calls` in OpenAI's form or None."""

Play = Callable[[Ask], Awaitable[Outcome]]


class Rollout:
    """A rollout under way. Its methods are called by one request at a time.

    Args:
        play: runs the environment to its end with the client that it is given.
        tools: those that were declared to the model; an environment that offers others ends with CannotServe.
    """

    def __init__(self, play: Play, tools: list[dict[str, Any]]) -> None:
        self.turns = 0
        self._tools = tools
        self._seen: list[dict[str, Any]] = []  # the conversation as the model has it, in the form of _plain
        self._calls: dict[str, str] = {}  # id of a tool call -> name of the tool
        self._refused: CannotServe | None = None
        self._asked: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._task = asyncio.ensure_future(play(self._ask))

    async def begin(self) -> list[dict[str, Any]]:
        """The first messages. Raises CannotServe, or what the environment raised."""
        found = await self._next()
        if isinstance(found, Outcome):
            raise CannotServe("the environment ended the rollout before the model's first turn")
        return found

    async def turn(self, content: str, calls: list[tuple[str, str]]) -> list[dict[str, Any]] | Outcome:
        """What the model's turn leads to. `calls`: each a tool's name, and its arguments as JSON. Raises as `begin`."""
        if self._refused is not None or self._task.done():
            raise self._refused or CannotServe("this rollout is over")
        assert self._answer is not None, "begun"
        ids = [(f"call_{self.turns}_{i}", name, arguments) for i, (name, arguments) in enumerate(calls)]
        made = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in ids]
        self._calls = {i: n for i, n, _ in ids}
        self._seen.append({"role": "assistant", "content": content, "calls": list(self._calls)})
        self._asked = asyncio.get_running_loop().create_future()
        self.turns += 1
        self._answer.set_result({"content": content, "tool_calls": made or None})
        return await self._next()

    def cancel(self) -> asyncio.Future[Outcome]:
        """Ends it; the environment's own cleaning up runs. Returns what ends when that is done."""
        self._task.cancel()
        return self._task

    async def _next(self) -> list[dict[str, Any]] | Outcome:
        await asyncio.wait({self._asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if self._refused is not None:
            self._task.cancel()
            raise self._refused
        if not self._task.done():
            return self._asked.result()
        outcome = self._task.result()
        if not (math.isfinite(outcome.reward) and abs(outcome.reward) <= MAX_REWARD):
            raise CannotServe(f"the environment's reward is {outcome.reward}, which is no number up to {MAX_REWARD:g}")
        return outcome

    async def _ask(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            new = self._new(messages, tools)
        except CannotServe as refused:
            # Kept, for the environment may make something else of the exception.
            self._refused = refused
            if not self._asked.done():
                self._asked.set_result([])
            raise
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.set_result(new)
        return await self._answer

    def _new(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages that the model has not seen, in the protocol's form."""
        if self._answer is not None and not self._answer.done():
            raise CannotServe("the environment asks the model for two turns at once")
        if tools != self._tools:
            raise CannotServe("the environment offers tools that differ between rows or turns")
        told = [_plain(message) for message in messages]
        known = len(self._seen)
        if told[:known] != self._seen:
            raise CannotServe("the environment changes what was said before, but the model's conversation only grows")
        new = told[known:]
        self._seen = told
        roles = ("user", "tool") if known else ("system", "user")
        for message in new:
            if message["role"] not in roles:
                when = "after the model's turn" if known else "before the model's first turn"
                raise CannotServe(f"the environment has a message of role {message['role']!r} {when}")
        if not 1 <= len(new) <= MAX_MESSAGES:
            raise CannotServe(f"the environment asks the model with {len(new)} new messages; it takes 1 to 64")
        return [self._protocol(message) for message in new]

    def _protocol(self, message: dict[str, Any]) -> dict[str, Any]:
        found = {"role": message["role"], "content": message["content"]}
        if name := self._calls.get(message.get("answers", "")):
            found["name"] = name
        return found


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's chat form with its text as one string, and of its calls only the ids."""
    content = message.get("content")
    if isinstance(content, list):
        kinds = {part.get("type", "?") for part in content} - {"text"}
        if kinds:
            raise CannotServe(f"the environment's messages hold more than text ({', '.join(sorted(kinds))})")
        content = "".join(part["text"] for part in content)
    found: dict[str, Any] = {"role": message["role"], "content": content or ""}
    if message["role"] == "assistant":
        found["calls"] = [call["id"] for call in message.get("tool_calls") or []]
    elif message["role"] == "tool":
        found["answers"] = message.get("tool_call_id", "")
    return found
