"""The connections of a port that strangers reach: how many there are at most, and how long one may ask for nothing.

A connection is busy from where the application has found its request's token good to the end of the answer, and idle
otherwise, whatever it sends. How many requests a token may have under way is bounded (serving.py). An idle connection
is closed after a time in which no such request came. When there are as many connections as there may be, a newcomer
takes the place of an idle one: of the address that has most of these, the one that has been idle for longest. So who
connects and asks for nothing, slowly or in great numbers, keeps nobody out. When all are busy, the newcomer is told so
and closed.

Left out: a fixed bound for an address, for behind an ingress all tenants have one. The parser is h11, which bounds the
size of a request's header.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 1024
IDLE_SECONDS = 20.0
AUTHORIZED = "clora_authorized"
"""In a request's ASGI state, what the application calls when it has found the token good."""
BACKLOG = 128  # connections that one turn of the event loop takes in

_BODY = json.dumps(
    {"error": {"message": "too many connections", "type": "server_error", "param": None, "code": "try_again"}}
).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class Crowd:
    """All connections of a port: `most` at once, each idle for `idle_seconds` at most."""

    def __init__(self, most: int = MOST_CONNECTIONS, idle_seconds: float = IDLE_SECONDS) -> None:
        self.most, self.idle_seconds = most, idle_seconds
        self._all: set[Connection] = set()
        self._idle: dict[str, dict[Connection, None]] = {}  # by address, the longest idle one first

    def __len__(self) -> int:
        return len(self._all)

    def protocol(self, **given: Any) -> Connection:
        """For uvicorn, which makes one for each connection."""
        return Connection(self, **given)

    def admit(self, connection: Connection) -> bool:
        """Whether there is, or can be made, room for it; it is idle then."""
        if len(self._all) >= self.most:
            if not self._idle:
                return False
            most: dict[Connection, None] = max(self._idle.values(), key=len)
            next(iter(most)).end()
        self._all.add(connection)
        self.idle(connection)
        return True

    def idle(self, connection: Connection) -> None:
        self._idle.setdefault(connection.address, {})[connection] = None

    def busy(self, connection: Connection) -> None:
        several = self._idle.get(connection.address, {})
        several.pop(connection, None)
        if not several:
            self._idle.pop(connection.address, None)

    def leave(self, connection: Connection) -> None:
        """A second call does nothing."""
        self.busy(connection)
        self._all.discard(connection)


class Connection(H11Protocol):
    """uvicorn's, of a Crowd."""

    def __init__(self, crowd: Crowd, **given: Any) -> None:
        super().__init__(**given)
        self.address = ""
        self._crowd = crowd
        self._busy = False
        self._deadline: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Closes it at once, what is still to be sent included: it may wait for a client that reads nothing."""
        self._crowd.leave(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self._crowd.admit(self):
            self._wait_for_request()
        else:
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._busy = False
        self._crowd.leave(self)
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._tell_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._busy:
            self._busy = False
            self._crowd.idle(self)
            self._wait_for_request()
        self._tell_request()

    def _tell_request(self) -> None:
        """The application runs in a task that has not begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.scope["state"][AUTHORIZED] = self._authorized

    def _authorized(self) -> None:
        if not self._busy and not self.transport.is_closing():
            self._busy = True
            self._stop_waiting()
            self._crowd.busy(self)

    def _wait_for_request(self) -> None:
        self._deadline = self.loop.call_later(self._crowd.idle_seconds, self.end)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
