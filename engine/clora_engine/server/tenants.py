"""What tenants reach: OpenAI's chat completions, completions and models, with a bearer token for each experiment.

    POST /v1/chat/completions   GET /v1/models
    POST /v1/completions        GET /v1/models/{name}

The token alone decides which adapter answers; the request's `model` must name its experiment, and chooses nothing.
Errors have OpenAI's form. The control API is on another port, and nothing of it here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from clora_engine.errors import CapacityError, EngineError, TransientError, UserError
from clora_engine.server import openai
from clora_engine.server.connections import AUTHORIZED
from clora_engine.server.openai import ChatRequest, CompletionRequest, RequestError
from clora_engine.server.words import Words
from clora_engine.serving import Served, ServedAdapter
from clora_engine.supervisor import Supervisor
from clora_engine.types import SamplingParams

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
BODY_SECONDS = 30.0
RETRY_AFTER_SECONDS = "5"
T = TypeVar("T")


def create_tenant_app(supervisor: Supervisor) -> FastAPI:
    """The ASGI application over a supervisor."""
    app = FastAPI(title="clora", openapi_url=None, docs_url=None, redoc_url=None)
    words = Words(supervisor)
    _install_errors(app)

    @app.get("/v1/models")
    async def models(request: Request) -> JSONResponse:
        found = _authorized(supervisor, request)
        return JSONResponse({"object": "list", "data": [openai.model_object(found.name)]})

    @app.get("/v1/models/{name}")
    async def model(request: Request, name: str) -> JSONResponse:
        found = _authorized(supervisor, request)
        _check_model(found, name)
        return JSONResponse(openai.model_object(found.name))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> JSONResponse:
        found = _authorized(supervisor, request)
        with found.request():
            asked = await words.parse(found.uid, ChatRequest, await _body(request))
            _check_model(found, asked.model)
            return await _unless_gone(request, _completed(supervisor, found, words, asked))

    @app.post("/v1/completions")
    async def completions(request: Request) -> JSONResponse:
        found = _authorized(supervisor, request)
        with found.request():
            asked = await words.parse(found.uid, CompletionRequest, await _body(request))
            _check_model(found, asked.model)
            return await _unless_gone(request, _completed(supervisor, found, words, asked))

    return app


# ------------------------------------------------------------------------------------------------ a request's parts


def _authorized(supervisor: Supervisor, request: Request) -> ServedAdapter:
    """What the request's token reaches. Asked again for every request: nothing is remembered of a connection."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if not supervisor.ready:
        raise RequestError(503, "the engine is loading its model", kind="server_error", code="not_ready")
    found = supervisor.served.find(token.strip()) if scheme.lower() == "bearer" and token.strip() else None
    if found is None:
        raise RequestError(
            401,
            "send the token of an experiment that is served as Authorization: Bearer …; after its engine was"
            " restarted, it takes moments until its token is known again",
            code="invalid_api_key",
        )
    if (announce := request.scope.get("state", {}).get(AUTHORIZED)) is not None:
        announce()
    return found


def _check_model(found: ServedAdapter, name: str) -> None:
    if name != found.name:
        raise RequestError(
            404, f"this token reaches the model {found.name} and no other", param="model", code="model_not_found"
        )


async def _body(request: Request) -> bytes:
    """Never more than MAX_BODY_BYTES of it are held."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise RequestError(413, f"a request body may have {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise RequestError(408, f"the body did not come within {BODY_SECONDS:g} s") from None
    return bytes(data)


async def _completed(
    supervisor: Supervisor, found: ServedAdapter, words: Words, asked: ChatRequest | CompletionRequest
) -> JSONResponse:
    prompt = await words.prompt(found.uid, asked)
    limit = supervisor.max_model_len
    if asked.limit is not None and asked.limit > limit:
        raise RequestError(400, f"max_tokens may be {limit}, the whole context", param="max_tokens")
    params = SamplingParams(
        temperature=asked.temperature,
        max_tokens=min(asked.limit or limit, max(1, limit - len(prompt))),
        stop_token_ids=await words.stop_token_ids(found.uid),
        seed=asked.seed,
    )
    served = await found.sample(supervisor.sampler, prompt, asked.n, params)
    texts = await words.texts(found.uid, served.samples)
    return _answer(found, asked, len(prompt), served, texts)


async def _unless_gone(request: Request, call: Coroutine[Any, Any, T]) -> T:
    """The call's result; it is cancelled when the client goes away, so that nobody samples for nobody."""
    work = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise RequestError(499, "the client has gone")
        return work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer(
    found: ServedAdapter, asked: ChatRequest | CompletionRequest, prompt_tokens: int, served: Served, texts: list[str]
) -> JSONResponse:
    chat = isinstance(asked, ChatRequest)
    choice = openai.chat_choice if chat else openai.completion_choice
    return JSONResponse(
        openai.answer(
            "chat.completion" if chat else "text_completion",
            identifier=uuid.uuid4().hex,
            created=int(time.time()),
            version=served.version,
            name=found.name,
            choices=[
                choice(i, text, sample) for i, (text, sample) in enumerate(zip(texts, served.samples, strict=True))
            ],
            prompt_tokens=prompt_tokens,
            samples=served.samples,
        )
    )


# ------------------------------------------------------------------------------------------------ errors


def _install_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def _refused(_: Request, error: RequestError) -> Response:
        return _error(error)

    @app.exception_handler(EngineError)
    async def _engine(_: Request, error: EngineError) -> Response:
        return _error(_translated(error))

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> Response:
        return _error(RequestError(error.status_code, str(error.detail)))

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> Response:
        log.error("unexpected error", exc_info=error)
        return _error(RequestError(500, "internal error; the engine's log has more", kind="server_error"))


def _translated(error: EngineError) -> RequestError:
    """The sampler's error, for a tenant."""
    if isinstance(error, UserError):
        code = "context_length_exceeded" if error.reason == "PromptTooLong" else "invalid_value"
        return RequestError(400, str(error), code=code)
    if isinstance(error, CapacityError):
        return RequestError(429, str(error), kind="rate_limit_error", code="rate_limit_exceeded")
    if error.reason in ("NoVersion", "Dropped", "VersionLost"):
        message = "the experiment is not served now: it is not attached to its engine (condition Served says why)"
        return RequestError(503, message, kind="server_error", code="model_not_available")
    if isinstance(error, TransientError):
        return RequestError(503, str(error), kind="server_error", code="try_again")
    log.error("a tenant's request failed: %s: %s", error.reason, error)
    return RequestError(500, f"the request failed: {error.reason}", kind="server_error")


def _error(error: RequestError) -> Response:
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif error.status in (429, 503):
        headers["Retry-After"] = RETRY_AFTER_SECONDS
    return Response(json.dumps(error.body()), error.status, headers, "application/json")
