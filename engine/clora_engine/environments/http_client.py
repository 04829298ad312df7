"""One episode's requests to a user's own environment: checked addresses, bounded answers, bounded retries.

The other side is not trusted: only addresses that the policy allows are connected to, no redirect is followed, no
cookie kept, no proxy asked, no compressed answer unpacked, and an answer ends at MAX_ANSWER_BYTES. How long an answer
may take in all is the caller's to limit. Every failure has a class of its own, whose name metrics count.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from pydantic import BaseModel, ValidationError

from clora_engine.environments.http_addresses import HostPolicy
from clora_engine.environments.http_names import SystemResolver

MAX_ANSWER_BYTES = 1 << 20
MAX_TOLD = 200  # characters of an error; keys of an answer, which may be long, stand in it
CONNECT_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.25  # before the first retry; doubled for each further one

M = TypeVar("M", bound=BaseModel)


class EnvironmentRequestError(Exception):
    """A request to an environment failed for good."""


class Unreachable(EnvironmentRequestError):
    """No connection, or it broke."""


class AddressRefused(EnvironmentRequestError):
    """The host's address is one that the engine never connects to."""


class BadStatus(EnvironmentRequestError):
    """Answered with another status than 2xx; redirects are not followed. `lasting`: no later try will better it."""

    def __init__(self, message: str, *, lasting: bool) -> None:
        super().__init__(message)
        self.lasting = lasting


class AnswerTooLarge(EnvironmentRequestError):
    """Longer than MAX_ANSWER_BYTES."""


class BadAnswer(EnvironmentRequestError):
    """No JSON, or none that the protocol knows."""


class _Again(Exception):
    """May go better at the next try; `error` is what it is if not."""

    def __init__(self, error: EnvironmentRequestError) -> None:
        self.error = error


class EnvironmentClient:
    """Requests to the environment at `url` (without a slash at its end). To be closed; used by one task at a time.

    Args:
        retries: tries after the first one, for a connection that fails or breaks, and for statuses 429 and 5xx.
        resolver: finds the addresses of names; the system's, if None.
    """

    def __init__(self, url: str, policy: HostPolicy, *, retries: int, resolver: AbstractResolver | None = None) -> None:
        self._url = url
        self._policy = policy
        self._retries = retries
        self._resolver = resolver
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, answer: type[M]) -> M:
        return _parse(answer, await self._request("GET", path, None, ""))

    async def post(self, path: str, body: BaseModel, answer: type[M], *, key: str) -> M:
        """`key` names the request: the same at every try. Raises EnvironmentRequestError."""
        return _parse(answer, await self._post(path, body, key))

    async def tell(self, path: str, body: BaseModel, *, key: str) -> None:
        """As `post`, whatever the answer says."""
        await self._post(path, body, key)

    async def _post(self, path: str, body: BaseModel, key: str) -> bytes:
        return await self._request("POST", path, body.model_dump_json(by_alias=True).encode(), key)

    async def _request(self, method: str, path: str, body: bytes | None, key: str) -> bytes:
        for attempt in range(self._retries):
            try:
                return await self._once(method, path, body, key)
            except _Again:
                await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        try:
            return await self._once(method, path, body, key)
        except _Again as last:
            raise last.error from None

    async def _once(self, method: str, path: str, body: bytes | None, key: str) -> bytes:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if body is not None:
            headers |= {"Content-Type": "application/json", "Idempotency-Key": key}
        what = f"{method} {path}"
        try:
            async with self._opened().request(
                method, self._url + path, data=body, headers=headers, allow_redirects=False
            ) as response:
                _check_status(what, response.status)
                return await _read(what, response)
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeError) as error:
            told = str(error) or type(error).__name__
            raise _Again(Unreachable(f"{what}: {told}")) from None

    def _opened(self) -> aiohttp.ClientSession:
        """The session is made where it is used: it belongs to an event loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=_CheckedResolver(self._policy, self._resolver or SystemResolver()),
                use_dns_cache=False,
                socket_factory=_checked_sockets(self._policy),
                limit=1,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


def _check_status(what: str, status: int) -> None:
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise BadStatus(f"{what} answered {status}: redirects are not followed", lasting=True)
    if status == 429 or status >= 500:
        raise _Again(BadStatus(f"{what} answered {status}", lasting=False))
    raise BadStatus(f"{what} answered {status}", lasting=True)


async def _read(what: str, response: aiohttp.ClientResponse) -> bytes:
    if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise BadAnswer(f"{what}: a compressed answer, which was not asked for")
    found = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        found += chunk
        if len(found) > MAX_ANSWER_BYTES:
            raise AnswerTooLarge(f"{what}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
    return bytes(found)


def _parse(model: type[M], data: bytes) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        told = f"{where[:MAX_TOLD]}: {first['msg']}" if where else first["msg"]
        raise BadAnswer(told[:MAX_TOLD]) from None


class _CheckedResolver(AbstractResolver):
    """Gives a host's addresses only if the policy allows all of them."""

    def __init__(self, policy: HostPolicy, inner: AbstractResolver) -> None:
        self._policy = policy
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        for result in found:
            if why := self._policy.refusal(result["host"]):
                raise AddressRefused(f"{host} leads to {result['host']}, which {why}")
        return found

    async def close(self) -> None:
        with suppress(OSError):
            await self._inner.close()


def _checked_sockets(policy: HostPolicy) -> Callable[[Any], socket.socket]:
    """Makes the socket for one address, as it is about to be connected to: no address gets past this one."""

    def make(info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        if why := policy.refusal(address[0]):
            raise AddressRefused(f"{address[0]} {why}")
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        return made

    return make
