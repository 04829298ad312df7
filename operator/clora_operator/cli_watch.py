"""`clora watch`: a live table on a terminal, one line per change elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clora_api.v1alpha1.conditions import ExperimentCondition, State, derive_state
from clora_operator.cli_text import harmless
from clora_operator.kube import EXPERIMENTS, Kube
from clora_operator.resources import Experiment, find_condition, parse_experiment

COLOURS = {
    State.RUNNING: "green",
    State.SUCCEEDED: "bold green",
    State.FAILED: "bold red",
    State.UNKNOWN: "yellow",
    State.QUEUED: "cyan",
}


def watch(kube: Kube, namespace: str, names: Sequence[str], *, until_done: bool, console: Console) -> int:
    """0, or 1 when one that was watched has failed; without `until_done` it goes on until it is interrupted.

    Raises LookupError when one of `names`, or any experiment at all, does not exist at the start.
    """
    states = _states(kube, namespace, names)
    experiments = next(states)
    missing = sorted(set(names) - experiments.keys())
    if missing or not experiments:
        what = f"LoRAExperiment {missing[0]}" if missing else "LoRAExperiment"
        raise LookupError(f"there is no {what} in namespace {namespace}")
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        show = _table_shower(live) if live is not None else _line_shower()
        while True:
            show(list(experiments.values()))
            if until_done and all(experiment.finished for experiment in experiments.values()):
                break
            experiments = next(states)
    return 1 if any(state_of(experiment) is State.FAILED for experiment in experiments.values()) else 0


def _states(kube: Kube, namespace: str, names: Sequence[str]) -> Iterator[dict[str, Experiment]]:
    """All that is watched, by name, after each change."""
    for bodies in kube.watch(EXPERIMENTS, namespace):
        experiments = [parse_experiment(body) for body in bodies]
        yield {e.meta.name: e for e in experiments if not names or e.meta.name in names}


def _line_shower() -> Callable[[list[Experiment]], None]:
    told: dict[str, str] = {}

    def show(experiments: list[Experiment]) -> None:
        for experiment in experiments:
            line = describe(experiment)
            if told.get(experiment.meta.uid) != line:
                told[experiment.meta.uid] = line
                print(line, flush=True)

    return show


def _table_shower(live: Live) -> Callable[[list[Experiment]], None]:
    def show(experiments: list[Experiment]) -> None:
        table = Table()
        for name in ("Name", "State", "Engine", "Step", "Reward", "Left", "Message"):
            table.add_column(name)
        for experiment in sorted(experiments, key=lambda e: e.meta.age_order):
            state, progress = state_of(experiment), experiment.status.progress
            colour = COLOURS.get(state, "")
            left = progress.estimated_remaining_seconds if progress and not experiment.finished else None
            table.add_row(
                experiment.meta.name,
                Text(state, style=colour),
                experiment.status.engine.name if experiment.status.engine else "",
                _steps(experiment),
                progress.reward if progress else "",
                f"{left} s" if left is not None else "",
                Text(message_of(experiment)),
            )
        live.update(table, refresh=True)

    return show


def describe(experiment: Experiment) -> str:
    """One line: name, state, steps, reward, and why it is so."""
    progress = experiment.status.progress
    reward = f"reward {progress.reward}" if progress and progress.reward else ""
    parts = (experiment.meta.name, state_of(experiment), _steps(experiment), reward, message_of(experiment))
    return "  ".join(part for part in parts if part)


def state_of(experiment: Experiment) -> State:
    return derive_state({c.type: (c.status, c.reason) for c in experiment.status.conditions})


def message_of(experiment: Experiment) -> str:
    """The message of the condition that says most about its state; none while all is well. Others write into it, so
    it is for a terminal as `harmless` leaves it."""
    return harmless(_message(experiment))


def _message(experiment: Experiment) -> str:
    conditions = experiment.status.conditions
    for kind, told in (
        (ExperimentCondition.FAILED, "True"),
        (ExperimentCondition.SUCCEEDED, "True"),
        (ExperimentCondition.ACCEPTED, "False"),
    ):
        condition = find_condition(conditions, kind)
        if condition is not None and condition.status == told:
            return condition.message
    attached = find_condition(conditions, ExperimentCondition.ATTACHED)
    return attached.message if attached is not None and attached.status != "True" else ""


def _steps(experiment: Experiment) -> str:
    progress, spec = experiment.status.progress, experiment.spec
    return f"step {progress.step if progress else 0}/{spec.max_steps if spec else '?'}"
