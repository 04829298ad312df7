"""The HTTP environment: the user's own container answers, by the protocol of http_protocol.py.

At admission the container describes itself: its tools, the fields that a row needs, whether it makes its own examples.
An episode then is reset, steps and close. Whatever goes wrong in an episode ends that episode alone. Left out:
authentication (a NetworkPolicy says who reaches the container), streaming, and demonstrations: supervised training
takes chats as its data.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from urllib.parse import SplitResult, urlsplit

from aiohttp.abc import AbstractResolver

from clora_engine.environments.arguments import argument_error, refuse_unknown
from clora_engine.environments.http_addresses import HostPolicy, is_host
from clora_engine.environments.http_client import (
    AddressRefused,
    AnswerTooLarge,
    BadAnswer,
    BadStatus,
    EnvironmentClient,
    EnvironmentRequestError,
)
from clora_engine.environments.http_protocol import (
    Call,
    Close,
    Description,
    FirstMessages,
    ModelTurn,
    Reset,
    Step,
    Turn,
)
from clora_engine.environments.protocol import EnvironmentFactory, Example, Message, Split, StepResult, Tool
from clora_engine.errors import TransientError

DESCRIBE_SECONDS = 5.0  # the operator waits for the admission's answer
MAX_RETRIES = 5


def build(
    arguments: Mapping[str, str], policy: HostPolicy, resolver: AbstractResolver | None = None
) -> EnvironmentFactory:
    """The factory of environment HTTP. Blocking: it asks the container for its description.

    Args:
        arguments: `url`, where the environment is; `retries` (0 to 5, default 2) of a request that failed.
        policy: the hosts and addresses that this engine allows.

    Raises:
        UserError: an argument is wrong, the host is not allowed, or the description is not the protocol's.
        TransientError: nobody answers there (yet).
    """
    refuse_unknown("HTTP", arguments, ("url", "retries"))
    url = _url(arguments, policy)
    retries = _retries(arguments)
    description = asyncio.run(_describe(EnvironmentClient(url, policy, retries=0, resolver=resolver), url))
    kind = GeneratingHttpFactory if description.generates else HttpFactory
    return kind(url, policy, description, retries=retries, resolver=resolver)


class HttpFactory:
    """An EnvironmentFactory over one container."""

    def __init__(
        self,
        url: str,
        policy: HostPolicy,
        description: Description,
        *,
        retries: int = 2,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._url, self._policy, self._retries, self._resolver = url, policy, retries, resolver
        self._required = tuple(description.required_fields)
        self.tools = tuple(
            Tool(tool.name, tool.description, tool.parameters.model_dump(exclude_unset=True))
            for tool in description.tools
        )

    def new(self) -> HttpEnvironment:
        client = EnvironmentClient(self._url, self._policy, retries=self._retries, resolver=self._resolver)
        return HttpEnvironment(client, uuid.uuid4().hex)

    def check(self, example: Example) -> None:
        missing = [field for field in self._required if field not in example]
        if missing:
            raise ValueError(f"the environment needs the field {missing[0]!r}")

    def demonstration(self, example: Example) -> Sequence[Message]:
        raise ValueError("an HTTP environment has no demonstrations: give chats ('messages') as data")


class GeneratingHttpFactory(HttpFactory):
    """Of a container that makes its own examples."""

    def generate(self, seed: int, split: Split, index: int) -> Example:
        return {"seed": seed, "split": split, "index": index}


class HttpEnvironment:
    """One episode, played by the container."""

    def __init__(self, client: EnvironmentClient, episode: str) -> None:
        self._client = client
        self._episode = episode
        self._turn = 0
        self._begun = False

    async def reset(self, example: Example) -> Sequence[Message]:
        assert not self._begun, "environments are for one episode"
        self._begun = True
        body = Reset(episode=self._episode, example=dict(example))
        answer = await self._client.post("/v1/reset", body, FirstMessages, key=f"{self._episode}/reset")
        return [Message(message.role, message.content) for message in answer.messages]

    async def step(self, message: Message) -> StepResult:
        self._turn += 1
        turn = ModelTurn(
            content=message.content,
            tool_calls=[Call(name=call.name, arguments=dict(call.arguments)) for call in message.tool_calls],
            parse_error=message.parse_error,
        )
        body = Step(episode=self._episode, turn=self._turn, message=turn)
        answer = await self._client.post("/v1/step", body, Turn, key=f"{self._episode}/step/{self._turn}")
        return StepResult(
            messages=tuple(Message(m.role, m.content, name=m.name) for m in answer.messages) if not answer.done else (),
            reward=answer.reward,
            done=answer.done,
            tool_errors=answer.tool_errors,
        )

    async def close(self) -> None:
        try:
            if self._begun:
                await self._client.tell("/v1/close", Close(episode=self._episode), key=f"{self._episode}/close")
        finally:
            await self._client.close()


async def _describe(client: EnvironmentClient, url: str) -> Description:
    try:
        async with asyncio.timeout(DESCRIBE_SECONDS):
            return await client.get("/v1/environment", Description)
    except TimeoutError:
        raise TransientError(
            f"the environment at {url} did not describe itself within {DESCRIBE_SECONDS:g} s"
        ) from None
    except EnvironmentRequestError as error:
        if isinstance(error, AddressRefused | AnswerTooLarge | BadAnswer) or (
            isinstance(error, BadStatus) and error.lasting
        ):
            raise argument_error("url", f"the environment at {url}: {error}") from None
        raise TransientError(f"the environment at {url} does not describe itself: {error}") from None
    finally:
        await client.close()


def _url(arguments: Mapping[str, str], policy: HostPolicy) -> str:
    text = arguments.get("url", "")
    try:
        url = urlsplit(text)
        usable = _is_plain(url)
    except ValueError:  # of a port that is no number, say
        usable = False
    if not usable:
        raise argument_error(
            "url", "give the environment's URL: http://host:port or https://host/path, nothing after it"
        )
    if not policy.allows(url):
        raise argument_error(
            "url", f"{url.netloc} is none of this engine's allowed hosts (LoRAEngine spec.environments.allowedHosts)"
        )
    return url.geturl().rstrip("/")  # as it was checked, not as it was written


def _is_plain(url: SplitResult) -> bool:
    """http(s), a host, a port that is a number (`port` raises ValueError otherwise), and no more than a path."""
    plain = url.scheme in ("http", "https") and is_host(url.hostname or "") and (url.port is None or url.port > 0)
    return plain and "@" not in url.netloc and not url.query and not url.fragment and url.netloc.isascii()


def _retries(arguments: Mapping[str, str]) -> int:
    text = arguments.get("retries", "2")
    if text not in {str(number) for number in range(MAX_RETRIES + 1)}:
        raise argument_error("retries", f"{text!r} is no whole number from 0 to {MAX_RETRIES}")
    return int(text)
