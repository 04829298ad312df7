"""The word problems as an environment over HTTP, whose tools take their time and whose rewards may be falsified.

Serves http://localhost:PORT/FAMILY/REWARDS. REWARDS: `true`; for the controls that must not learn, `random` (a coin's,
whatever the answer) and `flipped` (-1 for the right answer). Held-out problems are always rewarded truly.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any

import uvicorn
from fastapi import FastAPI, Header, HTTPException

from clora_engine.environments import word_problems
from clora_engine.environments.protocol import Environment, Message, StepResult, ToolCall
from local.control_plane import free_port


class ToolServer:
    """Serves while it is entered. seconds: the shortest and longest time that the calculator takes; drawn evenly."""

    def __init__(self, seconds: tuple[float, float] = (0.0, 0.0)) -> None:
        self._port = free_port()
        self.seconds = 0.0  # that the calculator has taken, over all its calls
        app = _app(partial(self._dawdle, seconds, random.Random(0)))  # noqa: S311
        self._server = uvicorn.Server(uvicorn.Config(app, host="localhost", port=self._port, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, name="tool-server", daemon=True)

    def environment(self, family: str, rewards: str = "true") -> dict[str, Any]:
        """An experiment's spec.environment."""
        return {"name": "HTTP", "arguments": {"url": f"http://localhost:{self._port}/{family}/{rewards}"}}

    def engine_flags(self) -> dict[str, Any]:
        """What an engine must be started with to reach it."""
        return {"environment_host": f"localhost:{self._port}", "loopback_environments": True}

    async def _dawdle(self, seconds: tuple[float, float], dice: random.Random) -> None:
        taken = dice.uniform(*seconds)
        self.seconds += taken
        await asyncio.sleep(taken)

    def __enter__(self) -> ToolServer:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
            assert self._thread.is_alive(), "the tool server did not start"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join(30)


def _app(dawdle: Callable[[], Awaitable[None]]) -> FastAPI:
    app = FastAPI()
    episodes: dict[str, tuple[Environment, str]] = {}
    answers: dict[tuple[str, str], dict[str, Any]] = {}  # a request that comes again is answered the same
    dice = random.Random(0)  # noqa: S311

    @app.get("/{family}/{rewards}/v1/environment")
    async def describe(family: str, rewards: str) -> dict[str, Any]:
        tools = word_problems.WordProblems((family,)).tools
        described = [{"name": t.name, "description": t.description, "parameters": dict(t.parameters)} for t in tools]
        return {"protocol": 1, "tools": described, "requiredFields": [], "generates": True}

    @app.post("/{family}/{rewards}/v1/reset")
    async def reset(family: str, rewards: str, body: dict[str, Any]) -> dict[str, Any]:
        factory, row = word_problems.WordProblems((family,)), body["example"]
        environment = factory.new()
        episodes[body["episode"]] = environment, "true" if row["split"] == "test" else rewards
        messages = await environment.reset(factory.generate(row["seed"], row["split"], row["index"]))
        return {"messages": [{"role": m.role, "content": m.content} for m in messages]}

    @app.post("/{family}/{rewards}/v1/step")
    async def step(body: dict[str, Any], idempotency_key: str = Header()) -> dict[str, Any]:
        key = body["episode"], idempotency_key
        if key not in answers:
            if body["episode"] not in episodes:
                raise HTTPException(404, "no such episode")
            environment, rewards = episodes[body["episode"]]
            result = await environment.step(_turn(body["message"]))
            if not result.done:
                await dawdle()
            answers[key] = _answer(result, rewards, dice)
        return answers[key]

    @app.post("/{family}/{rewards}/v1/close")
    async def close(body: dict[str, Any]) -> dict[str, Any]:
        episodes.pop(body["episode"], None)
        for key in [key for key in answers if key[0] == body["episode"]]:
            del answers[key]
        return {}

    return app


def _turn(message: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(call["name"], call["arguments"]) for call in message.get("toolCalls", ()))
    return Message("assistant", message["content"], calls, message.get("parseError", ""))


def _answer(result: StepResult, rewards: str, dice: random.Random) -> dict[str, Any]:
    reward = result.reward
    if rewards == "random":
        reward = float(result.done and dice.random() < 0.5)
    elif rewards == "flipped":
        reward = -reward
    messages = [{"role": m.role, "content": m.content, "name": m.name} for m in result.messages]
    return {"messages": messages, "reward": reward, "done": result.done, "toolErrors": result.tool_errors}
