"""The tenants' port: what it answers and refuses, in OpenAI's forms. The sampler's answers are written down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from clora_engine.errors import CapacityError, SamplerRestarted
from clora_engine.server import openai
from clora_engine.server.openai import ChatRequest, CompletionRequest, RequestError
from clora_engine.server.tenants import MAX_BODY_BYTES, create_tenant_app
from tests.unit.engine.loop import TURNS, tokenizer
from tests.unit.engine.test_serving import OTHER, TOKEN, Engine, has_ended, one

CHAT = {"model": "e", "messages": [{"role": "user", "content": "How many?"}]}
Tenant = tuple[Engine, httpx.AsyncClient]


@pytest_asyncio.fixture
async def tenant(tmp_path: Path) -> AsyncIterator[Tenant]:
    """An engine that serves one experiment, and a client with its token."""
    engine = Engine(tmp_path)
    engine.supervisor.served.admit(one().uid, "e", TOKEN)
    engine.sampler.published.append(1)
    transport = httpx.ASGITransport(create_tenant_app(engine.supervisor), raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://t", headers=headers) as client:
        yield engine, client


def problem(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


# ------------------------------------------------------------------------------------------------ answers


async def test_a_chat_completion(tenant: Tenant) -> None:
    _, client = tenant
    answer = (await client.post("/v1/chat/completions", json=CHAT | {"n": 3, "seed": 1, "max_tokens": 40})).json()
    assert answer["object"] == "chat.completion"
    assert (answer["model"], answer["system_fingerprint"]) == ("e", "e@1")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        text = choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            assert text in TURNS  # without the token that ends a turn
        else:
            assert any(turn.startswith(text) for turn in TURNS)
    prompt = tokenizer().apply_chat_template(CHAT["messages"], add_generation_prompt=True)["input_ids"]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["total_tokens"] == len(prompt) + answer["usage"]["completion_tokens"]


async def test_a_completion_of_text_and_of_tokens(tenant: Tenant) -> None:
    _, client = tenant
    text = (await client.post("/v1/completions", json={"model": "e", "prompt": "How many?", "temperature": 0})).json()
    ids = tokenizer().encode("How many?")
    same = (await client.post("/v1/completions", json={"model": "e", "prompt": ids, "temperature": 0})).json()
    assert text["object"] == "text_completion"
    assert text["choices"] == same["choices"]
    assert text["usage"] == same["usage"]


async def test_the_models(tenant: Tenant) -> None:
    _, client = tenant
    assert [m["id"] for m in (await client.get("/v1/models")).json()["data"]] == ["e"]
    assert (await client.get("/v1/models/e")).json()["object"] == "model"
    assert (await client.get("/v1/models/other")).status_code == 404


# ------------------------------------------------------------------------------------------------ who may ask


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", f"Bearer {OTHER}", TOKEN]
)
async def test_without_the_token_nobody_is_told_anything(tenant: Tenant, header: str | None) -> None:
    _, client = tenant
    client.headers.pop("authorization")
    headers = {} if header is None else {"Authorization": header}
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/models/e"), ("POST", "/v1/chat/completions")):
        answer = await client.request(method, path, headers=headers, json=CHAT)
        assert answer.status_code == 401
        assert problem(answer)["code"] == "invalid_api_key"
        assert "e@1" not in answer.text


async def test_another_tenants_model_is_not_found(tenant: Tenant) -> None:
    engine, client = tenant
    engine.supervisor.served.admit("uid-of-b", "b", OTHER)
    engine.sampler.latest["uid-of-b"] = 7
    answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "b"})
    assert answer.status_code == 404
    assert problem(answer)["param"] == "model"
    other = await client.post("/v1/chat/completions", json=CHAT, headers={"Authorization": f"Bearer {OTHER}"})
    assert other.status_code == 404


async def test_once_it_is_off_or_deleted_its_token_is_nobodys(tenant: Tenant) -> None:
    engine, client = tenant
    await engine.put(one())
    await engine.until(one().uid, has_ended)
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    await engine.put(one(), serving_token=None)
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 401
    await engine.put(one(), serving_token=TOKEN)
    assert (await client.get("/v1/models")).status_code == 200
    await engine.supervisor.delete(one().uid, files=False)
    assert (await client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("path", ["/v1/engine", "/v1/experiments", "/metrics", "/healthz", "/openapi.json", "/docs"])
async def test_nothing_of_the_control_api_is_here(tenant: Tenant, path: str) -> None:
    _, client = tenant
    answer = await client.get(path)
    assert answer.status_code == 404
    problem(answer)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stream": True}, "stream"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"stop": ["\n"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"model": None}, "model"),
    ],
)
async def test_what_would_be_answered_differently_is_refused_by_its_name(
    tenant: Tenant, changes: dict[str, Any], param: str
) -> None:
    engine, client = tenant
    before = engine.sampler.sampled
    answer = await client.post("/v1/chat/completions", json=CHAT | changes)
    assert answer.status_code == 400
    assert problem(answer)["param"] == param
    assert engine.sampler.sampled == before


@pytest.mark.parametrize(
    ("content", "code"),
    [("a<|im_end|>b", "invalid_value"), ("word " * 100_000, "context_length_exceeded")],
)
async def test_what_the_template_or_the_context_does_not_hold(tenant: Tenant, content: str, code: str) -> None:
    engine, client = tenant
    answer = await client.post("/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": content}]})
    assert (answer.status_code, problem(answer)["code"]) == (400, code)
    assert engine.sampler.sampled == 0


async def test_a_raw_prompt_may_hold_special_tokens_and_has_to_fit(tenant: Tenant) -> None:
    _, client = tenant
    raw = {"model": "e", "prompt": "<|im_start|>user\nHow many?<|im_end|>\n"}
    assert (await client.post("/v1/completions", json=raw)).status_code == 200
    answer = await client.post("/v1/completions", json=raw | {"prompt": "word " * 100_000})
    assert problem(answer)["code"] == "context_length_exceeded"


def test_what_asks_for_nothing_passes() -> None:
    asks_for_nothing: dict[str, Any] = {
        **{"stream": False, "top_p": 1.0, "tools": [], "stop": None, "logit_bias": {}, "user": "me", "metadata": {}},
        **{"presence_penalty": 0, "response_format": {"type": "text"}, "seed": None, "tool_choice": "auto"},
    }
    asked = openai.parse(ChatRequest, json.dumps(CHAT | asks_for_nothing).encode())
    assert asked == openai.parse(ChatRequest, json.dumps(CHAT).encode())
    assert (asked.temperature, asked.n, asked.limit) == (1.0, 1, None)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    many = CHAT | {"messages": [{"role": "developer", "content": parts}], "max_completion_tokens": 5}
    asked = openai.parse(ChatRequest, json.dumps(many).encode())
    assert (asked.messages[0].message().role, asked.messages[0].message().content) == ("system", "ab")
    assert asked.limit == 5


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"model": "\\ud800", "prompt": "a"}',
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"model": "e", "prompt": "a", "temperature": NaN}',
    ]
    + [b'{"model": "e", "prompt": %s}' % prompt for prompt in (b'""', b"[]", b'["a"]', b"[1.5]", b"[true]", b"{}")],
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        openai.parse(CompletionRequest, body)
    assert refused.value.status == 400


async def test_a_body_that_is_too_long_is_not_read_to_its_end(tenant: Tenant) -> None:
    _, client = tenant
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 65536
            yield b" " * 65536

    answer = await client.post("/v1/chat/completions", content=endless())
    assert answer.status_code == 413
    assert sent <= MAX_BODY_BYTES + 2 * 65536


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (SamplerRestarted("the core died"), 503, "server_error"),
        (CapacityError("too many", reason="SamplerQueueFull"), 429, "rate_limit_error"),
        (RuntimeError("/secret/path"), 500, "server_error"),
    ],
)
async def test_the_samplers_errors(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, kind: str
) -> None:
    engine, client = tenant

    async def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(engine.sampler, "sample", fails)
    answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, problem(answer)["type"]) == (status, kind)
    assert ("Retry-After" in answer.headers) == (status in (429, 503))
    assert "/secret/path" not in answer.text


def went_away(path: str, body: bytes, when: asyncio.Event | None = None) -> tuple[Any, Any, Any]:
    """Scope, receive and send of a request whose client goes away, at once or when it is told to."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        if when is not None:
            await when.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        return None

    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": b"", "query_string": b""},
        **{"headers": [(b"authorization", f"Bearer {TOKEN}".encode())], "http_version": "1.1", "scheme": "http"},
    }
    return scope, receive, send


async def test_a_client_that_goes_ends_its_request(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = tenant
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(*_: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(engine.sampler, "sample", slow)
    gone = asyncio.Event()
    given = went_away("/v1/chat/completions", json.dumps(CHAT).encode(), gone)
    call = asyncio.create_task(create_tenant_app(engine.supervisor)(*given))
    await begun.wait()
    gone.set()
    async with asyncio.timeout(10):
        await cancelled.wait()
        await call
