"""Fixtures that more than one folder of tests needs, and the options of the tests."""

from __future__ import annotations

import pytest

pytest_plugins = ["tests.cluster_fixtures", "tests.engine_fixtures"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seconds", type=float, default=90.0, help="length of tests/e2e/test_chaos.py's trouble")
    parser.addoption("--chaos-seed", type=int, default=1, help="which trouble it is")
