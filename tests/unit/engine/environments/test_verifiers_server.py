"""examples/verifiers-environment without the library: its server and its rollouts, over plain coroutines in its place.
With the library: tests/integration/test_verifiers.py."""

from __future__ import annotations

import asyncio
import importlib
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from clora_engine.environments import Message
from clora_engine.environments.http import GeneratingHttpFactory
from clora_engine.environments.http_client import BadStatus
from clora_engine.environments.http_protocol import Description
from tests.unit.engine.environments.http_server import LOOPBACK

EXAMPLE = Path(__file__).parents[4] / "examples" / "verifiers-environment"
ROW = {"seed": 0, "split": "train", "index": 0}
USER = [{"role": "user", "content": "Go on."}]


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLE)
    return importlib.import_module("rollout")


@pytest.fixture
def serve(rollout: Any) -> Any:
    return importlib.import_module("serve")


@dataclass
class Played:
    """An environment whose rollouts are `script(ask)`."""

    script: Callable[[Any], Awaitable[Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    begun: int = 0

    def play(self, seed: int, split: str, index: int) -> Callable[[Any], Awaitable[Any]]:
        self.begun += 1
        return self.script


class Client:
    """Requests as clora's, one at a time, with their status."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self._session = url, session

    async def ask(self, path: str, body: Any, key: str = "") -> tuple[int, Any]:
        headers = {"Idempotency-Key": key} if key else {}
        async with self._session.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def reset(self, name: str, example: Any = ROW) -> tuple[int, Any]:
        return await self.ask("/v1/reset", {"episode": name, "example": example}, f"{name}/reset")

    async def step(self, name: str, turn: int, content: str = "") -> tuple[int, Any]:
        body = {"episode": name, "turn": turn, "message": {"content": content, "toolCalls": [], "parseError": ""}}
        return await self.ask("/v1/step", body, f"{name}/step/{turn}")

    async def close(self, name: str) -> None:
        assert (await self.ask("/v1/close", {"episode": name}, f"{name}/close")) == (200, {})

    def factory(self) -> GeneratingHttpFactory:
        return GeneratingHttpFactory(self.url, LOOPBACK, Description(protocol=1, generates=True), retries=0)


@asynccontextmanager
async def served(serve: Any, played: Played, most: int = 8, idle: float = 600.0) -> AsyncIterator[Client]:
    runner = web.AppRunner(serve.Server(played, most, idle).app(), handler_cancellation=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as session:
            yield Client(f"http://127.0.0.1:{port}", session)
    finally:
        await runner.cleanup()


def echo(rollout: Any, turns: int = 2) -> Callable[[Any], Awaitable[Any]]:
    """Answers each turn with "more", and ends with the number of turns as the reward."""

    async def script(ask: Any) -> Any:
        said = list(USER)
        for _ in range(turns):
            turn = await ask(said, [])
            said = [*said, {"role": "assistant", "content": turn["content"]}, {"role": "user", "content": "more"}]
        return rollout.Outcome(float(turns))

    return script


async def test_an_episode_that_nobody_asks_about_is_given_up(rollout: Any, serve: Any) -> None:
    ended = asyncio.Event()

    async def script(ask: Any) -> Any:
        try:
            await ask(USER, [])
        except asyncio.CancelledError:
            ended.set()
            raise

    async with served(serve, Played(script), most=1, idle=0.01) as client:
        ended.clear()  # of the rollout that the start tries
        assert (await client.reset("a"))[0] == 200
        await asyncio.wait_for(ended.wait(), 60)
        assert (await client.step("a", 1))[0] == 404
        assert (await client.reset("b"))[0] == 200  # its place is free again


async def test_an_environment_that_never_answers_keeps_no_place(rollout: Any, serve: Any) -> None:
    async def script(ask: Any) -> Any:
        if played.begun > 1:  # not the rollout that the start tries
            await asyncio.Event().wait()
        await ask(USER, [])

    played = Played(script)
    async with served(serve, played, most=1, idle=0.01) as client:
        for name in "ab":
            given_up = await asyncio.wait_for(client.reset(name), 60)
            assert given_up == (410, {"error": "the episode was closed"})


async def test_no_more_episodes_than_allowed(rollout: Any, serve: Any) -> None:
    async with served(serve, Played(echo(rollout)), most=2) as client:
        episodes = [client.factory().new() for _ in range(3)]
        await episodes[0].reset(ROW)
        await episodes[1].reset(ROW)
        with pytest.raises(BadStatus, match="503") as caught:
            await episodes[2].reset(ROW)
        assert not caught.value.lasting
        await episodes[0].close()
        episodes.append(client.factory().new())
        assert await episodes[3].reset(ROW) == [Message("user", "Go on.")]
        for episode in episodes[1:]:
            await episode.close()


async def test_whoever_hangs_up_gets_the_answer_at_the_next_try(rollout: Any, serve: Any) -> None:
    working, go_on, turns = asyncio.Event(), asyncio.Event(), 0

    async def script(ask: Any) -> Any:
        nonlocal turns
        await ask(USER, [])
        turns += 1
        working.set()
        await go_on.wait()
        return rollout.Outcome(0.5)

    async with served(serve, Played(script)) as client:
        await client.reset("a")
        first = asyncio.ensure_future(client.step("a", 1))
        await working.wait()
        first.cancel()
        body = {"episode": "a", "turn": 1, "message": {"content": ""}}
        assert (await client.ask("/v1/step", body, "another key"))[0] == 409
        second = asyncio.ensure_future(client.step("a", 1))
        go_on.set()
        assert await second == (200, {"reward": 0.5, "done": True})
        assert turns == 1


async def test_closing_cancels_what_the_environment_is_at(rollout: Any, serve: Any) -> None:
    working, ended = asyncio.Event(), asyncio.Event()

    async def script(ask: Any) -> Any:
        await ask(USER, [])
        working.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with served(serve, Played(script)) as client:
        await client.reset("a")
        step = asyncio.ensure_future(client.step("a", 1))
        await working.wait()
        await client.close("a")
        await asyncio.wait_for(ended.wait(), 60)
        assert await step == (410, {"error": "the episode was closed"})
        await client.close("a")  # of an episode that is gone


async def test_the_servers_end_waits_for_the_environments_cleaning_up(rollout: Any, serve: Any) -> None:
    cleaned = []

    async def script(ask: Any) -> Any:
        try:
            await ask(USER, [])
        finally:
            await asyncio.sleep(0)
            cleaned.append(1)

    async with served(serve, Played(script)) as client:
        await client.reset("a")
        await client.reset("b")
    assert len(cleaned) == 3  # and that which the start has tried


async def test_what_comes_at_the_wrong_time_or_without_its_fields(rollout: Any, serve: Any) -> None:
    async with served(serve, Played(echo(rollout))) as client:
        status, answer = await client.reset("a", {"question": "?"})
        assert status == 422
        assert answer["error"].startswith("example.seed: Field required; a row is {seed, split, index}")
        assert (await client.step("a", 1)) == (404, {"error": "no such episode"})
        assert (await client.reset("a"))[0] == 200
        assert (await client.ask("/v1/reset", {"episode": "a", "example": ROW}, "another key"))[0] == 409
        assert (await client.step("a", 2)) == (409, {"error": "turn 1 is next, not 2"})
        assert (await client.ask("/v1/reset", {"episode": "b", "example": ROW})) == (
            400,
            {"error": "the header Idempotency-Key is missing"},
        )
        assert (await client.step("a", 1)) == (200, {"messages": [{"role": "user", "content": "more"}]})
        assert (await client.step("a", 2)) == (200, {"reward": 2.0, "done": True})
        assert (await client.step("a", 3)) == (422, {"error": "this rollout is over"})


SEARCH = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


def asks(*requests: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> Callable[[Any], Awaitable[Any]]:
    async def script(ask: Any) -> Any:
        for messages, tools in requests:
            await ask(messages, tools)

    return script


def grown(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [*USER, {"role": "assistant", "content": "hm"}, *messages]


@pytest.mark.parametrize(
    ("second", "tools", "told"),
    [
        (grown(*USER), SEARCH, "offers tools that differ"),
        (USER, [], "changes what was said before"),
        ([*USER, {"role": "assistant", "content": "else"}, *USER], [], "changes what was said before"),
        (grown(), [], "with 0 new messages"),
        (grown(*USER * 65), [], "with 65 new messages"),
        (grown({"role": "system", "content": "!"}), [], "a message of role 'system' after the model's turn"),
        (grown({"role": "user", "content": [{"type": "image_url"}]}), [], "more than text (image_url)"),
    ],
)
async def test_what_the_protocol_cannot_carry_ends_the_episode(
    rollout: Any, serve: Any, second: list[dict[str, Any]], tools: list[dict[str, Any]], told: str
) -> None:
    async with served(serve, Played(asks((USER, []), (second, tools)))) as client:
        await client.reset("a")
        status, answer = await client.step("a", 1, "hm")
        assert status == 422
        assert told in answer["error"]
        assert (await client.step("a", 2))[0] == 422


async def test_two_questions_at_once_end_the_episode(rollout: Any, serve: Any) -> None:
    async def script(ask: Any) -> Any:
        await asyncio.gather(ask(USER, []), ask(USER, []), return_exceptions=True)
        return rollout.Outcome(1.0)

    with pytest.raises(rollout.CannotServe, match="two turns at once"):
        async with served(serve, Played(script)):
            pass


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e7])
async def test_a_reward_that_is_no_number_fails_the_episode(rollout: Any, serve: Any, reward: float) -> None:
    async def script(ask: Any) -> Any:
        await ask(USER, [])
        return rollout.Outcome(reward)

    async with served(serve, Played(script)) as client:
        await client.reset("a")
        status, answer = await client.step("a", 1)
        assert (status, "no number up to 1e+06" in answer["error"]) == (422, True)


async def test_text_in_parts_is_text_and_a_tools_answer_has_its_name(rollout: Any, serve: Any) -> None:
    async def script(ask: Any) -> Any:
        parts = [{"type": "text", "text": "Go "}, {"type": "text", "text": "on."}]
        said: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        turn = await ask(said, SEARCH)
        (call,) = turn["tool_calls"]
        assert call["function"] == {"name": "search", "arguments": '{"query": "x"}'}
        said += [{"role": "assistant", "content": None, "tool_calls": turn["tool_calls"]}]
        await ask([*said, {"role": "tool", "tool_call_id": call["id"], "content": "found"}], SEARCH)

    async with served(serve, Played(script, tools=SEARCH)) as client:
        assert (await client.reset("a"))[1] == {"messages": USER}
        message = {"content": "", "toolCalls": [{"name": "search", "arguments": {"query": "x"}}]}
        answer = await client.ask("/v1/step", {"episode": "a", "turn": 1, "message": message}, "a/step/1")
        assert answer == (200, {"messages": [{"role": "tool", "content": "found", "name": "search"}]})


async def test_an_environment_that_fails_at_once_is_not_served(rollout: Any, serve: Any) -> None:
    async def nothing(ask: Any) -> Any:
        return rollout.Outcome(1.0)

    with pytest.raises(rollout.CannotServe, match="ended the rollout before the model's first turn"):
        async with served(serve, Played(nothing)):
            pass


def test_the_manifests_run_the_image_as_it_is_built() -> None:
    image = (EXAMPLE / "Dockerfile").read_text()
    deployment, service, policy = yaml.safe_load_all((EXAMPLE / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    user = pod["securityContext"]["runAsUser"]
    assert f"USER {user}:{pod['securityContext']['runAsGroup']}" in image
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert f"EXPOSE {port['containerPort']}" in image
    assert [p["port"] for p in service["spec"]["ports"]] == [8000]
    assert policy["spec"]["podSelector"] == {"matchLabels": service["spec"]["selector"]}
    copied = [name for line in re.findall(r"^COPY (?!--)(.*) \S+$", image, re.MULTILINE) for name in line.split()]
    assert all((EXAMPLE / name).exists() for name in copied)
    assert {path.name for path in EXAMPLE.glob("*.py")} <= set(copied)
    assert (EXAMPLE / "environments" / f"{container['args'][0]}.py").exists()
    experiment = yaml.safe_load((EXAMPLE / "experiment.yaml").read_text())
    assert experiment["spec"]["environment"]["arguments"]["url"] == f"http://{service['metadata']['name']}:8000"
