"""`make bench-learning`: what experiments learn, one after the other and beside each other.

    python -m benchmarks.learning --work FOLDER --out docs/benchmarks/learning.json
    python -m benchmarks.learning render docs/benchmarks/learning.json > docs/benchmarks/learning.md

Four families of word problems with three seeds each, twelve experiments, are run N at a time for N = 1, 2, 4 and 8 on
one engine with SmolLM2; every one starts from the same supervised warm-up, on other problems. Each N is a part; parts
that are finished in FOLDER are not run again. Only rewards are reported: speeds are bench-throughput's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.engine_runs import FAMILIES, Job, Parts, engine, rl_spec, run, warm_up

SEEDS = (1, 2, 3)
STEPS = 12
PROMPTS, GROUP = 8, 8
HELD_OUT = 40
AT_ONCE = (1, 2, 4, 8)
STILL = "still"  # control: learning rate 0
ALGORITHM: Mapping[str, Any] = {
    "promptsPerStep": PROMPTS,
    "groupSize": GROUP,
    "learningRate": "5e-4",
    "optimizer": {"warmupSteps": 2},
}


def jobs(families: Sequence[str], seeds: Sequence[int], prefix: str, **algorithm: Any) -> list[Job]:
    """One experiment a family and seed, seeds outermost, so that neighbours differ in family."""
    made = []
    for seed in seeds:
        for family in families:
            environment = {"name": "WordProblems", "arguments": {"families": family}}
            spec = rl_spec(
                environment,
                seed=seed,
                prompts=PROMPTS,
                group=GROUP,
                steps=STEPS,
                evaluation={"examples": HELD_OUT},
                algorithm={**ALGORITHM, **algorithm},
            )
            made.append(Job(f"{prefix}-{family}-{seed}", spec))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for storage and finished parts")
    parser.add_argument("--parts", default="", help="comma-separated; unset: all")
    parser.add_argument("--out", type=Path, help="where the results go, once all parts are there")
    args = parser.parse_args(argv)
    parts = Parts(args.work / "parts")
    todo = {f"n{n}": (n, jobs(FAMILIES, SEEDS, f"n{n}")) for n in AT_ONCE}
    todo[STILL] = (8, jobs(FAMILIES, SEEDS[:2], STILL, learningRate="0"))
    chosen = args.parts.split(",") if args.parts else list(todo)
    for name in chosen:
        if parts.read(name) is None:
            at_once, made = todo[name]
            with engine(args.work / "engine") as process:
                warm_up(process)
                ended = run(process, made, at_once)
            parts.write(name, {"commit": report.commit(), "jobs": [job.to_dict() for job in ended]})
            print(name, [round(job.metrics[-1]["reward_mean"], 2) for job in ended], file=sys.stderr, flush=True)
    print({name: parts.read(name) is not None for name in todo})


if __name__ == "__main__":
    main()
