"""Environments that a module's `load_environment` makes: SingleTurnEnv, MultiTurnEnv, ToolEnv and their like.

The library runs the rollout and scores it; only its model client is another one. An exception of a reward function,
which the library counts as a reward of 0, fails the episode here: nothing is trained on it.
"""

from __future__ import annotations

import functools
import inspect
import random
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import verifiers as vf
from openai.types.chat import ChatCompletion
from rollout import Ask, CannotServe, Outcome, Play
from verifiers.clients import OpenAIChatCompletionsClient

MAX_TOOLS = 32
TOKENS = {"logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"}
HELD_OUT = 10  # one row in so many, where the environment has no eval dataset

_reward_errors: ContextVar[list[str]] = ContextVar("reward_errors")


class ClassicEnvironment:
    """A loaded environment. Raises CannotServe, in one sentence, for one that clora's protocol cannot carry."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        try:
            self._env = vf.load_environment(name, **arguments)
        except Exception as error:
            cause = error.__cause__ or error
            raise CannotServe(f"it does not load: {type(cause).__name__}: {cause}") from error
        for env in _all(self._env):
            _check(env)
            for rubric in _rubrics(env.rubric):
                rubric.funcs[:] = [_told(func) for func in rubric.funcs]
        self.tools = [_tool(tool) for tool in self._env.tool_defs or []]
        if len(self.tools) > MAX_TOOLS:
            raise CannotServe(f"it has {len(self.tools)} tools; clora takes {MAX_TOOLS}")
        self._rows = _rows(self._env)

    def play(self, seed: int, split: str, index: int) -> Play:
        """The rollout of example `index`: a row of the eval dataset, or of the dataset in an order that `seed` gives,
        anew for every round."""
        rows = self._rows[split]
        place = index % len(rows)
        if split == "train":
            place = _order(seed, index // len(rows), len(rows))[place]
        return functools.partial(self._play, dict(rows[place]))

    async def _play(self, row: dict[str, Any], ask: Ask) -> Outcome:
        errors: list[str] = []
        _reward_errors.set(errors)
        state = await self._env.run_rollout(row, _Client(ask), model="clora", sampling_args={})
        if error := state.get("error"):
            raise RuntimeError(error["error_chain_repr"])
        if errors:
            raise RuntimeError(errors[0])
        return Outcome(float(state["reward"]), dict(state["metrics"] or {}), str(state["stop_condition"]))


class _Client(OpenAIChatCompletionsClient):
    """Asks clora for the model's turn. Messages become OpenAI's, and back, as the library does it."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._ask = ask

    async def get_native_response(  # type: ignore[override]
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> ChatCompletion:
        turn = await self._ask(prompt, tools or [])
        choice = {"index": 0, "finish_reason": "tool_calls" if turn["tool_calls"] else "stop"}
        choice["message"] = {"role": "assistant", **turn}
        return ChatCompletion.model_validate(
            {"id": "clora", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}
        )

    async def raise_from_native_response(self, response: ChatCompletion) -> None:
        """A model may say nothing: that is for the rubric to judge."""

    async def from_native_response(self, response: ChatCompletion) -> Any:
        found = await super().from_native_response(response)
        if found.message.content is None and not found.message.tool_calls:
            found.message.content = ""
        return found

    async def close(self) -> None:
        """There is nothing open."""


def _all(env: Any) -> Iterator[Any]:
    """The environment, and those of an EnvGroup."""
    yield env
    for inner in getattr(env, "envs", ()):
        yield from _all(inner)


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    for inner in getattr(rubric, "rubrics", ()):
        yield from _rubrics(inner)


def _check(env: Any) -> None:
    if env.requires_group_rollouts:
        raise CannotServe("it rewards a group's rollouts together; clora plays and rewards each by itself")
    if env.provides_advantages:
        raise CannotServe("it computes advantages itself; clora takes rewards")
    if env.message_type != "chat":
        raise CannotServe("it continues plain text; clora speaks in chat messages")
    asked = {*env.sampling_args, *env.sampling_args.get("extra_body", {})} & TOKENS
    if asked:
        raise CannotServe(f"it needs the tokens of the model's turns ({', '.join(sorted(asked))}); it gets their text")
    if getattr(env, "max_total_completion_tokens", -1) > 0:
        raise CannotServe("it counts the model's tokens (max_total_completion_tokens); it gets only their text")


def _told(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same reward function; what it raises is noted for the rollout that it is called in."""

    @functools.wraps(func)
    async def called(*args: Any, **kwargs: Any) -> Any:
        try:
            found = func(*args, **kwargs)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:
            name = getattr(func, "__name__", "?")
            _reward_errors.get([]).append(f"reward function {name}: {type(error).__name__}: {error}")
            raise

    return called


def _tool(tool: Any) -> dict[str, Any]:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", tool.name):
        raise CannotServe(f"its tool {tool.name!r} has a name that clora does not take")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _rows(env: Any) -> dict[str, Any]:
    """The rows of both splits, none of which is in both."""
    if env.build_dataset() is None:
        raise CannotServe("it has no dataset to train on")
    train, test = env.get_dataset(), env.build_eval_dataset()
    if not len(train):
        raise CannotServe("its dataset has no rows")
    if test is not None and len(test):
        return {"train": train, "test": test}
    held = len(train) // HELD_OUT or 1
    if held == len(train):
        raise CannotServe("it has one row and no eval dataset: nothing is left to evaluate on")
    return {"train": train.select(range(len(train) - held)), "test": train.select(range(len(train) - held, len(train)))}


@functools.lru_cache(maxsize=64)
def _order(seed: int, turn: int, count: int) -> list[int]:
    return random.Random(f"{seed}/{turn}").sample(range(count), count)  # noqa: S311
