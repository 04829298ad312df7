"""The call that tells an engine who may ask for an adapter: what goes over the wire, and what is remembered of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from clora_api.control import DesiredServing
from clora_operator.act import Actor
from clora_operator.cache import Cache
from clora_operator.desired import token_digest
from clora_operator.links import Links
from clora_operator.observe import ServingAnswer
from clora_operator.plan import Plan, ServeOnEngine
from clora_operator.resources import Key
from tests.unit.operator.factories import NOW, UID, experiment, report, running

ENGINE = Key("engine", "team", "main")
TOKEN = "a-token-for-tenants"
OF = experiment(status=running())


class Engine:
    """Answers what a test wants, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer = httpx.Response(200, json=report(OF).to_api())
        self.asked: list[tuple[str, str, dict[str, Any]]] = []

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            self.asked.append((request.method, request.url.path, json.loads(request.content)))
            return self.answer
        return httpx.Response(503)


@pytest.fixture
async def links() -> AsyncIterator[Links]:
    made = Links(1.0, lambda: NOW, lambda change: None)
    yield made
    await made.close()


async def carried_out(links: Links, serving: DesiredServing) -> ServingAnswer | None:
    actor = Actor(None, Cache(), links, lambda: NOW)  # type: ignore[arg-type]  # no Kubernetes in this
    outcome = await actor.carry_out(OF, Plan(actions=(ServeOnEngine(ENGINE, UID, serving),)))
    assert outcome.errors == []
    return outcome.serving


async def connected(links: Links) -> Engine:
    await links.connect(ENGINE, "http://engine", "token-of-the-operator")
    engine, link = Engine(), links.get(ENGINE)
    assert link is not None
    transport = httpx.MockTransport(engine.handle)
    link._client._http = httpx.AsyncClient(base_url="http://engine", transport=transport)
    return engine


async def test_a_token_or_none_and_the_weight_go_over_the_wire(links: Links) -> None:
    engine = await connected(links)
    on, off = DesiredServing(serving_token=TOKEN, weight=7), DesiredServing()
    assert await carried_out(links, on) == ServingAnswer(token_digest(on), NOW, 7)
    assert await carried_out(links, off) == ServingAnswer("", NOW)
    path = f"/v1/experiments/{UID}/serving"
    assert engine.asked == [("PUT", path, {"servingToken": TOKEN, "weight": 7}), ("PUT", path, {})]


async def test_what_was_not_taken_is_remembered_as_such(links: Links) -> None:
    unheard = await carried_out(links, DesiredServing(serving_token=TOKEN))
    assert unheard is not None
    assert unheard.error == "the engine is not connected"
    engine = await connected(links)
    problem = {"type": "https://clora.dev/problems/not-found", "title": "t", "status": 404, "detail": "no such one"}
    engine.answer = httpx.Response(404, json=problem)
    unknown = await carried_out(links, DesiredServing(serving_token=TOKEN))
    assert unknown is not None
    assert (unknown.error, unknown.unknown, unheard.unknown) == ("no such one", True, False)
    assert TOKEN not in repr(unknown)


@pytest.mark.parametrize(("status", "unknown"), [(404, True), (405, True), (409, False), (500, False), (401, False)])
async def test_an_engine_that_knows_no_such_call_is_told_from_one_in_trouble(
    links: Links, status: int, unknown: bool
) -> None:
    """A route that is not there is answered with whatever a server answers then."""
    engine = await connected(links)
    engine.answer = httpx.Response(status, json={"detail": "Not Found"})
    answer = await carried_out(links, DesiredServing())
    assert answer is not None
    assert answer.error
    assert answer.unknown is unknown
