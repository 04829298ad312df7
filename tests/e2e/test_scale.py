"""Two hundred experiments on five engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clora_operator.settings import Settings
from local.control_plane import ControlPlane
from tests.e2e.scale import measure

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_two_hundred_experiments_on_five_engines(fresh_control_plane: ControlPlane, tmp_path: Path) -> None:
    """All are attached once, none is written about when nothing happens, and all go, the namespace too."""
    figures = measure(fresh_control_plane, tmp_path, window_seconds=20.0)
    print(json.dumps(figures.to_dict(), indent=1))
    assert figures.attached_twice == 0
    assert figures.left == 0
    assert figures.idle.status_writes_per_minute == 0
    # of all that run together, at most as many as Settings.moving_writes_per_second says
    assert 0 < figures.running.status_writes_per_minute <= 60 * Settings().moving_writes_per_second * 1.1
