"""`clora compare A B …`: experiments beside each other, as a table with the course of a metric, and as a plot.

The plot needs matplotlib (the extra `plot`); the table draws the same course in one line of text.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clora_operator.cli_engine import find_experiment
from clora_operator.cli_logs import read_metrics
from clora_operator.cli_watch import state_of
from clora_operator.kube import Kube

ENDS = 3  # steps whose mean is an experiment's start, and its end
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 32  # of the drawn course, in characters
PLOT_FORMATS = (".png", ".svg", ".pdf")

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Course:
    """An experiment's steps: `rows` are its lines of metrics, ascending."""

    name: str
    state: str
    rows: tuple[Row, ...]

    def points(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) where the metric is."""
        return [(int(row["step"]), float(row[metric])) for row in self.rows if _is_number(row.get(metric))]

    def values(self, metric: str) -> list[float]:
        return [value for _, value in self.points(metric)]


def compare(
    kube: Kube, namespace: str, names: Sequence[str], *, metric: str, plot_to: Path | None, console: Console
) -> int:
    """Prints the table and writes the plot. Raises LookupError for an experiment, an engine or a metric that is not
    there, and for a plot that cannot be made."""
    courses = []
    for name in names:
        experiment = find_experiment(kube, namespace, name)
        courses.append(Course(name, str(state_of(experiment)), tuple(read_metrics(kube, experiment))))
    if not any(course.values(metric) for course in courses):
        rows = [row for course in courses for row in course.rows]
        known = sorted({key for row in rows for key, value in row.items() if _is_number(value)} - {"step"})
        raise LookupError(f"none of them has a metric {metric}; there are: {', '.join(known) or 'none yet'}")
    if plot_to is not None:
        plot(courses, metric, plot_to)
    console.print(table(courses, metric))
    return 0


def table(courses: Sequence[Course], metric: str) -> Table:
    """A line for each experiment."""
    made = Table()
    made.add_column("Name")
    made.add_column("State")
    for heading in ("Steps", f"{escape(metric)} first {ENDS}", f"last {ENDS}", "best", "held out", "tokens", "s/step"):
        made.add_column(heading, justify="right")
    made.add_column("course")
    span = [value for course in courses for value in course.values(metric)]
    for course in courses:
        values = course.values(metric)
        made.add_row(
            course.name,
            course.state,
            str(course.rows[-1]["step"]) if course.rows else "0",
            _number(_mean(values[:ENDS])),
            _number(_mean(values[-ENDS:])),
            _number(max(values, default=None)),
            _held_out(course),
            _total(course.values("sampled_tokens")),
            _number(_mean(course.values("step_seconds"))),
            sparkline(values, min(span), max(span)),
        )
    return made


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """The course of some values between `low` and `high` as bars; means of neighbours where there are many."""
    if len(values) > WIDTH:
        edges = [len(values) * i // WIDTH for i in range(WIDTH + 1)]
        values = [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in values)


def plot(courses: Sequence[Course], metric: str, path: Path) -> None:
    """The metric by step, a line for each experiment, as PNG, SVG or PDF. Raises LookupError."""
    if path.suffix not in PLOT_FORMATS:
        raise LookupError(f"{path}: a plot's name ends in {', '.join(PLOT_FORMATS)}")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise LookupError("a plot needs matplotlib: pip install 'clora[plot]'") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for course in courses:
        points = course.points(metric)
        axes.plot([step for step, _ in points], [value for _, value in points], marker=".", label=course.name)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _held_out(course: Course) -> str:
    values = course.values("eval_accuracy")
    if not values:
        return ""
    return f"{values[0]:.3g} → {values[-1]:.3g}" if len(values) > 1 else f"{values[0]:.3g}"


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _total(values: Sequence[float]) -> str:
    return f"{sum(values):,.0f}" if values else ""
