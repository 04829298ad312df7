"""What an experiment shows of its steps, and what is taken over from one to the next."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from clora_api.control import ReportedProgress
from clora_engine.journal import Commit, Manifest
from clora_engine.progress import SHOWN, Progress


def test_waiting_for_sampler_and_trainer_adds_up_over_steps() -> None:
    progress = Progress()
    progress.take(0, 0, {"wait_sampler_seconds": 1.5})
    progress.take(1, 8, {"wait_sampler_seconds": 2.0, "wait_trainer_seconds": 4.0})
    assert progress.report(10, "Train").seconds_waited == 7.5


def test_a_new_life_goes_on_from_the_waiting_of_the_lives_before() -> None:
    lines: list[dict[str, float]] = [
        {"step": 0},
        {"step": 1, "wait_sampler_seconds": 2.0, "wait_trainer_seconds": 4.0, "step_seconds": 9.0},
    ]
    commit = Commit(Path(), Manifest(step=1, epoch=1, files={}, metrics_bytes=0, position=8, time=0.0), "")
    progress = Progress()
    progress.resume(commit, lines)
    assert (progress.step, progress.position, progress.waited, progress.pace) == (1, 8, 6.0, 9.0)
    ended = Progress()
    ended.end(ReportedProgress(step=1, seconds_waited=6.0, reward=0.5))
    assert (ended.step, ended.waited, ended.reward) == (1, 6.0, 0.5)


def test_means_follow_the_newest_steps_and_ignore_those_without_a_value() -> None:
    progress = Progress()
    progress.take(1, 8, {"step_seconds": 10.0, "sampled_tokens": 100.0})
    progress.take(2, 16, {"step_seconds": 20.0})
    progress.take(3, 24, {"step_seconds": 13.0, "sampled_tokens": 200.0})
    assert progress.pace == pytest.approx(13.0)
    assert progress.step_tokens == pytest.approx(130.0)


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({"sampled_tokens": 100.0, "trained_tokens": 250.0}, 250.0),
        ({"sampled_tokens": 100.0, "trained_tokens": 0.0}, 100.0),
        ({"trained_tokens": 70.0}, 70.0),
        ({}, None),
    ],
)
def test_a_steps_work_is_what_it_sampled_or_trained_on(values: dict[str, Any], tokens: float | None) -> None:
    progress = Progress()
    progress.take(1, 8, values)
    assert progress.step_tokens == tokens


def test_a_step_that_changed_nothing_is_not_what_the_sampler_serves() -> None:
    progress = Progress()
    progress.take(1, 8, {"updates": 1.0})
    progress.take(2, 16, {"updates": 0.0})
    progress.take(3, 24, {"updates": 0.0, "update_skipped": 1.0})
    assert (progress.step, progress.published_step) == (3, 1)


def test_only_finite_values_are_shown_and_no_more_than_status_holds() -> None:
    assert len(SHOWN) <= 16
    progress = Progress()
    progress.take(1, 8, {"loss": math.nan, "grad_norm": 0.5, "something_else": 1.0, "time": "2026-01-01T00:00:00Z"})
    report = progress.report(4, "")
    assert report.metrics == {"gradNorm": 0.5}
    assert (report.step, report.max_steps, report.last_step_time) == (1, 4, "2026-01-01T00:00:00Z")
