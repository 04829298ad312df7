"""What bench-learning's runs come to: records, headlines, the tables of docs/benchmarks/learning.md and its plot."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

ENDS = 3  # steps at either end over which a reward is a mean

Record = dict[str, Any]


def record(part: str, at_once: int, job: Mapping[str, Any], commit: str) -> Record:
    """One run: its rewards by step, and greedy accuracy on held-out problems before and after. `commit`: the code's."""
    name, metrics = job["name"], [line for line in job["metrics"] if line["step"] > 0]
    _, family, seed = name.split("-")
    accuracy = [line["eval_accuracy"] for line in job["metrics"] if "eval_accuracy" in line]
    rewards = [round(line["reward_mean"], 4) for line in metrics]
    return {
        "part": part,
        "commit": commit,
        "at_once": at_once,
        "family": family,
        "seed": int(seed),
        "rewards": rewards,
        "start": round(statistics.fmean(rewards[:ENDS]), 4),
        "end": round(statistics.fmean(rewards[-ENDS:]), 4),
        "held_out": [round(accuracy[0], 4), round(accuracy[-1], 4)],
    }


def sigma(serial: Sequence[Record]) -> float:
    """Standard deviation of `end` among seeds: about the mean of their family, pooled over families."""
    by_family = defaultdict(list)
    for one in serial:
        by_family[one["family"]].append(one["end"])
    squares = [(end - statistics.fmean(ends)) ** 2 for ends in by_family.values() for end in ends]
    return float((sum(squares) / (len(squares) - len(by_family))) ** 0.5)


def deltas(serial: Sequence[Record], beside: Sequence[Record]) -> list[float]:
    """`end` beside others less `end` alone, of the runs of the same family and seed."""
    alone = {(one["family"], one["seed"]): one["end"] for one in serial}
    return [one["end"] - alone[one["family"], one["seed"]] for one in beside]


def headlines(records: Sequence[Record]) -> dict[str, float]:
    """start_mean and end_mean over the runs at every N; delta_over_sigma: of the N that differs most from serial, once
    one was measured."""
    by_n = _by_n(records)
    runs = [one for part in by_n.values() for one in part]
    serial = by_n[1]
    found = {
        "start_mean": round(statistics.fmean(one["start"] for one in runs), 3),
        "end_mean": round(statistics.fmean(one["end"] for one in runs), 3),
    }
    if beside := [statistics.fmean(deltas(serial, part)) for n, part in by_n.items() if n > 1]:
        found["delta_over_sigma"] = round(abs(max(beside, key=abs)) / sigma(serial), 2)
    return found


def _by_n(records: Sequence[Record]) -> dict[int, list[Record]]:
    by_n = defaultdict(list)
    for one in records:
        if one["part"].startswith("n"):
            by_n[one["at_once"]].append(one)
    return dict(sorted(by_n.items()))


def render(document: Mapping[str, Any]) -> str:
    """The document as Markdown."""
    records = document["records"]
    parts = [*_head(document), *_table(records), *_families(records), *_controls(document)]
    return "\n".join([*parts, "![mean reward by step](learning.svg)"])


def _head(document: Mapping[str, Any]) -> Iterator[str]:
    settings, found = document["settings"], document["headlines"]
    yield from report.title("What experiments learn, alone and beside others", document)
    yield report.origin(document, settings["commits"])
    yield (
        f"SmolLM2-135M-Instruct, float32, LoRA of rank {settings['rank']}; GRPO with PPO's loss, {settings['prompts']}"
        f" prompts × {settings['group']} trajectories a step, {settings['steps']} steps, learning rate"
        f" {settings['learning_rate']}. Every run starts from the same supervised warm-up, which has seen none of these"
        " families. The reward of an episode is 1 if `final_answer` was called with the right answer, else 0."
    )
    yield ""
    yield f"- `start_mean` {found['start_mean']}: mean reward of the first {ENDS} steps, over all runs of all N"
    yield f"- `end_mean` {found['end_mean']}: the same of the last {ENDS} steps"
    if "delta_over_sigma" in found:
        yield (
            f"- `delta_over_sigma` {found['delta_over_sigma']}: the mean difference of `end` between runs beside others"
            " and the same family and seed alone, for the N that differs most, in standard deviations between seeds"
            " alone"
        )
    yield ""


def _table(records: Sequence[Record]) -> Iterator[str]:
    by_n = _by_n(records)
    spread = sigma(by_n[1])
    yield "| at once | runs | first 3 steps | last 3 steps | against alone | held out, greedy: before | after |"
    yield "|---|---|---|---|---|---|---|"
    for n, part in by_n.items():
        difference = statistics.fmean(deltas(by_n[1], part))
        against = f"{difference:+.3f} ({difference / spread:+.2f} σ)" if n > 1 else f"σ = {spread:.3f}"
        yield f"| {n} | {len(part)} | {_cell(part, 'start')} | {_cell(part, 'end')} | {against} | {_held_out(part)} |"
    yield ""
    yield "Means over the runs; smallest and largest run in parentheses."
    yield ""


def _families(records: Sequence[Record]) -> Iterator[str]:
    by_n = _by_n(records)
    families = sorted({one["family"] for one in by_n[1]})
    yield "Last 3 steps by family:"
    yield ""
    yield "| at once | " + " | ".join(families) + " |"
    yield "|---" * (len(families) + 1) + "|"
    for n, part in by_n.items():
        cells = [_cell([one for one in part if one["family"] == family], "end") for family in families]
        yield f"| {n} | " + " | ".join(cells) + " |"
    yield ""


def _controls(document: Mapping[str, Any]) -> Iterator[str]:
    controls = defaultdict(list)
    for one in document["records"]:
        if not one["part"].startswith("n"):
            controls[one["part"]].append(one)
    if not controls:
        return
    yield "Controls, which must not learn; eight runs at once. Held-out problems are judged truly in all of them:"
    yield ""
    yield "| control | runs | reward, first 3 steps | last 3 steps | held out, greedy: before | after |"
    yield "|---|---|---|---|---|---|"
    for name, part in controls.items():
        meaning = document["settings"]["controls"][name]
        yield f"| {meaning} | {len(part)} | {_cell(part, 'start')} | {_cell(part, 'end')} | {_held_out(part)} |"
    yield ""


def _cell(part: Sequence[Record], figure: str) -> str:
    """Mean and range over runs."""
    values = [one[figure] for one in part]
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _held_out(part: Sequence[Record]) -> str:
    """Mean accuracy before and after, two cells."""
    return " | ".join(f"{statistics.fmean(one['held_out'][end] for one in part):.2f}" for end in (0, 1))


def write_plot(records: Sequence[Record], path: Path) -> None:
    """Mean reward by step for each N, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "clora"  # the same file from the same records
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for n, part in _by_n(records).items():
        means = [statistics.fmean(rewards) for rewards in zip(*(one["rewards"] for one in part), strict=True)]
        axes.plot(range(1, len(means) + 1), means, label=f"{n} at once")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
