"""Serves an environment of the verifiers library to clora; docs/environments.md says how the two fit.

    python serve.py NAME [--arguments JSON] [--port 8000]

Each episode of clora's is a rollout of the environment (rollout.py). A request that comes again with the same
Idempotency-Key gets the same answer; an episode that nobody has asked about for `--idle-seconds` is given up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError
from rollout import CannotServe, Outcome, Play, Rollout

MAX_BODY_BYTES = 16 << 20
log = logging.getLogger("serve")


class Wire(BaseModel):
    model_config = ConfigDict(alias_generator=lambda name: {"tool_calls": "toolCalls"}.get(name, name))


class Example(Wire):
    seed: int
    split: Literal["train", "test"]
    index: int


class Call(Wire):
    name: str
    arguments: dict[str, Any]


class ModelTurn(Wire):
    content: str
    tool_calls: list[Call] = []


class Reset(Wire):
    episode: str
    example: Example


class Step(Wire):
    episode: str
    turn: int
    message: ModelTurn


class Close(Wire):
    episode: str


class Environment(Protocol):
    """What is served: `tools` in OpenAI's form, the same for every row."""

    tools: list[dict[str, Any]]

    def play(self, seed: int, split: str, index: int) -> Play:
        """The rollout of one example."""
        ...


B = TypeVar("B", bound=Wire)
Answer = tuple[int, dict[str, Any]]


class Episode:
    """A rollout and the answers to its requests, by Idempotency-Key."""

    def __init__(self, example: Example, rollout: Rollout) -> None:
        self.example = example
        self.rollout = rollout
        self.answers: dict[str, asyncio.Future[Answer]] = {}
        self.expiry: asyncio.TimerHandle | None = None


class Server:
    """The four paths of the protocol over one environment.

    Args:
        most: episodes at once; a further one is answered 503.
        idle: seconds without a request after which an episode is given up.
    """

    def __init__(self, environment: Environment, most: int, idle: float) -> None:
        self._environment = environment
        self._most, self._idle = most, idle
        self._episodes: dict[str, Episode] = {}
        self._ending: set[asyncio.Future[Outcome]] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes([web.get("/v1/environment", self._describe), web.post("/v1/reset", self._reset)])
        app.add_routes([web.post("/v1/step", self._step), web.post("/v1/close", self._close)])
        app.on_startup.append(self._try)
        app.on_cleanup.append(self._end)
        return app

    async def _try(self, _: web.Application) -> None:
        """The first row's rollout up to the model's turn: what cannot be served is known before anybody asks."""
        rollout = self._rollout(Example(seed=0, split="train", index=0))
        try:
            await rollout.begin()
        except CannotServe:
            raise
        except Exception as error:
            raise CannotServe(f"its first rollout fails: {_text(error)}") from error
        finally:
            self._cancel(rollout)

    async def _end(self, _: web.Application) -> None:
        for name in list(self._episodes):
            self._forget(name)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _describe(self, _: web.Request) -> web.Response:
        tools = [{k: v for k, v in tool["function"].items() if k != "strict"} for tool in self._environment.tools]
        return web.json_response({"protocol": 1, "tools": tools, "requiredFields": [], "generates": True})

    async def _reset(self, request: web.Request) -> web.Response:
        body = await _read(request, Reset, "a row is {seed, split, index}, of data: {builtin: Generated}")
        episode = self._episodes.get(body.episode)
        if episode is None:
            if len(self._episodes) >= self._most:
                return _answer(503, {"error": f"{self._most} episodes are open, and no more are taken"})
            episode = Episode(body.example, self._rollout(body.example))
            self._episodes[body.episode] = episode
        elif _key(request) not in episode.answers:
            return _answer(409, {"error": "there is such an episode already"})

        async def begin() -> dict[str, Any]:
            return {"messages": await episode.rollout.begin()}

        return await self._once(request, body.episode, episode, begin)

    async def _step(self, request: web.Request) -> web.Response:
        body = await _read(request, Step)
        episode = self._episodes.get(body.episode)
        if episode is None:
            return _answer(404, {"error": "no such episode"})
        if _key(request) not in episode.answers:
            if any(not answer.done() for answer in episode.answers.values()):
                return _answer(409, {"error": "the episode's last request is not answered yet"})
            if body.turn != episode.rollout.turns + 1:
                return _answer(409, {"error": f"turn {episode.rollout.turns + 1} is next, not {body.turn}"})

        async def step() -> dict[str, Any]:
            calls = [(call.name, json.dumps(call.arguments)) for call in body.message.tool_calls]
            found = await episode.rollout.turn(body.message.content, calls)
            if not isinstance(found, Outcome):
                return {"messages": found}
            row = f"{episode.example.split} {episode.example.index}"
            log.info("%s: reward %g, %s, %s", row, found.reward, found.stop, json.dumps(found.metrics))
            return {"reward": found.reward, "done": True}

        return await self._once(request, body.episode, episode, step)

    async def _close(self, request: web.Request) -> web.Response:
        self._forget((await _read(request, Close)).episode)
        return _answer(200, {})

    async def _once(
        self, request: web.Request, name: str, episode: Episode, act: Callable[[], Awaitable[dict[str, Any]]]
    ) -> web.Response:
        """The answer to the request's key, made if there is none yet."""
        key = _key(request)
        if key not in episode.answers:
            episode.answers[key] = asyncio.ensure_future(_outcome(act))
        self._asked(name, episode)
        # Shielded: whoever hangs up may ask again.
        status, answer = await asyncio.shield(episode.answers[key])
        if self._episodes.get(name) is episode:
            self._asked(name, episode)
        return _answer(status, answer)

    def _asked(self, name: str, episode: Episode) -> None:
        """Somebody waits for it, or has its answer: both ends where nobody comes again."""
        if episode.expiry:
            episode.expiry.cancel()
        episode.expiry = asyncio.get_running_loop().call_later(self._idle, self._forget, name)

    def _rollout(self, example: Example) -> Rollout:
        play = self._environment.play(example.seed, example.split, example.index)
        return Rollout(play, self._environment.tools)

    def _forget(self, name: str) -> None:
        if episode := self._episodes.pop(name, None):
            if episode.expiry:
                episode.expiry.cancel()
            self._cancel(episode.rollout)

    def _cancel(self, rollout: Rollout) -> None:
        task = rollout.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Outcome]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.debug("a rollout ended with %s", _text(error))


async def _outcome(act: Callable[[], Awaitable[dict[str, Any]]]) -> Answer:
    """422: the same request would end the same way again."""
    try:
        return 200, await act()
    except asyncio.CancelledError:
        return 410, {"error": "the episode was closed"}
    except Exception as error:
        log.warning("an episode fails: %s", _text(error))
        return 422, {"error": _text(error)}


async def _read(request: web.Request, model: type[B], hint: str = "") -> B:
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        told = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        text = json.dumps({"error": f"{told}; {hint}" if hint else told})
        raise web.HTTPUnprocessableEntity(text=text, content_type="application/json") from None


def _key(request: web.Request) -> str:
    key = request.headers.get("Idempotency-Key", "")
    if not key:
        text = json.dumps({"error": "the header Idempotency-Key is missing"})
        raise web.HTTPBadRequest(text=text, content_type="application/json")
    return key


def _answer(status: int, body: dict[str, Any]) -> web.Response:
    return web.json_response(body, status=status)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CannotServe) else f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves an environment of the verifiers library to clora.")
    parser.add_argument("name", help="as in vf.load_environment(NAME): a module on the Python path")
    parser.add_argument("--arguments", type=json.loads, default={}, metavar="JSON", help="for load_environment")
    parser.add_argument("--host", default="0.0.0.0")  # noqa: S104
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-episodes", type=int, default=1024, help="open at once")
    parser.add_argument("--idle-seconds", type=float, default=3600, help="after which an episode is given up")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    from classic import ClassicEnvironment  # the library takes seconds

    try:
        app = Server(ClassicEnvironment(given.name, given.arguments), given.max_episodes, given.idle_seconds).app()
        web.run_app(app, host=given.host, port=given.port, access_log=None, print=lambda line: log.info("%s", line))
    except CannotServe as error:
        sys.exit(f"serve: environment {given.name} cannot be served: {error}")


if __name__ == "__main__":
    main()
