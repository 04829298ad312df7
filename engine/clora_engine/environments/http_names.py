"""Names of hosts to addresses, by the system's resolver, for tenants whose name servers may never answer.

The system's look-up blocks its thread, and nothing ends it before its own time-out. It therefore runs on threads of its
own, never on those that the engine's files need: one for each name however many ask, so many in all, and none that
anybody has to wait for.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from threading import Lock, Thread

from aiohttp.abc import AbstractResolver, ResolveResult

MAX_LOOKUPS = 64  # names under way at once

Found = list[tuple[socket.AddressFamily, str]]

_running: dict[tuple[str, socket.AddressFamily], Future[Found]] = {}
_lock = Lock()


class SystemResolver(AbstractResolver):
    """An aiohttp resolver over getaddrinfo. Raises OSError for a name that has no address."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await asyncio.wrap_future(_look_up(host, family))
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
            for kind, address in found
        ]

    async def close(self) -> None:
        return None


def _look_up(host: str, family: socket.AddressFamily) -> Future[Found]:
    key = host, family
    with _lock:
        if key in _running:
            return _running[key]
        if len(_running) >= MAX_LOOKUPS:
            raise OSError("too many names are being looked up")
        future = _running[key] = Future()
    future.set_running_or_notify_cancel()  # who gives up waiting does not end it for the others
    Thread(target=_ask, args=(key, future), name="look-up", daemon=True).start()
    return future


def _ask(key: tuple[str, socket.AddressFamily], future: Future[Found]) -> None:
    host, family = key
    found: Found = []
    error: OSError | None = None
    try:
        infos = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
        found = [(info[0], str(info[4][0])) for info in infos]
    except (OSError, UnicodeError) as caught:
        error = OSError(f"{host}: {caught}")
    with _lock:
        del _running[key]
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(found)
