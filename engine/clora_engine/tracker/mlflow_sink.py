"""A run of MLflow: on a tracking server, or in a folder in MLflow's own layout.

The run is found again by a tag with the experiment's uid. A step that a killed process has logged in part is completed:
the tag that names the last whole step is written after its metrics, and what comes after it is looked up once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clora_engine.tracker.protocol import Start
from clora_engine.tracker.sink import flat

UID_TAG, STEP_TAG = "clora.uid", "clora.step"
MAX_PARAMS_PER_CALL = 100
MAX_METRICS_PER_CALL = 1000


class MlflowSink:
    """See sink.Sink."""

    def __init__(self, start: Start) -> None:
        os.environ |= _environment(start)  # read when it is imported, and at each request
        from mlflow.tracking import MlflowClient

        folder = Path(start.folder) / "tracking" / "mlruns"
        self._client: Any = MlflowClient(start.url if start.online else folder.as_uri())
        self._run = self._found_or_made(start)
        run = self._client.get_run(self._run)
        self.last = self._last_whole_step(run)
        self._begun = self.last  # what comes right after it may be there in part
        if run.info.status != "RUNNING":
            self._client.update_run(self._run, status="RUNNING")
        self._log_params(start, run.data.params)

    def add(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        at = round(seconds * 1000)
        there = self._there(step, values) if self.last == self._begun else frozenset()
        metrics = [Metric(name, value, at, step) for name, value in values.items() if name not in there]
        for first in range(0, len(metrics), MAX_METRICS_PER_CALL):
            self._client.log_batch(self._run, metrics=metrics[first : first + MAX_METRICS_PER_CALL])
        self._client.set_tag(self._run, STEP_TAG, str(step))
        self.last = step

    def end(self, succeeded: bool | None) -> None:
        if succeeded is not None:
            self._client.set_terminated(self._run, "FINISHED" if succeeded else "FAILED")

    def _last_whole_step(self, run: Any) -> int | None:
        """As the tag says. In a folder a kill can leave it empty; then all before the last number are whole."""
        said = run.data.tags.get(STEP_TAG)
        if said != "":
            return int(said) if said is not None else None
        histories = (self._client.get_metric_history(self._run, name) for name in run.data.metrics)
        last = max((metric.step for history in histories for metric in history), default=0)
        return last - 1 if last else None

    def _found_or_made(self, start: Start) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(start.project)
        if experiment is None:
            try:
                project = self._client.create_experiment(start.project)
            except MlflowException:  # another experiment's tracker was faster
                project = self._client.get_experiment_by_name(start.project).experiment_id
        else:
            project = experiment.experiment_id
        runs = self._client.search_runs([project], f"tags.`{UID_TAG}` = '{start.uid}'", max_results=1)
        if runs:
            return str(runs[0].info.run_id)
        made = self._client.create_run(project, tags={UID_TAG: start.uid}, run_name=start.run_name)
        return str(made.info.run_id)

    def _log_params(self, start: Start, known: Mapping[str, str]) -> None:
        """MLflow's parameters never change: what is there stays as the run began."""
        from mlflow.entities import Param

        params = [Param(name, value[:500]) for name, value in flat(start.config).items() if name not in known]
        for first in range(0, len(params), MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._run, params=params[first : first + MAX_PARAMS_PER_CALL])

    def _there(self, step: int, names: Mapping[str, float]) -> frozenset[str]:
        def has(name: str) -> bool:
            return any(metric.step == step for metric in self._client.get_metric_history(self._run, name))

        return frozenset(name for name in names if has(name))


def _environment(start: Start) -> dict[str, str]:
    quiet = {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    }
    patience = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
    return quiet | patience | ({"MLFLOW_TRACKING_TOKEN": start.key} if start.key else {})
