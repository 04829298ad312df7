"""What an engine that ends leaves for Kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest

from clora_engine import __main__, last_words


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
