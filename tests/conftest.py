"""Fixtures that more than one folder of tests needs, and the options of the tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported; nothing here asks the hub

CLUSTERS = {"control_plane", "fresh_control_plane", "charts", "node_cluster"}
# how long an example takes says nothing on a machine that has other things to do
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
pytest_plugins = ["tests.cluster_fixtures", "tests.engine_fixtures"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seconds", type=float, default=90.0, help="length of tests/e2e/test_chaos.py's trouble")
    parser.addoption("--chaos-seed", type=int, default=1, help="which trouble it is")


@pytest.hookimpl(tryfirst=True)  # before pytest looks which marks were asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what needs an API server: `cluster`."""
    for item in items:
        if isinstance(item, pytest.Function) and CLUSTERS & set(item.fixturenames):
            item.add_marker(pytest.mark.cluster)
