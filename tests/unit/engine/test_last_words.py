"""What an engine that ends leaves for Kubernetes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from clora_engine import __main__, engine, last_words
from clora_engine.config import EngineConfig
from clora_engine.errors import UserError


def test_the_message_is_left_in_a_container_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "termination-log"
    monkeypatch.setattr(last_words, "MESSAGE_FILE", file)
    last_words.tell("nobody looks")
    assert not file.exists()
    file.touch()
    last_words.tell("é" * 4000)
    assert len(file.read_bytes()) == last_words.MOST_BYTES


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "termination-log"
    file.touch()
    monkeypatch.setattr(last_words, "MESSAGE_FILE", file)
    flags = ["--model", "m", "--storage", str(tmp_path / "s"), "--token-file", str(tmp_path / "none")]
    assert __main__.main(["serve", *flags]) == 1
    assert "none" in file.read_text()


async def test_a_trainer_that_does_not_start_is_told_before_the_sampler_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "termination-log"
    file.touch()
    monkeypatch.setattr(last_words, "MESSAGE_FILE", file)
    told, goes_on = asyncio.Event(), asyncio.Event()

    class Sampler:
        def __init__(self, *_: object) -> None:
            pass

        async def start(self) -> None:
            await goes_on.wait()

        async def close(self) -> None:
            pass

    async def no_trainer(*_: object) -> None:
        asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(told.set))
        raise UserError("the base model does not fit", field="model")

    monkeypatch.setattr(engine, "Sampler", Sampler)
    monkeypatch.setattr(engine, "_start_trainer", no_trainer)
    config = EngineConfig(model=str(tmp_path), storage=tmp_path, token_file=tmp_path / "token")
    async with contextlib.AsyncExitStack() as stack:
        loading = asyncio.create_task(engine._load(config, 1, None, stack))
        await told.wait()
        assert file.read_text() == "the base model does not fit"
        goes_on.set()
        with pytest.raises(UserError, match="does not fit"):
            await loading
