"""`make bench-learning`: what experiments learn, one after the other and beside each other.

    python -m benchmarks.learning --work FOLDER --out docs/benchmarks/learning.json
    python -m benchmarks.learning render docs/benchmarks/learning.json > docs/benchmarks/learning.md

Four families of word problems with three seeds each, twelve experiments, are run N at a time for N = 1, 2, 4 and 8 on
one engine with SmolLM2; every one starts from the same supervised warm-up, on other problems. Each N is a part.
Experiments that are finished in FOLDER are not run again, those that were running go on from their commits; with
--parts, what --out has of other parts stays in it. Only rewards are reported: speeds are those of `make bench`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.engine_runs import (
    FAMILIES,
    LEARNING_RATE,
    LORA,
    Ended,
    Job,
    Parts,
    arguments,
    engine,
    rl_spec,
    run,
    warm_up,
)
from benchmarks.learning_report import headlines, record, render, write_plot
from benchmarks.tool_server import ToolServer

SEEDS = (1, 2, 3)
STEPS = 12
PROMPTS, GROUP = 8, 8
HELD_OUT = 40
AT_ONCE = (1, 2, 4, 8)
CONTROLS = {
    "still": "learning rate 0",
    "random": "rewards by a coin",
    "flipped": "reward -1 for the right answer",
}
CONTROLS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Part:
    """at_once: experiments at a time. rewards: the tool server's; None: the built-in environment, without a server."""

    name: str
    at_once: int
    seeds: Sequence[int]
    learning_rate: str = LEARNING_RATE
    rewards: str | None = None


def parts_to_run() -> list[Part]:
    return [
        *(Part(f"n{n}", n, SEEDS) for n in AT_ONCE),
        Part("still", CONTROLS_AT_ONCE, SEEDS[:2], learning_rate="0"),
        Part("random", CONTROLS_AT_ONCE, SEEDS[:2], rewards="random"),
        Part("flipped", CONTROLS_AT_ONCE, SEEDS[:2], rewards="flipped"),
    ]


def jobs(part: Part, server: ToolServer | None) -> list[Job]:
    """One experiment a family and seed, seeds outermost, so that neighbours differ in family."""
    made = []
    for seed in part.seeds:
        for family in FAMILIES:
            environment: dict[str, Any] = {"name": "WordProblems", "arguments": {"families": family}}
            if server is not None and part.rewards is not None:
                environment = server.environment(family, part.rewards)
            spec = rl_spec(
                environment,
                seed=seed,
                prompts=PROMPTS,
                group=GROUP,
                steps=STEPS,
                evaluation={"examples": HELD_OUT},
            )
            spec["algorithm"]["learningRate"] = part.learning_rate
            made.append(Job(f"{part.name}-{family}-{seed}", spec))
    return made


def measure(part: Part, work: Path, parts: Parts) -> None:
    """Runs those of a part's experiments that are not there yet, and writes each when it has ended."""
    with ExitStack() as stack:
        server = stack.enter_context(ToolServer()) if part.rewards else None
        todo = [job for job in jobs(part, server) if parts.read(job.name) is None]
        if not todo:
            return
        process = stack.enter_context(engine(work / "engine", **(server.engine_flags() if server else {})))
        warm_up(process)

        def keep(job: Ended) -> None:
            parts.write(job.name, {"commit": report.commit(), "job": job.to_dict()})
            print(
                job.name, [round(line.get("reward_mean", 0.0), 2) for line in job.metrics], file=sys.stderr, flush=True
            )

        run(process, todo, part.at_once, keep)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__, argv, "comma-separated names; unset: all")
    parts, wanted = Parts(args.work / "parts"), args.parts.split(",") if args.parts else []
    for part in parts_to_run():
        if not wanted or part.name in wanted:
            measure(part, args.work, parts)
    if args.out:
        publish(parts, args.out)


def publish(parts: Parts, out: Path) -> None:
    """Writes the results of all parts that are complete, here or in `out`."""
    before = json.loads(out.read_text())["records"] if out.exists() else []
    records = []
    for part in parts_to_run():
        found = [kept for job in jobs(part, None) if (kept := parts.read(job.name)) is not None]
        if len(found) == len(part.seeds) * len(FAMILIES):
            records += [record(part.name, part.at_once, **kept) for kept in found]
        else:
            records += [one for one in before if one["part"] == part.name]
    settings = {
        "rank": LORA["rank"],
        "steps": STEPS,
        "prompts": PROMPTS,
        "group": GROUP,
        "learning_rate": LEARNING_RATE,
        "held_out": HELD_OUT,
        "controls": CONTROLS,
        "commits": sorted({one["commit"] for one in records}),
    }
    report.write(out, "benchmarks.learning", settings, headlines(records), records)
    write_plot(records, out.with_suffix(".svg"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["render"]:
        print(render(json.loads(Path(sys.argv[2]).read_text())))
    else:
        main()
