"""A run of Trackio: on a server of one's own or a Hugging Face Space, or in a folder that `trackio show` reads.

The run's id is the experiment's uid. Each step has a log id made of uid and step, by which Trackio's store itself takes
it once, however often it comes. Trackio's `init` and `log` are left out: they draw a step's id at random, find runs by
name, and keep failures to themselves. What they call is called here: Trackio's client of a server, or its store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from clora_engine.tracker.protocol import Start

SPACES = ".hf.space"
SECONDS = 60.0  # for an answer of the server
MAX_TOLD = 300  # characters of what a server says is wrong


class ServerError(Exception):
    """The server has refused something; the message is its own."""


class TrackioSink:
    """See sink.Sink."""

    def __init__(self, start: Start) -> None:
        os.environ |= _environment(start)  # read when it is imported
        from trackio.sqlite_storage import SQLiteStorage

        SQLiteStorage.validate_project_name(start.project)
        self._uid, self._project, self._config = start.uid, start.project, start.config
        self._store: _Store = _Server(start) if start.online else _Files(start.project)
        known = self._store.summary(start.project, start.uid)
        self._name = known["run"] or start.run_name  # as the run began
        self.last: int | None = known["last_step"]

    def add(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        entry = {
            "project": self._project,
            "run": self._name,
            "run_id": self._uid,
            "metrics": dict(values),
            "step": step,
            "config": self._config if self.last is None else None,  # kept in one transaction with the first step
            "log_id": f"{self._uid}-{step}",
        }
        self._store.log(entry, seconds)
        self.last = step

    def end(self, succeeded: bool | None) -> None:
        """All is there already, and a run of Trackio has no state."""


class _Store(Protocol):
    def summary(self, project: str, uid: str) -> Mapping[str, Any]:
        """What it has of a run: the name (run) and the last_step, both None before the first."""

    def log(self, entry: Mapping[str, Any], seconds: float) -> None:
        """Takes a step (Trackio's LogEntry), made at `seconds` since the Unix epoch."""


class _Files:
    """The store in TRACKIO_DIR: a SQLite file for the project."""

    def __init__(self, project: str) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        SQLiteStorage.init_db(project)

    def summary(self, project: str, uid: str) -> Mapping[str, Any]:
        from trackio.server import get_run_summary

        found: Mapping[str, Any] = get_run_summary(project, run_id=uid)
        return found

    def log(self, entry: Mapping[str, Any], seconds: float) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        SQLiteStorage.bulk_log(
            project=entry["project"],
            run=entry["run"],
            run_id=entry["run_id"],
            metrics_list=[entry["metrics"]],
            steps=[entry["step"]],
            timestamps=[datetime.fromtimestamp(seconds, UTC).isoformat()],
            log_ids=[entry["log_id"]],
            config=entry["config"],
        )


class _Server:
    """A Trackio server. It stamps steps with the time of their arrival: its API takes no other.

    A Space is told by its host; its key is a Hugging Face token, that of other servers their write token.
    """

    def __init__(self, start: Start) -> None:
        import httpx
        from trackio.remote_client import WRITE_TOKEN_HEADER, RemoteClient

        self._failed = httpx.HTTPStatusError
        assert start.url is not None
        space = (urlsplit(start.url).hostname or "").endswith(SPACES)
        self._hf_token = start.key if space else None
        header = {"Authorization": f"Bearer {start.key}"} if space else {WRITE_TOKEN_HEADER: str(start.key)}
        # Asked first: where it fails, the library would try an older protocol, and tell of that one's errors.
        answer = httpx.get(f"{start.url}/version", headers=header, timeout=SECONDS)
        if not answer.is_success:
            raise ServerError(_refusal(answer))
        write_token = None if space else start.key
        self._client: Any = RemoteClient(
            start.url, hf_token=self._hf_token, write_token=write_token, httpx_kwargs={"timeout": SECONDS}
        )

    def summary(self, project: str, uid: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._call("/get_run_summary", project=project, run_id=uid)
        return found

    def log(self, entry: Mapping[str, Any], seconds: float) -> None:
        self._call("/bulk_log", logs=[entry], hf_token=self._hf_token)

    def _call(self, name: str, **arguments: Any) -> Any:
        try:
            return self._client.predict(api_name=name, **arguments)
        except self._failed as error:
            raise ServerError(_refusal(error.response)) from None


def _refusal(answer: Any) -> str:
    return f"{answer.status_code} of {answer.url}: {answer.text[:MAX_TOLD]}"


def _environment(start: Start) -> dict[str, str]:
    """Nothing is told to the makers of Trackio or asked of the hub. The SQLite file is whole at any time, without a
    second one beside it, and on a network's file system too, where a write-ahead log is not safe."""
    folder = Path.cwd() if start.online else Path(start.folder) / "tracking"
    return {
        "TRACKIO_DIR": str(folder / "trackio"),
        "TRACKIO_SQLITE_JOURNAL_MODE": "delete",
        "TRACKIO_SQLITE_SYNCHRONOUS": "full",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "OPENBLAS_NUM_THREADS": "1",  # of NumPy: its buffers for many cores would be more than the process may have
    }
