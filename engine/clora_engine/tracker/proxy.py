"""The one way out of a tracker's process: an HTTP proxy on its own loopback that reaches allowed hosts only.

The libraries of trackers make connections of their own (W&B's from a program in Go) and follow redirects. They are told
this proxy; whatever host a URL, a redirect or a changed name leads to, it is checked here, by name and by address
(HostPolicy), and the connection goes to the checked address. A plain request gets a connection of its own, so that a
kept one cannot be used for another host; what is inside a tunnel (CONNECT, https) stays between its two ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from urllib.parse import urlsplit

from clora_engine.environments.http_addresses import HostPolicy

MAX_HEAD_BYTES = 1 << 16
CONNECT_SECONDS = 10.0
_OWN_HEADERS = (b"connection:", b"proxy-connection:", b"proxy-authorization:", b"keep-alive:")


class Refused(Exception):
    """The policy does not allow it."""


@contextmanager
def running(policy: HostPolicy) -> Iterator[str]:
    """The proxy's URL, while it runs in a thread of its own."""
    started: Future[tuple[int, Callable[[], object]]] = Future()

    async def serve() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(_Proxy(policy).serve, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
        port: int = server.sockets[0].getsockname()[1]
        started.set_result((port, lambda: loop.call_soon_threadsafe(over.set)))
        await over.wait()
        server.close()

    thread = Thread(target=asyncio.run, args=(serve(),), name="proxy", daemon=True)
    thread.start()
    port, stop = started.result()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop()
        thread.join()


class _Proxy:
    def __init__(self, policy: HostPolicy) -> None:
        self._policy = policy

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await self._forward(head, reader, writer)
        except Refused as refused:
            writer.write(_answer(403, str(refused)))
        except (OSError, TimeoutError) as error:
            writer.write(_answer(502, str(error) or type(error).__name__))
        except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.write(_answer(400, "no request that a proxy understands"))
        finally:
            await _close(writer)

    async def _forward(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, *headers = head[:-4].split(b"\r\n")
        method, target, version = request.decode("ascii").split(" ")
        tunnel = method == "CONNECT"
        url = urlsplit(f"https://{target}" if tunnel else target)
        if url.scheme not in ("http", "https") or (not tunnel and url.scheme == "https") or not url.hostname:
            raise ValueError(target)
        if not self._policy.allows(url):
            raise Refused(f"{url.netloc} is none of the engine's tracking.allowedHosts")
        there, there_writer = await self._connect(url.hostname, url.port or (443 if tunnel else 80))
        try:
            if tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                path = (url.path or "/") + (f"?{url.query}" if url.query else "")
                kept = [header for header in headers if not header.lower().startswith(_OWN_HEADERS)]
                lines = [f"{method} {path} {version}".encode(), *kept, b"Connection: close"]
                there_writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
            await _both_ways((reader, there_writer), (there, writer))
        finally:
            await _close(there_writer)

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To a checked address of the host."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
            for address in addresses:
                if why := self._policy.refusal(address):
                    raise Refused(f"{host} leads to {address}, which {why}")
            last: OSError = OSError(f"{host} has no address")
            for address in addresses:
                try:
                    return await asyncio.open_connection(address, port)
                except OSError as error:
                    last = error
            raise last


async def _both_ways(*pairs: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Until the second side has said everything, or the first has gone."""
    asked, answered = (asyncio.create_task(_copy(*pair)) for pair in pairs)
    try:
        await answered
    finally:
        asked.cancel()
        await asyncio.wait({asked})


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _answer(status: int, text: str) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status} refused\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
