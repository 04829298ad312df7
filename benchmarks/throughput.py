"""`make bench`: eight experiments on one warm engine, N at a time, against one after the other.

    python -m benchmarks.throughput --work FOLDER --out docs/benchmarks/throughput.json
    python -m benchmarks.throughput render docs/benchmarks/throughput.json > docs/benchmarks/throughput.md

The experiments are those of bench-learning, with two workloads: *saturated*, all of a step's episodes in flight at
once, with tools that answer at once, and *agentic*, few of them in flight, with tools that take as long as an agent's
do; a server of the benchmark's own answers them, over the HTTP environment.

Each case is a part: a fresh engine, the warm-up, then the eight experiments. Parts that are finished in FOLDER are not
run again. Short repetitions of all cases are interleaved; the long one has as many steps as the learning curves need.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import report
from benchmarks.engine_runs import FAMILIES, THREADS, Job, Parts, arguments, engine, forget, rl_spec, run, warm_up
from benchmarks.limits import SEATS, Rates, limit_seconds
from benchmarks.throughput_report import LONG, headlines, record, render, write_plot
from benchmarks.tool_server import ToolServer
from local.model import model
from tests.engine_fixtures import EngineProcess

SEEDS = (1, 2)
LONG_STEPS, SHORT_STEPS, SHORT = 10, 2, 3
COUNTERS = (
    *("sampler_busy_seconds", "trainer_busy_seconds"),
    *("sampler_generated_tokens", "sampler_prompt_tokens", "sampler_cached_prompt_tokens"),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Of one experiment's step."""

    prompts: int
    group: int
    in_flight: int
    tools_seconds: tuple[float, float] | None  # how long a tool takes; None: no server, at once


WORKLOADS = {
    "saturated": Workload(prompts=8, group=8, in_flight=64, tools_seconds=None),
    "agentic": Workload(prompts=4, group=4, in_flight=4, tools_seconds=(0.5, 2.0)),
}


@dataclass(frozen=True, slots=True)
class Case:
    workload: str
    at_once: int
    scheduling: str = "FairShare"
    off_policy: int = 0

    def __str__(self) -> str:
        lag = f"-lag{self.off_policy}" if self.off_policy else ""
        return f"{self.workload}-n{self.at_once}-{self.scheduling}{lag}"


def cases(workload: str) -> list[Case]:
    return [
        *(Case(workload, n) for n in (1, 2, 4, 8)),
        Case(workload, 8, "ShortestRemaining"),
        Case(workload, 8, off_policy=1),
    ]


@dataclass(frozen=True, slots=True)
class Part:
    case: Case
    length: str
    steps: int

    def __str__(self) -> str:
        return f"{self.case}-{self.length}"


def repetitions() -> Iterator[Part]:
    """In the order in which they are run."""
    lengths = [(LONG, LONG_STEPS), *((f"short{i}", SHORT_STEPS) for i in range(SHORT))]
    for length, steps in lengths:
        for name in WORKLOADS:
            for case in cases(name):
                yield Part(case, length, steps)


def jobs(case: Case, steps: int, server: ToolServer | None) -> list[Job]:
    """Eight experiments: four families, two seeds."""
    work = WORKLOADS[case.workload]
    made = []
    for seed in SEEDS:
        for family in FAMILIES:
            environment: dict[str, Any] = {"name": "WordProblems", "arguments": {"families": family}}
            if server is not None:
                environment = server.environment(family)
            spec = rl_spec(
                {**environment, "concurrency": work.in_flight},
                seed=seed,
                prompts=work.prompts,
                group=work.group,
                steps=steps,
            )
            if case.off_policy:
                spec["algorithm"]["maxOffPolicySteps"] = case.off_policy
            made.append(Job(f"{case.workload}-{family}-{seed}", spec))
    return made


def measure(case: Case, steps: int, work: Path) -> dict[str, Any]:
    """Runs one case on a fresh engine."""
    with ExitStack() as stack:
        tools = WORKLOADS[case.workload].tools_seconds
        server = stack.enter_context(ToolServer(tools)) if tools else None
        started = time.monotonic()
        flags = server.engine_flags() if server else {}
        process = stack.enter_context(engine(work / "engine", scheduling=case.scheduling, **flags))
        start_seconds = time.monotonic() - started
        warm_up(process)
        made = jobs(case, steps, server)
        forget(process, made)
        before, tool_seconds, used = counters(process), server.seconds if server else 0.0, cpu_seconds(process)
        ended = run(process, made, case.at_once)
        after, used_after = counters(process), cpu_seconds(process)
    return {
        "commit": report.commit(),
        "start_seconds": start_seconds,
        "counters": {name: after[name] - before[name] for name in COUNTERS},
        "tool_seconds": server.seconds - tool_seconds if server else 0.0,
        "cores": os.cpu_count(),
        "cpu_seconds": {name: used_after[name] - used[name] for name in used},
        "jobs": [job.to_dict() for job in ended],
    }


def counters(process: EngineProcess) -> dict[str, float]:
    """The engine's counters so far."""
    text = process.http.get("/metrics").raise_for_status().text
    values = {family.name: family.samples[0].value for family in text_string_to_metric_families(text) if family.samples}
    return {name: values[f"clora_engine_{name}"] for name in COUNTERS}


def cpu_seconds(process: EngineProcess) -> dict[str, float]:
    """That the engine's processes have used so far: vLLM's core, the trainer, and the engine itself."""
    assert process.process is not None
    own = psutil.Process(process.process.pid)
    used = dict.fromkeys(("sampler", "trainer", "engine"), 0.0)
    for each in (own, *own.children(recursive=True)):
        words, times = " ".join(each.cmdline()), each.cpu_times()
        name = "sampler" if "EngineCore" in words else "trainer" if "trainer_process" in words else "engine"
        used[name] += times.user + times.system
    return used


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__, argv, "comma-separated beginnings of names; unset: all")
    parts = Parts(args.work / "parts")
    wanted: tuple[str, ...] = tuple(args.parts.split(",")) if args.parts else ("",)
    for part in repetitions():
        if str(part).startswith(wanted) and parts.read(str(part)) is None:
            measured = measure(part.case, part.steps, args.work)
            parts.write(str(part), measured)
            seconds = max(job["ended"] for job in measured["jobs"])
            print(f"{part}: {seconds:.0f} s, engine {measured['start_seconds']:.0f} s", file=sys.stderr, flush=True)
    if args.out:
        publish(parts, args.out)


def publish(parts: Parts, out: Path) -> None:
    """Writes the results of all parts that are there, with the limit of each from rates that are measured now."""
    rows = {min(work.in_flight * case.at_once, SEATS) for name, work in WORKLOADS.items() for case in cases(name)}
    rates = Rates.measure(model(), sorted(rows), THREADS)
    records, commits = [], set()
    for part in repetitions():
        measured = parts.read(str(part))
        if measured is not None:
            one = record(str(part), asdict(part.case), part.length, measured)
            limit = limit_seconds(rates, one, WORKLOADS[part.case.workload].in_flight)
            records.append(one | {"limit_seconds": round(limit, 2)})
            commits.add(measured["commit"])
    settings = {
        "rates": asdict(rates),
        "steps": LONG_STEPS,
        "short_steps": SHORT_STEPS,
        "workloads": {name: asdict(work) for name, work in WORKLOADS.items()},
        "commits": sorted(commits),
    }
    report.write(out, "benchmarks.throughput", settings, headlines(records), records)
    write_plot(records, out.with_suffix(".svg"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["render"]:
        print(render(json.loads(Path(sys.argv[2]).read_text())))
    else:
        main()
