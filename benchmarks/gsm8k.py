"""`make bench-gsm8k`: the real GSM8K through clora's own environment, with a model far too small for it.

    python -m benchmarks.gsm8k --data FOLDER --work FOLDER --out docs/benchmarks/gsm8k.json
    python -m benchmarks.gsm8k render docs/benchmarks/gsm8k.json > docs/benchmarks/gsm8k.md

--data holds train.jsonl and test.jsonl as published at https://github.com/openai/grade-school-math. One experiment
fine-tunes on demonstrations, the calculations of the written solutions as calculator calls; the next begins where it
ended and trains by reinforcement. Both are measured on problems of the test split before their first and after their
last step, so that there are three figures: SmolLM2 as it comes, with demonstrations, with reinforcement. Each is a
part: one that is finished in --work is not run again, one that was running goes on from its commits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.engine_runs import LORA, MAX_SECONDS, Parts, engine, expect_success
from benchmarks.gsm8k_report import headlines, records, render
from tests.engine_fixtures import FINAL, EngineProcess

VOLUME = "gsm8k"
MAX_TURNS = 10  # of the longest published solutions
EVALUATED, SAMPLES = 300, 4

DEMONSTRATIONS = {
    "estimator": "SFT",
    "loss": "CrossEntropy",
    "promptsPerStep": 16,
    "learningRate": "1e-3",
    "optimizer": {"warmupSteps": 10, "schedule": "Linear"},
}
REINFORCEMENT = {
    "estimator": "GRPO",
    "loss": "PPO",
    "promptsPerStep": 16,
    "groupSize": 8,
    "learningRate": "2e-4",
    "optimizer": {"warmupSteps": 2},
}
STEPS = {"demonstrations": 160, "reinforcement": 24}


def spec(algorithm: dict[str, Any], steps: int) -> dict[str, Any]:
    """A LoRAExperiment's, on the files of the data volume."""
    return {
        "engineRef": {"name": "local"},
        "lora": {**LORA, "seed": 0},
        "algorithm": dict(algorithm),
        "environment": {"name": "GSM8K", "maxTurns": MAX_TURNS},
        "data": {"file": {"volume": VOLUME, "path": "train.jsonl", "heldOutPath": "test.jsonl"}, "shuffleSeed": 1},
        "sampling": {"temperature": "1.0", "maxTokens": 48},
        "evaluation": {"examples": EVALUATED, "samples": SAMPLES},
        "checkpoint": {"every": 5, "keep": 1},
        "maxSteps": steps,
    }


def stages() -> dict[str, dict[str, Any]]:
    """In order; each begins where the one before it ended."""
    demonstrations = spec(DEMONSTRATIONS, STEPS["demonstrations"])
    reinforcement = spec(REINFORCEMENT, STEPS["reinforcement"])
    reinforcement["initFrom"] = {"experiment": {"name": "demonstrations"}}
    return {"demonstrations": demonstrations, "reinforcement": reinforcement}


def measure(work: Path, data: Path, parts: Parts) -> None:
    """Runs the stages that are not there yet."""
    todo = {name: stage for name, stage in stages().items() if parts.read(name) is None}
    if not todo:
        return
    with engine(work / "engine", max_experiments=1, data_volume=f"{VOLUME}={data}") as process:
        for name, stage in todo.items():
            parts.write(name, {"commit": report.commit(), "metrics": metrics(process, name, stage)})


def metrics(process: EngineProcess, name: str, stage: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each step of one stage, which stays on the storage for the next to begin from."""
    source = {"init_source": {"uid": stage["initFrom"]["experiment"]["name"]}} if "initFrom" in stage else {}
    process.put(name, stage, **source).raise_for_status()
    expect_success(process.wait(name, lambda one: one.phase in FINAL, MAX_SECONDS))
    found = process.metrics(name)
    process.delete(name)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="folder for storage and finished parts")
    parser.add_argument("--out", type=Path, help="where the results go")
    args = parser.parse_args(argv)
    missing = [name for name in ("train.jsonl", "test.jsonl") if not (args.data / name).is_file()]
    if missing:
        parser.error(f"--data: {', '.join(missing)} missing: take GSM8K's files from openai/grade-school-math")
    parts = Parts(args.work / "parts")
    measure(args.work, args.data.resolve(), parts)
    if args.out:
        kept = {name: part for name in STEPS if (part := parts.read(name)) is not None}
        settings = {
            **{"rank": LORA["rank"], "evaluated": EVALUATED, "samples": SAMPLES, "max_turns": MAX_TURNS},
            "steps": STEPS,
            "algorithms": {"demonstrations": DEMONSTRATIONS, "reinforcement": REINFORCEMENT},
            "commits": sorted({part["commit"] for part in kept.values()}),
        }
        found = records({name: part["metrics"] for name, part in kept.items()})
        report.write(args.out, "benchmarks.gsm8k", settings, headlines(found), found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["render"]:
        print(render(json.loads(Path(sys.argv[2]).read_text())))
    else:
        main()
