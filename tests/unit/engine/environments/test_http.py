"""The HTTP environment against a real server: an episode, retries, and everything that a server can do wrong."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from clora_engine.environments import Generates, Message, StepResult, ToolCall
from clora_engine.environments.http import GeneratingHttpFactory, HttpFactory, build
from clora_engine.environments.http_addresses import AllowedHost, HostPolicy
from clora_engine.environments.http_client import (
    MAX_ANSWER_BYTES,
    AddressRefused,
    AnswerTooLarge,
    BadAnswer,
    BadStatus,
    EnvironmentRequestError,
    Unreachable,
)
from clora_engine.environments.http_protocol import Description
from clora_engine.errors import TransientError, UserError
from tests.unit.engine.environments.http_server import (
    LOOPBACK,
    Handler,
    answers,
    breaks_off,
    never,
    serving,
)

EXAMPLE = {"question": "What?", "more": [1, None]}


def echo(text: Any) -> Message:
    return Message("assistant", "", (ToolCall("echo", {"text": text}),))


async def admit(url: str, policy: HostPolicy = LOOPBACK, **arguments: str) -> HttpFactory:
    """As an experiment's admission does it: in a thread."""
    built = await asyncio.to_thread(build, {"url": url, **arguments}, policy)
    assert isinstance(built, HttpFactory)
    return built


async def test_an_episode() -> None:
    async with serving() as server:
        factory = await admit(server.url + "/")
        assert [tool.name for tool in factory.tools] == ["echo"]
        assert factory.tools[0].parameters["required"] == ["text"]
        episode = factory.new()
        assert await episode.reset(EXAMPLE) == [Message("user", "What?")]
        assert await episode.step(echo("naïve – 数")) == StepResult((Message("tool", "naïve – 数", name="echo"),), 0.25)
        odd = Message("assistant", "{", parse_error="not JSON")
        assert (await episode.step(odd)).tool_errors == 1
        assert await episode.step(echo("end")) == StepResult(reward=1.0, done=True)
        await episode.close()
    paths, keys, bodies = zip(*server.requests, strict=True)
    assert paths == ("/v1/environment", "/v1/reset", "/v1/step", "/v1/step", "/v1/step", "/v1/close")
    name = bodies[1]["episode"]
    assert keys == ("", f"{name}/reset", *(f"{name}/step/{turn}" for turn in (1, 2, 3)), f"{name}/close")
    assert bodies[1] == {"episode": name, "example": EXAMPLE}
    assert bodies[3] == {
        "episode": name,
        "turn": 2,
        "message": {"content": "{", "toolCalls": [], "parseError": "not JSON"},
    }


async def test_episodes_have_names_of_their_own_and_one_that_never_began_is_not_closed() -> None:
    async with serving() as server:
        factory = server.factory()
        first, second, unused = factory.new(), factory.new(), factory.new()
        await asyncio.gather(first.reset(EXAMPLE), second.reset(EXAMPLE))
        await asyncio.gather(first.close(), second.close(), unused.close())
        assert len({body["episode"] for _, _, body in server.requests}) == 2
        assert [path for path, _, _ in server.requests].count("/v1/close") == 2


# ------------------------------------------------------------------------------------ what a server does wrong

Fault = tuple[Handler, type[EnvironmentRequestError], str]

FAULTS: dict[str, Fault] = {
    "500": (answers("oops", 500), BadStatus, "POST /v1/step answered 500"),
    "404": (answers("{}", 404), BadStatus, "answered 404"),
    "redirect": (answers("", 307, Location="http://169.254.169.254/"), BadStatus, "307: redirects are not followed"),
    "breaks off": (breaks_off, Unreachable, "POST /v1/step: Server disconnected"),
    "empty": (answers(""), BadAnswer, "Invalid JSON: EOF"),
    "garbage": (answers("<html>"), BadAnswer, "Invalid JSON: expected value"),
    "nested": (answers("[" * 100_000), BadAnswer, "Invalid JSON: recursion limit"),
    "no UTF-8": (answers(b'{"messages": "\xff"}'), BadAnswer, "Invalid JSON"),
    "half a surrogate": (answers('{"messages": "\\ud800"}'), BadAnswer, "Invalid JSON"),
    "no object": (answers("[]"), BadAnswer, "should be an object"),
    "nothing to go on with": (answers("{}"), BadAnswer, "an episode that is not done needs messages"),
    "reward is text": (answers('{"reward": "1", "done": true}'), BadAnswer, "reward: Input should be a valid number"),
    "reward is no number": (answers('{"reward": NaN, "done": true}'), BadAnswer, "reward"),
    "reward is huge": (answers('{"reward": 1e300, "done": true}'), BadAnswer, "reward: Input should be less than"),
    "wrong role": (
        answers('{"messages": [{"role": "assistant", "content": "x"}]}'),
        BadAnswer,
        "messages.0.role: Input should be 'user' or 'tool'",
    ),
    "10 MB": (answers(b"x" * 10_000_000), AnswerTooLarge, f"longer than {MAX_ANSWER_BYTES} bytes"),
    "compressed": (answers(b"\x1f\x8b", Content_Encoding="gzip"), BadAnswer, "a compressed answer"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_each_fault_has_a_name_and_a_message(name: str) -> None:
    handler, kind, message = FAULTS[name]
    async with serving(step=handler) as server:
        episode = server.factory().new()
        await episode.reset(EXAMPLE)
        with pytest.raises(kind) as caught:
            await episode.step(echo("x"))
        assert message in str(caught.value)
        assert len(str(caught.value)) < 300
        await episode.close()


async def test_an_answer_without_end_is_left() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)

    async with serving(step=endless) as server:
        episode = server.factory().new()
        await episode.reset(EXAMPLE)
        with pytest.raises(AnswerTooLarge):
            await episode.step(echo("x"))
        await episode.close()


async def test_who_waits_can_give_up() -> None:
    async with serving(step=never) as server:
        episode = server.factory(retries=5).new()
        await episode.reset(EXAMPLE)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await episode.step(echo("x"))
        await episode.close()


@pytest.mark.parametrize("handler", [answers("", 503), answers("", 429), answers("", 500), breaks_off])
async def test_retries_are_bounded_and_name_the_same_request(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clora_engine.environments.http_client.FIRST_PAUSE_SECONDS", 0.001)
    async with serving(step=handler) as server:
        episode = server.factory(retries=2).new()
        await episode.reset(EXAMPLE)
        with pytest.raises(EnvironmentRequestError):
            await episode.step(echo("x"))
        assert len([key for path, key, _ in server.requests if path == "/v1/step"]) == 3
        assert len({key for path, key, _ in server.requests if path == "/v1/step"}) == 1
        del server.handlers["/v1/step"]
        assert (await episode.step(echo("end"))).reward == 1.0
        await episode.close()


async def test_what_would_fail_again_is_not_tried_again() -> None:
    for handler in (answers("", 400), answers("{}"), answers("", 302)):
        async with serving(step=handler) as server:
            episode = server.factory(retries=5).new()
            await episode.reset(EXAMPLE)
            with pytest.raises(EnvironmentRequestError):
                await episode.step(echo("x"))
            assert len(server.requests) == 2
            await episode.close()


async def test_a_busy_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clora_engine.environments.http_client.FIRST_PAUSE_SECONDS", 0.001)
    async with serving() as server:
        busy = [True, True]

        async def reset(_: web.Request) -> web.StreamResponse:
            if busy:
                busy.pop()
                return web.Response(status=503)
            return web.json_response({"messages": [{"role": "user", "content": "now"}]})

        server.handlers["/v1/reset"] = reset
        episode = server.factory(retries=2).new()
        assert await episode.reset(EXAMPLE) == [Message("user", "now")]
        await episode.close()


# ------------------------------------------------------------------------------------ where it never connects


class Names(AbstractResolver):
    """A name server of the test's: each look-up gives the next of `answers`, the last for ever."""

    def __init__(self, port: int, *answers: str) -> None:
        self.answers, self.port = list(answers), port

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            ResolveResult(hostname=host, host=one, port=port, family=socket.AF_INET, proto=0, flags=0)
            for one in address.split()
        ]

    async def close(self) -> None:
        return None


async def test_a_name_that_changes_its_address_gains_nothing() -> None:
    """DNS rebinding: right when it is admitted, the loopback when the episode begins."""
    async with serving() as server:
        port = int(server.url.rpartition(":")[2])
        policy = HostPolicy((AllowedHost.parse("env.example"),))
        names = Names(port, "127.0.0.1")
        description = Description(protocol=1)
        episode = HttpFactory(f"http://env.example:{port}", policy, description, resolver=names).new()
        with pytest.raises(AddressRefused, match=r"env.example leads to 127.0.0.1, which is a loopback address"):
            await episode.reset(EXAMPLE)
        with pytest.raises(AddressRefused):
            await episode.close()
        assert server.requests == []


async def test_one_forbidden_address_among_others_is_enough() -> None:
    names = Names(80, "10.1.2.3 169.254.169.254")
    policy = HostPolicy((AllowedHost.parse("env.example"),))
    episode = HttpFactory("http://env.example", policy, Description(protocol=1), resolver=names).new()
    with pytest.raises(AddressRefused, match="link-local"):
        await episode.reset(EXAMPLE)
    with pytest.raises(AddressRefused):
        await episode.close()


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.1", "is a loopback address"),
        ("169.254.169.254", "is a link-local address"),
        ("[::ffff:127.0.0.1]", "is a loopback address"),
        ("0.0.0.0", "is no address of a host"),
    ],
)
async def test_addresses_without_a_name_are_checked_too(host: str, why: str) -> None:
    factory = HttpFactory(f"http://{host}:9", HostPolicy(), Description(protocol=1))
    episode = factory.new()
    with pytest.raises(AddressRefused, match=why):
        await episode.reset(EXAMPLE)
    with pytest.raises(AddressRefused):
        await episode.close()


async def test_a_proxy_of_the_engines_surroundings_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with serving() as server:
        episode = server.factory().new()
        assert await episode.reset(EXAMPLE)
        await episode.close()


# ------------------------------------------------------------------------------------ admission


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("", "give the environment's URL"),
        ("127.0.0.1:80", "give the environment's URL"),
        ("ftp://127.0.0.1", "give the environment's URL"),
        ("http://user@127.0.0.1", "give the environment's URL"),
        ("http://127.0.0.1:port", "give the environment's URL"),
        ("http://127.0.0.1:99999", "give the environment's URL"),
        ("http://127.0.0.1/?a", "give the environment's URL"),
        ("http://[::1", "give the environment's URL"),
        ("http://a..svc", "give the environment's URL"),
        ("http://" + "x" * 64 + ".svc", "give the environment's URL"),
        ("http://evil.com\\.svc", "give the environment's URL"),
        ("http://a%00.svc", "give the environment's URL"),
        ("http://example.com", "example.com is none of this engine's allowed hosts"),
        ("http://127.0.0.1.example.com", "is none of this engine's allowed hosts"),
    ],
)
def test_urls_that_are_refused(url: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        build({"url": url}, LOOPBACK)
    assert what in str(caught.value)
    assert caught.value.field == "environment.arguments.url"


@pytest.mark.parametrize("retries", ["-1", "6", "x", "", "1.0", "٣"])
def test_retries_that_are_refused(retries: str) -> None:
    with pytest.raises(UserError) as caught:
        build({"url": "http://127.0.0.1", "retries": retries}, LOOPBACK)
    assert caught.value.field == "environment.arguments.retries"


@pytest.mark.parametrize(
    ("described", "what"),
    [
        ("{}", "protocol: Field required"),
        ('{"protocol": 2}', "protocol: Input should be 1"),
        ('{"protocol": 1, "tools": [{"name": "a b", "parameters": {"type": "object"}}]}', "tools.0.name"),
        ('{"protocol": 1, "tools": [{"name": "a", "parameters": {"type": "array"}}]}', "tools.0.parameters.type"),
        (
            '{"protocol": 1, "tools": [{"name": "a", "parameters": {"type": "object", "properties": {"x": 1}}}]}',
            "tools.0.parameters.properties.x",
        ),
        ("hello", "Invalid JSON"),
        (
            '{"protocol": 1, "tools": [{"name": "a", "parameters": {"type": "object"}},'
            ' {"name": "a", "parameters": {"type": "object"}}]}',
            "tools.1.name: there is a tool a already",
        ),
        (
            '{"protocol": 1, "tools": [{"name": "a", "parameters": {"type": "object", "x": [NaN]}}]}',
            "tools.0.parameters",
        ),
    ],
)
async def test_a_description_that_is_not_the_protocols_is_the_users_error(described: str, what: str) -> None:
    async with serving(environment=answers(described)) as server:
        with pytest.raises(UserError) as caught:
            await admit(server.url)
        assert what in str(caught.value)
        assert caught.value.field == "environment.arguments.url"


@pytest.mark.parametrize(
    ("handler", "what"),
    [
        (answers("", 302), "302: redirects are not followed"),
        (answers("", 404), "answered 404"),
        (answers(b" " * (MAX_ANSWER_BYTES + 1)), "the answer is longer than"),
    ],
)
async def test_what_no_later_try_betters_is_the_users_error(handler: Handler, what: str) -> None:
    async with serving(environment=handler) as server:
        with pytest.raises(UserError, match=what) as caught:
            await admit(server.url)
        assert caught.value.field == "environment.arguments.url"


async def test_an_error_is_short_however_long_a_key_is() -> None:
    tool = {"name": "a", "parameters": {"type": "object", "properties": {"y" * 900_000: 1}}}
    async with serving(environment=answers(json.dumps({"protocol": 1, "tools": [tool]}))) as server:
        with pytest.raises(UserError, match=r"tools.0.parameters.properties.yyy") as caught:
            await admit(server.url)
        assert len(str(caught.value)) < 500


async def test_a_name_of_a_header_is_no_matter_of_case() -> None:
    described = answers('{"protocol": 1}', Content_Encoding="Identity")
    async with serving(environment=described) as server:
        assert (await admit(server.url)).tools == ()


@pytest.mark.parametrize("handler", [answers("", 503), breaks_off])
async def test_one_that_does_not_answer_yet_is_asked_again_later(handler: Handler) -> None:
    async with serving(environment=handler) as server:
        with pytest.raises(TransientError, match="does not describe itself"):
            await admit(server.url)


async def test_one_that_hangs_at_admission_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clora_engine.environments.http.DESCRIBE_SECONDS", 0.05)
    async with serving(environment=never) as server:
        with pytest.raises(TransientError, match=r"did not describe itself within 0.05 s"):
            await admit(server.url)


async def test_rows_without_a_required_field_are_refused() -> None:
    async with serving() as server:
        factory = await admit(server.url)
        factory.check(EXAMPLE)
        with pytest.raises(ValueError, match="needs the field 'question'"):
            factory.check({"prompt": "What?"})
        with pytest.raises(ValueError, match="no demonstrations"):
            factory.demonstration(EXAMPLE)
        assert not isinstance(factory, Generates)


async def test_one_that_generates_gets_seed_split_and_index() -> None:
    async with serving(environment=answers('{"protocol": 1, "generates": true}')) as server:
        factory = await admit(server.url)
        assert isinstance(factory, GeneratingHttpFactory)
        assert isinstance(factory, Generates)
        assert factory.generate(3, "test", 5) == {"seed": 3, "split": "test", "index": 5}
