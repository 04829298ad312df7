"""Long texts on the tenants' port: whose become tokens when, and who is told to come again."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from clora_engine.server.tenants import create_tenant_app
from clora_engine.serving import MAX_REQUESTS
from tests.unit.engine.loop import tokenizer
from tests.unit.engine.test_serving import OTHER, TOKEN, Engine, one
from tests.unit.engine.test_tenants import problem, went_away


class HeldTokenizer:
    """Encodes a text with "held" in it when it is let go, and says which have come so far."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._news = threading.Condition()
        self._free = False
        self.encoding: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __deepcopy__(self, _: Any) -> HeldTokenizer:
        return self

    def encode(self, text: str, **options: Any) -> Any:
        if "held" in text:
            with self._news:
                self.encoding.append(text)
                self._news.notify_all()
                assert self._news.wait_for(lambda: self._free, 30)
        return self._inner.encode(text, **options)

    def until_encoding(self) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.encoding, 30)

    def let_go(self) -> None:
        with self._news:
            self._free = True
            self._news.notify_all()


async def test_one_tenants_long_texts_hold_up_itself_alone(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    held = HeldTokenizer(tokenizer())
    engine.supervisor.open(replace(engine.supervisor._services, tokenizer=held))
    engine.supervisor.served.admit(one().uid, "e", TOKEN)
    engine.supervisor.served.admit("uid-of-b", "b", OTHER)
    engine.sampler.published.append(1)
    transport = httpx.ASGITransport(create_tenant_app(engine.supervisor), raise_app_exceptions=False)

    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:

        async def ask(token: str, model: str, prompt: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}"}
            return await client.post("/v1/completions", json={"model": model, "prompt": prompt}, headers=headers)

        waiting = [asyncio.create_task(ask(TOKEN, "e", f"held {i}")) for i in range(MAX_REQUESTS)]
        await asyncio.to_thread(held.until_encoding)
        refused = await ask(TOKEN, "e", "one more")
        assert (refused.status_code, problem(refused)["code"]) == (429, "rate_limit_exceeded")
        assert "Retry-After" in refused.headers
        for _ in range(3):
            assert (await ask(OTHER, "b", "How many?")).status_code == 200, "it waits for none of the other's"
        assert len(held.encoding) == 1, "one text of a tenant at a time"
        held.let_go()
        assert {(await answer).status_code for answer in waiting} == {200}
        assert (await ask(TOKEN, "e", "one more")).status_code == 200


async def test_a_client_that_goes_takes_its_waiting_text_along(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    held = HeldTokenizer(tokenizer())
    engine.supervisor.open(replace(engine.supervisor._services, tokenizer=held))
    engine.supervisor.served.admit(one().uid, "e", TOKEN)
    engine.sampler.published.append(1)
    app = create_tenant_app(engine.supervisor)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        first = asyncio.create_task(
            client.post("/v1/completions", json={"model": "e", "prompt": "held first"}, headers=headers)
        )
        await asyncio.to_thread(held.until_encoding)
        second = json.dumps({"model": "e", "prompt": "held second"}).encode()
        await asyncio.gather(app(*went_away("/v1/completions", second)), return_exceptions=True)
        held.let_go()
        assert (await first).status_code == 200
    assert held.encoding == ["held first"]
