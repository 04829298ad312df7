"""result.json: how an experiment ended for good. One that has succeeded is never run again, only shown as it ended."""

from __future__ import annotations

from typing import Any

import msgspec

from clora_api.control import ExperimentReport
from clora_engine.journal import Journal

FILE = "result.json"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """report: the last ExperimentReport as JSON."""

    phase: str
    report: dict[str, Any]


def write_result(journal: Journal, report: ExperimentReport) -> None:
    """Raises StorageFullError as Journal.write_json does."""
    result = Result(phase=report.phase.value, report=report.to_api())
    journal.write_json(FILE, msgspec.json.encode(result))


def read_result(journal: Journal, namespace: str) -> ExperimentReport | None:
    """None when it has not ended, or was another namespace's."""
    data = journal.read_json(FILE)
    if data is None:
        return None
    report = ExperimentReport.model_validate(msgspec.json.decode(data, type=Result).report)
    return report if report.namespace == namespace else None
