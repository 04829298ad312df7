"""What bench's parts come to: records, headlines, the tables of docs/benchmarks/throughput.md, and its plot.

Times of one run of eight experiments, N at a time: *last* is when the last one ended, *first* when the first one did,
*mean* the mean of all eight ends, waiting included; all from the start of the run. A *speed-up* is the time one after
the other (N = 1) over the time at N, of the same repetition; the first experiment gets slower, so its figure is the
inverse. Cold: every experiment alone would have started an engine of its own first.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.learning_report import ENDS, sigma
from benchmarks.report import Spread

Record = dict[str, Any]
LONG = "long"
"""The repetition that has as many steps as the learning curves need."""


def record(part: str, case: Mapping[str, Any], length: str, measured: Mapping[str, Any]) -> Record:
    """One part as figures. `case`: workload, at_once, scheduling, off_policy. Seconds, and shares of the run's time."""
    jobs, counters = measured["jobs"], measured["counters"]
    ends = [job["ended"] for job in jobs]
    steps = [line for job in jobs for line in job["metrics"] if line["step"] > 0]
    last = max(ends)

    def mean(name: str) -> float:
        return round(statistics.fmean(line.get(name, 0.0) for line in steps), 3)

    return {
        "part": part,
        **case,
        "length": length,
        "last": round(last, 2),
        "mean": round(statistics.fmean(ends), 2),
        "first": round(min(ends), 2),
        "start_seconds": round(measured["start_seconds"], 2),
        "step_seconds": mean("step_seconds"),
        "rollout_seconds": mean("rollout_seconds"),
        "train_seconds": mean("train_seconds"),
        "publish_seconds": mean("publish_seconds"),
        "wait_sampler_seconds": mean("wait_sampler_seconds"),
        "wait_trainer_seconds": mean("wait_trainer_seconds"),
        "sampled_tokens": counters["sampler_generated_tokens"],
        "prompt_tokens": counters["sampler_prompt_tokens"] - counters["sampler_cached_prompt_tokens"],
        "trained_tokens": sum(line.get("trained_tokens", 0.0) for line in steps),
        "tool_seconds": round(measured["tool_seconds"], 2),
        "tokens_per_second": round(counters["sampler_generated_tokens"] / last, 1),
        "sampler_idle": round(1 - counters["sampler_busy_seconds"] / last, 3),
        "trainer_idle": round(1 - counters["trainer_busy_seconds"] / last, 3),
        "cores_used": {n: round(s / measured["cores"] / last, 3) for n, s in measured["cpu_seconds"].items()},
        "reward": round(statistics.fmean(_end(job) for job in jobs), 4),
        "ends": [dict(zip(("family", "seed"), job["name"].split("-")[1:], strict=True), end=_end(job)) for job in jobs],
    }


def _end(job: Mapping[str, Any]) -> float:
    rewards = [line["reward_mean"] for line in job["metrics"] if line["step"] > 0]
    return round(statistics.fmean(rewards[-ENDS:]), 4)


class Runs:
    """The records, by case and repetition."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.by_case: dict[tuple[str, int, str, int], dict[str, Record]] = defaultdict(dict)
        for one in records:
            key = one["workload"], one["at_once"], one["scheduling"], one["off_policy"]
            self.by_case[key][one["length"]] = one
        self.workloads = list(dict.fromkeys(key[0] for key in self.by_case))

    def cases(self, workload: str) -> list[tuple[str, int, str, int]]:
        return [key for key in self.by_case if key[0] == workload]

    def serial(self, workload: str) -> dict[str, Record]:
        return self.by_case[workload, 1, "FairShare", 0]

    def longest(self, key: tuple[str, int, str, int]) -> Record:
        return max(self.by_case[key].values(), key=lambda one: one["length"] == LONG)

    def speedup(self, key: tuple[str, int, str, int], figure: str, *, cold: bool = False) -> Spread:
        """Over the repetitions that both have. cold: an engine start more for every experiment, as measured in the
        serial part; of the longest repetition alone, for a start weighs more the fewer steps follow it."""
        ratios = []
        for length, one in self.by_case[key].items():
            alone = self.serial(key[0]).get(length)
            if alone is not None and not (cold and one is not self.longest(key)):
                starts = {"last": 8.0, "mean": 4.5, "first": 1.0}[figure] * alone["start_seconds"] if cold else 0.0
                ratios.append((alone[figure] + starts) / one[figure])
        return Spread.of(ratios)


def headlines(records: Sequence[Record]) -> dict[str, float]:
    """Of the runs that there are."""
    runs = Runs(records)
    found = {}
    for name, workload, at_once, scheduling, figure in (
        ("last_speedup_n8_warm", "agentic", 8, "FairShare", "last"),
        ("last_speedup_n8_cold", "agentic", 8, "FairShare", "last"),
        ("mean_speedup_n8_shortest_remaining", "agentic", 8, "ShortestRemaining", "mean"),
        ("mean_speedup_n4", "agentic", 4, "FairShare", "mean"),
        ("first_speedup_n8_shortest_remaining", "agentic", 8, "ShortestRemaining", "first"),
        ("saturated_last_speedup_n8", "saturated", 8, "FairShare", "last"),
    ):
        key = workload, at_once, scheduling, 0
        if key in runs.by_case:
            found[name] = runs.speedup(key, figure, cold=name.endswith("cold")).median
    for workload in runs.workloads:
        key = workload, 8, "FairShare", 0
        if key in runs.by_case:
            one = runs.longest(key)
            found[f"{workload}_share_of_limit_n8"] = round(one["limit_seconds"] / one["last"], 3)
    return found | {"reward_delta_over_sigma": reward_delta([one for one in records if one["length"] == LONG])}


def reward_delta(long: Sequence[Record]) -> float:
    """The largest mean difference of the last steps' rewards from serial, paired by family and seed, in standard
    deviations between seeds alone; over all cases."""
    worst = 0.0
    for workload in dict.fromkeys(one["workload"] for one in long):
        parts = [one for one in long if one["workload"] == workload]
        serial = next(one for one in parts if one["at_once"] == 1)
        alone = {(end["family"], end["seed"]): end["end"] for end in serial["ends"]}
        spread = sigma(serial["ends"])
        for one in parts:
            deltas = [end["end"] - alone[end["family"], end["seed"]] for end in one["ends"]]
            worst = max(worst, abs(statistics.fmean(deltas)) / spread)
    return round(worst, 2)


def render(document: Mapping[str, Any]) -> str:
    """The document as Markdown."""
    return "\n".join([*_head(document), *_tables(document["records"], document["settings"]["workloads"])])


def _head(document: Mapping[str, Any]) -> Iterator[str]:
    settings = document["settings"]
    yield from report.title("Eight experiments, N at a time", document)
    yield report.origin(document, settings["commits"])
    yield (
        "SmolLM2-135M-Instruct, float32, sampler and trainer on the same cores. Eight experiments (four families, two"
        f" seeds) of {settings['steps']} steps on one engine with eight slots, so many at a time, the next one when one"
        " has ended."
    )
    yield (
        "*Last*, *mean* and *first*: ends of the eight, waiting included, against one after the other on the same warm"
        " engine; *cold*: against one after the other, each with an engine start of its own. Medians over the"
        " repetitions (one long, the others short), smallest and largest in parentheses; the other columns, and *cold*,"
        " are the longest one's. *Cores*: what vLLM's core, the trainer and the engine's own process had of their time."
        " *Limit*: the least time that the run could take here, from the measured rate of the base model's"
        " matrix products alone and the seconds of the tools (benchmarks/limits.py)."
    )
    yield ""
    for name, value in document["headlines"].items():
        yield f"- `{name}` {value}"
    yield ""


def description(workload: Mapping[str, Any]) -> str:
    """Of a workload as throughput.py has it: prompts, group, in_flight, tools_seconds."""
    episodes, in_flight = workload["prompts"] * workload["group"], workload["in_flight"]
    flying = "all in flight" if in_flight >= episodes else f"{in_flight} of an experiment in flight"
    takes = "tools that answer at once"
    if workload["tools_seconds"] is not None:
        fastest, slowest = workload["tools_seconds"]
        takes = f"and a calculator over HTTP that takes {fastest:g} to {slowest:g} s"
    return f"{episodes} episodes a step, {flying}, {takes}."


def _tables(records: Sequence[Record], workloads: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    runs = Runs(records)
    for workload in runs.workloads:
        yield f"## {workload}"
        yield ""
        yield description(workloads[workload])
        yield ""
        yield (
            "| at once | policy | last | mean | first | last, cold | share of the limit | step | rollout | train"
            " | publish | tok/s | sampler idle | trainer idle | cores: sampler, trainer, engine | reward, last 3 |"
        )
        yield "|---" * 16 + "|"
        for key in runs.cases(workload):
            yield _row(runs, key)
        yield ""


def _row(runs: Runs, key: tuple[str, int, str, int]) -> str:
    _, at_once, scheduling, off_policy = key
    long = runs.longest(key)
    policy = scheduling + (f", {off_policy} step off-policy" if off_policy else "")
    speedups = [str(runs.speedup(key, figure)) + " ×" for figure in ("last", "mean", "first")]
    cells = [
        str(at_once),
        policy,
        *(speedups if at_once > 1 else [f"{long[figure]:.0f} s" for figure in ("last", "mean", "first")]),
        f"{runs.speedup(key, 'last', cold=True).median:.2f} ×",
        f"{long['limit_seconds'] / long['last']:.0%}",
        *(f"{long[f'{name}_seconds']:.1f} s" for name in ("step", "rollout", "train", "publish")),
        f"{long['tokens_per_second']:.0f}",
        f"{long['sampler_idle']:.0%}",
        f"{long['trainer_idle']:.0%}",
        ", ".join(f"{share:.0%}" for share in long["cores_used"].values()),
        f"{long['reward']:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def write_plot(records: Sequence[Record], path: Path) -> None:
    """Speed-up of last, mean and first by N, FairShare, for each workload, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "clora"  # the same file from the same records
    runs = Runs(records)
    figure, panels = pyplot.subplots(1, len(runs.workloads), figsize=(4.5 * len(runs.workloads), 3.6), squeeze=False)
    for workload, axes in zip(runs.workloads, panels[0], strict=True):
        keys = [key for key in runs.cases(workload) if key[2:] == ("FairShare", 0)]
        for name in ("last", "mean", "first"):
            spreads = [runs.speedup(key, name) for key in keys]
            errors = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
            axes.errorbar([key[1] for key in keys], [s.median for s in spreads], errors, label=name, capsize=3)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(title=workload, xlabel="experiments at once", ylabel="times sooner than one after the other")
        axes.set_xscale("log", base=2)
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
