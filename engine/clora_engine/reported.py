"""Parts of an experiment's report, as the control API has them."""

from __future__ import annotations

from pathlib import Path

from clora_api.control import DesiredExperiment, ReportedBest, ReportedCheckpoint, ReportedServing
from clora_engine.journal import Commit

TOKEN_TAKEN = "its token is another experiment's: delete its Secret, so that a new one is made"  # noqa: S105 - a message


def reported_checkpoint(commit: Commit, storage: Path, best: int | None = None) -> ReportedCheckpoint:
    """A commit by its path within the storage. best: the step of the best commit."""
    path, step = str(commit.folder.relative_to(storage)), commit.manifest.step
    return ReportedCheckpoint(step=step, path=path, digest=commit.digest, best=step == best)


def reported_best(commit: Commit | None) -> ReportedBest | None:
    best = commit.manifest.best if commit else None
    return ReportedBest(step=best.step, metric=best.metric, value=best.value) if best else None


def reported_version(desired: DesiredExperiment, step: int | None) -> str:
    """The version of `step`, empty when there is none."""
    return "" if step is None else f"{desired.name}@{step}"


def reported_serving(desired: DesiredExperiment, step: int | None, problem: str) -> ReportedServing:
    """step: of the version that answers; None: `problem` says why there is none."""
    if step is None:
        return ReportedServing(problem=problem, weight=desired.spec.weight)
    return ReportedServing(version=reported_version(desired, step), weight=desired.spec.weight)
