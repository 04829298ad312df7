"""The checker of the chaos run finds what it is there to find."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clora_engine.journal import Journal
from tests.e2e.history import Commit, EngineEvent, StatusWrite, commits, engine_events, status_writes, violations

FINE = [
    EngineEvent("main", at, epoch, event, "u", step)
    for at, epoch, event, step in [
        (1.0, 1, "attach", 0),
        (2.1, 1, "loaded", 0),
        # a kill after the commit of step 2
        (5.0, 2, "attach", 2),
        (5.1, 2, "loaded", 2),
        (7.0, 2, "leave", 3),
        (8.0, 2, "delete", 3),
    ]
]
KEPT = [
    Commit("main", "u", step, epoch, at, tuple(range(step + 1)))
    for step, epoch, at in [(0, 1, 2.0), (1, 1, 3.0), (2, 1, 4.0), (3, 2, 6.0)]
]
WRITTEN = [StatusWrite(2.5, "u", "one", True, "main", 1, 0), StatusWrite(5.0, "u", "one", False, "main", 2, 2)]


def test_a_history_with_a_kill_in_it_is_fine() -> None:
    assert violations(FINE, KEPT, WRITTEN) == []


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (EngineEvent("main", 6.5, 2, "attach", "u", 3), "attached to main while it was there"),
        (EngineEvent("other", 4.0, 1, "attach", "u", 0), "was on main and other"),
    ],
)
def test_an_injected_event_is_found(event: EngineEvent, words: str) -> None:
    (found,) = violations([*FINE, event], KEPT, WRITTEN)
    assert words in found


@pytest.mark.parametrize(
    ("of_u", "words"),
    [
        ([*KEPT, replace(KEPT[3], epoch=3, at=6.5)], "committed step 3 twice, in epochs 2 and 3"),
        ([*KEPT[:3], replace(KEPT[3], metrics=(0, 1, 2, 2, 3))], "has metrics of steps [0, 1, 2, 2, 3] at its commit"),
        ([*KEPT[:2], KEPT[3]], "has step 3 and not step 2"),
        (KEPT[1:], "has step 1 and not step 0"),
        ([*KEPT[:3], replace(KEPT[3], epoch=0)], "committed step 3 in epoch 0, before step 2"),
        ([*KEPT[:3], replace(KEPT[3], at=3.5)], "committed step 3 in epoch 2, before step 2"),
        ([*KEPT, Commit("main", "u", 4, 2, 9.0, (0, 1, 2, 3, 4))], "after it was deleted"),
        ([*KEPT[:3], replace(KEPT[3], engine="other")], "was on main and other"),
    ],
)
def test_an_injected_commit_is_found(of_u: list[Commit], words: str) -> None:
    (found,) = violations(FINE, of_u, [])
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
    (found,) = violations(FINE, KEPT, [write])
    assert "was called Attached" in found


@pytest.mark.parametrize("write", [replace(WRITTEN[1], at=3.9), replace(WRITTEN[1], committed=4)])
def test_a_step_that_is_said_and_not_committed_is_found(write: StatusWrite) -> None:
    (found,) = violations(FINE, KEPT, [write])
    assert f"said to have committed step {write.committed} before it had" in found
    assert violations(FINE, [], [write]) == [], "its files are gone"


def test_steps_trained_again_on_one_storage_are_found(tmp_path: Path) -> None:
    """By engines that know no epochs: what the journal would refuse is taken out of its way."""
    for epoch in (1, 2):
        journal = Journal(tmp_path, "u", epoch)
        journal.claim("team", "one")
        for step in (0, 1):
            (journal.folder / "steps" / f"{step:05d}" / "manifest.json").unlink(missing_ok=True)
            commit(journal, step, at=10.0 * epoch + step)
    assert violations([], commits("main", tmp_path), []) == [
        "u has metrics of steps [0, 1, 0] at its commit of step 0",
        "u has metrics of steps [0, 1, 0, 1] at its commit of step 1",
    ]


def commit(journal: Journal, step: int, at: float) -> None:
    (journal.step_folder(step) / "adapter_model.safetensors").write_text(str(step))
    journal.append_metrics({"step": step})
    journal.commit(step, position=step, now=at)


def test_what_is_read_of_commits(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "u", 3)
    journal.claim("team", "one")
    commit(journal, 0, at=1.5)
    journal.append_metrics({"step": 1})  # of a step that never came to its commit
    assert commits("main", tmp_path) == [Commit("main", "u", 0, 3, 1.5, (0,))]
    (journal.folder / "steps" / "00000" / "adapter_model.safetensors").write_text("1")
    with pytest.raises(AssertionError, match=r"adapter_model\.safetensors"):
        commits("main", tmp_path)


def test_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"at": 1.5, "epoch": 2, "event": "leave", "uid": "u", "step": 3}\n')
    assert engine_events("main", tmp_path) == [EngineEvent("main", 1.5, 2, "leave", "u", 3)]
    assert engine_events("main", tmp_path / "nowhere") == []
    conditions = [{"type": "Accepted", "status": "True"}, {"type": "Attached", "status": "True"}]
    event = {
        "objectRef": {"namespace": "team", "resource": "loraexperiments", "subresource": "status", "name": "one"},
        "responseStatus": {"code": 200},
        "stageTimestamp": "2026-01-01T00:00:01.500000Z",
        "responseObject": {
            "metadata": {"uid": "u", "name": "one"},
            "status": {"conditions": conditions, "engine": {"name": "main", "epoch": 4}, "checkpoint": {"step": 2}},
        },
    }
    refused = {**event, "responseStatus": {"code": 409}}
    elsewhere = json.loads(json.dumps(event).replace("team", "others"))
    (write,) = status_writes([event, refused, elsewhere], "team")
    assert write == StatusWrite(1767225601.5, "u", "one", True, "main", 4, 2)
