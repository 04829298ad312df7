"""`clora logs`: a line for each step, and what happens to the experiment in between; -f goes on until its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Any

from clora_api.v1alpha1.conditions import State
from clora_operator.cli_engine import EngineAccess, find_experiment
from clora_operator.cli_watch import message_of, state_of
from clora_operator.kube import EXPERIMENTS, Kube
from clora_operator.resources import Experiment, parse_experiment

Row = Mapping[str, Any]

_SECONDS = ("rollout_seconds", "environment_seconds", "train_seconds", "publish_seconds", "evaluate_seconds")


def logs(kube: Kube, namespace: str, name: str, *, follow: bool) -> int:
    """Prints an experiment's steps so far; with `follow`, the next ones too, until it has succeeded or failed.

    Returns 1 if `follow` saw it fail, otherwise 0. Raises LookupError for an experiment that does not exist; without
    `follow`, also when its engine cannot be asked.
    """
    first = find_experiment(kube, namespace, name)
    printer = _Printer(first)
    if not follow:
        printer.steps(read_metrics(kube, first))
        return 0
    failed = False
    for experiment in _changes(kube, namespace, first):
        trouble = ""
        if not experiment.finished:
            printer.state(experiment)
        try:
            printer.steps(read_metrics(kube, experiment))
        except (
            LookupError,
            OSError,
            HTTPException,
            ValueError,
        ) as error:  # not on an engine yet, or it does not answer now: there is a next time
            trouble = str(error.args[0] if error.args else error)
        if experiment.finished:
            printer.state(experiment)
            failed = state_of(experiment) is State.FAILED
            if trouble:
                print(f"clora: its last steps cannot be read: {trouble}", file=sys.stderr)
            break
    return int(failed)


def read_metrics(kube: Kube, experiment: Experiment) -> list[Row]:
    """All steps of an experiment. Raises LookupError, OSError; HTTPException or ValueError for a broken answer."""
    with EngineAccess(kube, experiment).get(f"/v1/experiments/{experiment.meta.uid}/metrics") as answer:
        return [json.loads(line) for line in answer.read().splitlines()]


def step_line(row: Row, max_steps: int | None) -> str:
    """One step in one line: reward, what it did to the adapter, what it cost."""
    of = f"/{max_steps}" if max_steps else ""
    parts = [f"step {row['step']}{of}"]
    if "reward_mean" in row:
        parts.append(f"reward {row['reward_mean']:.3f} ± {row.get('reward_std', 0.0):.3f}")
    for name, label in (("loss", "loss"), ("kl", "kl"), ("entropy", "entropy"), ("grad_norm", "grad")):
        if name in row:
            parts.append(f"{label} {row[name]:.3g}")
    if "eval_accuracy" in row:
        parts.append(f"held out {row['eval_accuracy']:.3f}")
    if row.get("truncated"):
        parts.append(f"truncated {row['truncated']:.0%}")
    parts += [f"{label} {row[name]:.0f}" for name, label in _TROUBLE if row.get(name)]
    if "tokens_per_second" in row:
        parts.append(f"{row['tokens_per_second']:.0f} tok/s")
    if "step_seconds" in row:
        spent = [f"{name.removesuffix('_seconds')} {row[name]:.1f}" for name in _SECONDS if row.get(name, 0.0) >= 0.05]
        parts.append(f"{row['step_seconds']:.1f} s" + (f" ({', '.join(spent)})" if spent else ""))
    return "  ".join(parts)


_TROUBLE = (("tool_errors", "tool errors"), ("environment_errors", "failed"), ("update_skipped", "update skipped"))


class _Printer:
    """Says each step and each state once."""

    def __init__(self, experiment: Experiment) -> None:
        self._last = -1
        self._state = ""
        self._max_steps = experiment.spec.max_steps if experiment.spec else None

    def steps(self, rows: list[Row]) -> None:
        newest = rows[-1]["step"] if rows else -1
        if newest < self._last:
            print(f"rolled back to step {max(newest, 0)}: what came after was not committed", flush=True)
            self._last = newest
        for row in rows:
            if row["step"] > self._last:
                self._last = row["step"]
                print(step_line(row, self._max_steps), flush=True)

    def state(self, experiment: Experiment) -> None:
        message = message_of(experiment).replace("\n", " ")
        line = f"{state_of(experiment)}: {message}" if message else str(state_of(experiment))
        if line != self._state:
            self._state = line
            print(f"-- {line}", flush=True)


def _changes(kube: Kube, namespace: str, first: Experiment) -> Iterator[Experiment]:
    """This experiment as it is now and after each change. Raises LookupError once it is deleted."""
    for bodies in kube.watch(EXPERIMENTS, namespace):
        found = next((body for body in bodies if body["metadata"]["uid"] == first.meta.uid), None)
        if found is None:
            raise LookupError(f"LoRAExperiment {first.meta.name} was deleted")
        yield parse_experiment(found)
