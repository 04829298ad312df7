"""Busy time is the union of its blocks."""

from __future__ import annotations

import pytest

from clora_engine.busy_clock import BusyClock


def test_overlapping_blocks_count_once_and_the_open_one_so_far() -> None:
    time = 0.0
    clock = BusyClock(lambda: time)
    with clock:
        time = 2.0
        with clock:
            time = 3.0
        assert clock.seconds == 3.0
        time = 5.0
    time = 9.0
    assert clock.seconds == 5.0
    with pytest.raises(ZeroDivisionError), clock:
        time = 10.0 / 0
    time = 20.0
    assert clock.seconds == 5.0
