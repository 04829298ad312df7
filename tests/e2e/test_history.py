"""The checker of the chaos run finds what it is there to find."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.history import EngineEvent, StatusWrite, engine_events, status_writes, violations

FINE = [
    EngineEvent("main", at, epoch, event, "u", step)
    for at, epoch, event, step in [
        (1.0, 1, "attach", 0),
        (2.0, 1, "commit", 0),
        (2.1, 1, "loaded", 0),
        (3.0, 1, "commit", 1),
        # a kill after the commit of step 2 and before it was noted
        (5.0, 2, "attach", 2),
        (5.1, 2, "loaded", 2),
        (6.0, 2, "commit", 3),
        (7.0, 2, "leave", 3),
        (8.0, 2, "delete", 3),
    ]
]
WRITTEN = [StatusWrite(2.5, "u", "one", True, "main", 1), StatusWrite(5.0, "u", "one", False, "main", 2)]


def test_a_history_with_a_kill_in_it_is_fine() -> None:
    assert violations(FINE, WRITTEN) == []


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (EngineEvent("main", 6.5, 2, "commit", "u", 3), "committed step 3 after step 3"),
        (EngineEvent("main", 6.5, 2, "commit", "u", 1), "committed step 1 after step 3"),
        (EngineEvent("main", 6.5, 2, "commit", "u", 5), "went from step 3 to 5 within epoch 2"),
        (EngineEvent("main", 9.0, 2, "commit", "u", 4), "after it was deleted"),
        (EngineEvent("main", 6.5, 2, "attach", "u", 3), "attached to main while it was there"),
        (EngineEvent("other", 4.0, 1, "attach", "u", 0), "was on main and other"),
    ],
)
def test_an_injected_fault_is_found(event: EngineEvent, words: str) -> None:
    (found,) = violations([*FINE, event], WRITTEN)
    assert words in found


@pytest.mark.parametrize(
    "write",
    [
        replace(WRITTEN[0], at=2.05),  # too early
        replace(WRITTEN[0], epoch=3),  # no such epoch
        replace(WRITTEN[0], engine="other"),
        replace(WRITTEN[0], uid="v"),
    ],
)
def test_attached_without_the_engines_word_is_found(write: StatusWrite) -> None:
    (found,) = violations(FINE, [write])
    assert "was called Attached" in found


def test_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"at": 1.5, "epoch": 2, "event": "commit", "uid": "u", "step": 3}\n')
    assert engine_events("main", tmp_path) == [EngineEvent("main", 1.5, 2, "commit", "u", 3)]
    assert engine_events("main", tmp_path / "nowhere") == []
    conditions = [{"type": "Accepted", "status": "True"}, {"type": "Attached", "status": "True"}]
    event = {
        "objectRef": {"namespace": "team", "resource": "loraexperiments", "subresource": "status", "name": "one"},
        "responseStatus": {"code": 200},
        "stageTimestamp": "2026-01-01T00:00:01.500000Z",
        "responseObject": {
            "metadata": {"uid": "u", "name": "one"},
            "status": {"conditions": conditions, "engine": {"name": "main", "epoch": 4}},
        },
    }
    refused = {**event, "responseStatus": {"code": 409}}
    elsewhere = json.loads(json.dumps(event).replace("team", "others"))
    (write,) = status_writes([event, refused, elsewhere], "team")
    assert write == StatusWrite(1767225601.5, "u", "one", True, "main", 4)
