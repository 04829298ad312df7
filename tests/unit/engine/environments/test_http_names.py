"""Look-ups of names whose servers do not answer: they hold up nobody but who asked."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from clora_engine.environments import http_names
from clora_engine.environments.http import build
from clora_engine.environments.http_addresses import AllowedHost, HostPolicy
from clora_engine.environments.http_names import SystemResolver
from clora_engine.errors import TransientError


class Hanging:
    """A name server that answers once `go` is set; `asked` are the names."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()

    def __call__(self, host: str, *_: Any) -> Any:
        self.asked.append(host)
        assert self.go.wait(600)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 0))]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    server = Hanging()
    monkeypatch.setattr(socket, "getaddrinfo", server)
    yield server
    server.go.set()


async def test_a_name_is_looked_up_once_at_a_time_and_beside_the_threads_of_others(hanging: Hanging) -> None:
    asking = [asyncio.create_task(SystemResolver().resolve("a.svc", 80)) for _ in range(64)]
    await asyncio.sleep(0)
    assert await asyncio.to_thread(lambda: "a file is written") == "a file is written"
    asking[0].cancel()
    await asyncio.wait([asking[0]])
    hanging.go.set()
    found = await asyncio.gather(*asking[1:])
    assert hanging.asked == ["a.svc"]
    assert {(one["hostname"], one["host"], one["port"]) for (one,) in found} == {("a.svc", "10.1.2.3", 80)}


async def test_no_more_names_than_so_many_are_looked_up_at_once(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_names, "MAX_LOOKUPS", 2)
    asking = [asyncio.create_task(SystemResolver().resolve(name)) for name in ("a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="too many names"):
        await SystemResolver().resolve("c")
    hanging.go.set()
    await asyncio.gather(*asking)
    assert (await SystemResolver().resolve("c"))[0]["host"] == "10.1.2.3"


async def test_admission_gives_up_while_the_name_is_still_looked_up(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clora_engine.environments.http.DESCRIBE_SECONDS", 0.05)
    with pytest.raises(TransientError, match="did not describe itself"):
        await asyncio.to_thread(build, {"url": "http://slow.svc"}, HostPolicy((AllowedHost.parse("slow.svc"),)))
    assert not hanging.go.is_set()


@pytest.mark.parametrize("host", ["x" * 64 + ".svc", "a..svc", "no-such-name.invalid"])
async def test_a_name_without_an_address_is_an_oserror(host: str) -> None:
    with pytest.raises(OSError, match=host.replace(".", r"\.")):
        await SystemResolver().resolve(host)
