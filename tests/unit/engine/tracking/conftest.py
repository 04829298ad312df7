from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def mlflow_reads_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow, where a test reads back with it: from files, and without telling its makers."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
