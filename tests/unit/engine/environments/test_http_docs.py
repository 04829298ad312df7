"""docs/environments.md says what the protocol's models are, and the example it names is an environment."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml

from clora_engine.environments import Generates, Message, ToolCall
from clora_engine.environments import http_protocol as protocol
from clora_engine.environments.http import build
from tests.unit.engine.environments.http_server import LOOPBACK

REPOSITORY = Path(__file__).parents[4]
MODELS: tuple[type[protocol.Wire], ...] = (
    *(protocol.Description, protocol.ToolDescription, protocol.Reset, protocol.FirstMessages, protocol.FirstMessage),
    *(protocol.Step, protocol.ModelTurn, protocol.Call, protocol.Turn, protocol.AnswerMessage, protocol.Close),
)
KEYWORDS = ("type", "const", "enum", "pattern", "minItems", "maxItems", "maxLength", "minimum", "maximum", "$ref")


def documented() -> dict[str, Any]:
    text = (REPOSITORY / "docs" / "environments.md").read_text()
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if b.startswith("openapi:")]
    found: dict[str, Any] = yaml.safe_load(block)
    return found


def shape(schema: dict[str, Any]) -> dict[str, Any]:
    """What a reader has to know of a field, without titles, descriptions and defaults."""
    found = {key: schema[key] for key in KEYWORDS if key in schema}
    if "const" in found or "enum" in found:
        found.pop("type", None)
    if "$ref" in found:
        found["$ref"] = found["$ref"].rpartition("/")[2]
    if "items" in schema:
        found["items"] = shape(schema["items"])
    if found.get("$ref") == "JsonSchema":
        return {"type": "object"}
    return found


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_the_documented_schema_is_the_models(model: type[protocol.Wire]) -> None:
    written = documented()["components"]["schemas"][model.__name__]
    made = model.model_json_schema(by_alias=True)
    assert set(written.get("required", ())) == set(made.get("required", ()))
    assert {name: shape(field) for name, field in written["properties"].items()} == {
        name: shape(field) for name, field in made["properties"].items()
    }


def test_all_schemas_and_references_of_the_document_exist() -> None:
    document = documented()
    assert set(document["components"]["schemas"]) == {model.__name__ for model in MODELS}
    assert set(document["paths"]) == {f"/v1/{name}" for name in ("environment", "reset", "step", "close")}


@contextmanager
def served() -> Iterator[str]:
    """The example, served as its docstring says."""
    path = REPOSITORY / "examples" / "http-environment" / "guess.py"
    spec = importlib.util.spec_from_file_location("guess", path)
    assert spec is not None
    assert spec.loader is not None
    guess = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guess)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(guess.app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


async def test_the_example_is_an_environment() -> None:
    with served() as url:
        factory = await asyncio.to_thread(build, {"url": url}, LOOPBACK)
        assert isinstance(factory, Generates)
        example = factory.generate(0, "train", 3)
        episode = factory.new()
        assert (await episode.reset(example))[0].role == "user"
        low, high, turns, reward = 1, 100, 0, 0.0
        while reward == 0.0 and turns < 8:
            turns += 1
            middle = (low + high) // 2
            result = await episode.step(Message("assistant", "", (ToolCall("guess", {"number": middle}),)))
            reward += result.reward
            if not result.done:
                low, high = (middle + 1, high) if result.messages[0].content == "higher" else (low, middle - 1)
        assert reward == 1.0
        await episode.close()
        wrong = factory.new()
        await wrong.reset(example)
        answered = await wrong.step(Message("assistant", "", (ToolCall("guess", {"number": "7"}),)))
        assert (answered.tool_errors, answered.done) == (1, False)
        assert (await wrong.step(Message("assistant", "I give up."))).done
        await wrong.close()
