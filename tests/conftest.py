"""Fixtures that more than one folder of tests needs."""

pytest_plugins = ["tests.cluster_fixtures", "tests.engine_fixtures"]
