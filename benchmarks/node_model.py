"""`make bench-node-model`: a simulation of the reference's node, fitted to its N = 1 and 2, tried on N = 4 and 8.

    python -m benchmarks.node_model --out docs/benchmarks/node_model.json
    python -m benchmarks.node_model render docs/benchmarks/node_model.json > docs/benchmarks/node_model.md
    python -m benchmarks.node_model plot docs/benchmarks/node_model.json docs/benchmarks/node_model.svg

Nothing here is measured. What is real and what is simulated: node.py. The reference and the fit: node_reference.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import report
from benchmarks.node import EPISODES_EACH, STEPS, Costs, Outcome, Policy, simulate
from benchmarks.node_reference import PUBLISHED, REFERENCE, TRAIN_SECONDS, UNLIMITED, calibrate, in_waves
from benchmarks.node_table import plot, render
from clora_api.v1alpha1.engine import Scheduling

PACKAGES = ("clora", "numpy", "msgspec")
Case = tuple[Costs, Policy, int, int]
Record = dict[str, Any]

FIXED = 0.5
"""Part of a training step that a pass pays once, however many steps it fuses. An assumption: no figure tells it."""
POLICIES = (
    Policy(name="no overlap", overlap=False),
    Policy(name="overlap"),
    Policy(name="… and ShortestRemaining", scheduling=Scheduling.SHORTEST_REMAINING),
    Policy(name="… and up to 8 steps fused", slots=8, fixed=FIXED),
    Policy(name="… and one step off-policy", ahead=1),
    Policy(
        name="ShortestRemaining, fused, off-policy",
        slots=8,
        fixed=FIXED,
        ahead=1,
        scheduling=Scheduling.SHORTEST_REMAINING,
    ),
)
OVERLAP, ALL = POLICIES[1], POLICIES[-1]
FEW = (OVERLAP, POLICIES[2], ALL)
SWEEP = {8: POLICIES, 16: POLICIES, 32: FEW, 64: FEW}
SWEEP_STEPS = 5
VARIANTS = (
    ("as fitted", TRAIN_SECONDS, REFERENCE),
    ("a training step of 15 s", 15.0, REFERENCE),
    ("a training step of 45 s", 45.0, REFERENCE),
    ("no limit on sequences", TRAIN_SECONDS, UNLIMITED),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        validations = list(pool.map(validate, VARIANTS))
        costs = Costs(**validations[0][0]["costs"])
        cases = [*sensitivity_cases(costs), *sweep_cases(costs)]
        outcomes = dict(zip(cases, pool.map(_simulate, cases), strict=True))
    records = [record for validation in validations for record in validation]
    records += sensitivity(costs, outcomes) + sweep(costs, outcomes)
    settings = {
        "published": {str(jobs): asdict(figures) for jobs, figures in PUBLISHED.items()},
        "fixed_part_of_a_pass": FIXED,
        "sweep_steps": SWEEP_STEPS,
        "episodes_each": EPISODES_EACH,
    }
    report.write(args.out, "benchmarks.node_model", settings, headlines(records), records, PACKAGES)


def _simulate(case: Case) -> Outcome:
    return simulate(*case)


# ---------------------------------------------------------------- the reference


def validate(variant: tuple[str, float, Policy]) -> list[Record]:
    """One record for each published N: the reference's columns as the fitted model has them."""
    name, train, policy = variant
    costs = calibrate(PUBLISHED, train, policy)
    records = []
    for jobs in PUBLISHED:
        outcome = simulate(costs, policy, jobs)
        figures = {key: round(seconds, 1) for key, seconds in asdict(in_waves(outcome)).items()}
        parts = {"rollout": round(outcome.rollout, 1), "train": round(outcome.train, 1)}
        record = {"table": "reference", "variant": name, "jobs": jobs, "costs": asdict(costs)}
        records.append(record | figures | parts)
    return records


def headlines(records: Sequence[Record]) -> dict[str, float]:
    """Every name begins with sim_. Errors are of the simulated speed-up against the published one."""
    found: dict[str, float] = {}
    fitted = {r["jobs"]: r for r in records if r["table"] == "reference" and r["variant"] == VARIANTS[0][0]}
    for jobs in (4, 8):
        for column in ("last", "mean"):
            speedup = fitted[1][column] / fitted[jobs][column]
            published = getattr(PUBLISHED[1], column) / getattr(PUBLISHED[jobs], column)
            found[f"sim_{column}_speedup_n{jobs}"] = round(speedup, 2)
            found[f"sim_{column}_speedup_n{jobs}_error_percent"] = round(100 * (speedup / published - 1), 1)
        step = fitted[jobs]["step"]
        found[f"sim_step_seconds_n{jobs}"] = step
        found[f"sim_step_seconds_n{jobs}_error_percent"] = round(100 * (step / PUBLISHED[jobs].step - 1), 1)
    for r in records:
        if r["table"] == "policies" and r["policy"] == ALL.name:
            found[f"sim_clora_last_speedup_n{r['jobs']}"] = r["last_speedup"]
            found[f"sim_clora_mean_speedup_n{r['jobs']}"] = r["mean_speedup"]
    return found


# ---------------------------------------------------------------- what it hangs on


def _changed(costs: Costs) -> list[tuple[str, float, Costs]]:
    """Each parameter a fifth less and a fifth more."""
    return [(name, f, replace(costs, **{name: value * f})) for name, value in asdict(costs).items() for f in (0.8, 1.2)]


def sensitivity_cases(costs: Costs) -> list[Case]:
    return [(changed, REFERENCE, jobs, STEPS) for _, _, changed in _changed(costs) for jobs in (1, 4, 8)]


def sensitivity(costs: Costs, outcomes: dict[Case, Outcome]) -> list[Record]:
    """The reference's speed-ups when a parameter is changed and nothing is fitted anew."""
    records = []
    for name, factor, changed in _changed(costs):
        last = {jobs: in_waves(outcomes[changed, REFERENCE, jobs, STEPS]).last for jobs in (1, 4, 8)}
        speedups = {f"last_speedup_n{jobs}": round(last[1] / last[jobs], 2) for jobs in (4, 8)}
        step = {"step_n8": round(in_waves(outcomes[changed, REFERENCE, 8, STEPS]).step, 1)}
        records.append({"table": "sensitivity", "parameter": name, "factor": factor} | speedups | step)
    return records


# ---------------------------------------------------------------- clora's policies


def sweep_cases(costs: Costs) -> list[Case]:
    cases = [(costs, policy, jobs, SWEEP_STEPS) for jobs, policies in SWEEP.items() for policy in policies]
    return [(costs, OVERLAP, 1, SWEEP_STEPS), *cases]


def sweep(costs: Costs, outcomes: dict[Case, Outcome]) -> list[Record]:
    """N experiments at once against the same N one after the other, all begun at the same time."""
    alone = outcomes[costs, OVERLAP, 1, SWEEP_STEPS].last
    records = []
    for jobs, policies in SWEEP.items():
        for policy in policies:
            outcome = outcomes[costs, policy, jobs, SWEEP_STEPS]
            records.append(
                {
                    "table": "policies",
                    "jobs": jobs,
                    "policy": policy.name,
                    "last_speedup": round(jobs * alone / outcome.last, 2),
                    "mean_speedup": round((jobs + 1) / 2 * alone / fmean(outcome.ends), 2),
                    "first_slowdown": round(outcome.ends[0] / alone, 2),
                    "sampler_busy": round(outcome.sampler_busy, 3),
                    "trainer_busy": round(outcome.trainer_busy, 3),
                }
            )
    return records


if __name__ == "__main__":
    if sys.argv[1:2] == ["render"]:
        print(render(json.loads(Path(sys.argv[2]).read_text())))
    elif sys.argv[1:2] == ["plot"]:
        plot(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
    else:
        main()
