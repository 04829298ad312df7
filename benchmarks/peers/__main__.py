"""`make bench-peers`: clora and what a user would pick instead, on the same work and machine, alternating.

    python -m benchmarks.peers --work FOLDER --steps 5 --repetitions 2 --out docs/benchmarks/peers.json
    python -m benchmarks.peers render docs/benchmarks/peers.json > docs/benchmarks/peers.md

Eight experiments with SmolLM2 (two for each of four families of word problems), each a job of so many steps from the
same supervised start. TRL trains one job in a process, as its users do, and eight by eight processes; clora trains one
alone, and all eight at once, on a warm engine. First a short trial finds TRL's fastest settings here. Last comes
SkyRL's Tinker server with one client and with four. Parts that are finished in FOLDER are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import report
from benchmarks.engine_runs import (
    FAMILIES,
    LORA,
    WARM_UP,
    Job,
    Parts,
    engine,
    forget,
    rl_spec,
    run,
    warm_up,
    warm_up_spec,
)
from benchmarks.peers import environments, table
from benchmarks.peers.runs import PeerFailed, clora_record, run_script, skyrl_record, skyrl_server, trl_record
from benchmarks.peers.work import Work
from local.model import model

PROMPTS, GROUP, CONTEXT = 8, 8, 1024
AT_ONCE = 8
TRIALS: Sequence[Mapping[str, Any]] = (
    *({"dtype": "float32", "micro_batch": rows, "generation": "static"} for rows in (8, 16, 32)),
    {"dtype": "bfloat16", "micro_batch": 16, "generation": "static"},
    {"dtype": "float32", "micro_batch": 16, "generation": "continuous"},
)
SKYRL_STEPS = {1: 5, 4: 3}  # by clients; the first compiles
PEER_PACKAGES = ("trl", "skyrl", "tinker", "jax", "torch", "transformers", "peft")


class Benchmark:
    """The parts, each of which returns its record; all files are below `folder`."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder.resolve()
        self._steps = steps
        self.jobs = [self._job(f"peers-{i}", FAMILIES[i % len(FAMILIES)], 1 + i // len(FAMILIES)) for i in range(8)]

    def _job(self, name: str, family: str, seed: int, steps: int | None = None) -> Job:
        environment = {"name": "WordProblems", "arguments": {"families": family}}
        return Job(name, rl_spec(environment, seed=seed, prompts=PROMPTS, group=GROUP, steps=steps or self._steps))

    def _scratch(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _adapter(self) -> Path:
        """Where every job starts: the warm-up's last commit, a PEFT folder."""
        last = f"{warm_up_spec()['maxSteps']:05}"
        return self._folder / "engine" / "storage" / "experiments" / WARM_UP / "steps" / last

    # ---------------------------------------------------------------- clora

    def warm_up(self) -> dict[str, Any]:
        """Makes the start of all jobs."""
        with engine(self._folder / "engine") as process:
            warm_up(process)
        return {}

    def clora(self, repetition: int) -> dict[str, Any]:
        """One job alone and all at once, on an engine that has made a step before."""
        begun = time.monotonic()
        with engine(self._folder / "engine") as process:
            started = time.monotonic() - begun
            first = self._job("peers-first", FAMILIES[0], 99, steps=1)
            forget(process, [first, *self.jobs])
            run(process, [first], 1)
            alone = run(process, [self.jobs[repetition % AT_ONCE]], 1)
            together = run(process, self.jobs, AT_ONCE)
        return {
            "start_seconds": started,
            "alone": clora_record(alone),
            "together": clora_record(together),
        }

    # ---------------------------------------------------------------- TRL

    def trial(self) -> dict[str, Any]:
        """One step with each of the settings, the same step for all. `error`: why one does not run here."""
        tried = []
        for settings in TRIALS:
            job = self._job("trial", FAMILIES[0], 98, steps=1)
            try:
                (step,) = self._trl("trl-trial", job, settings)["steps"]
                tried.append({**settings, "step": step})
            except PeerFailed as error:
                tried.append({**settings, "error": error.reason})
        return {"tried": tried}

    def trl(self, repetition: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The job that clora trains alone in the same repetition."""
        return self._trl(f"trl-{repetition}", self.jobs[repetition % AT_ONCE], settings)

    def _trl(self, name: str, job: Job, settings: Mapping[str, Any]) -> dict[str, Any]:
        python = environments.trl(self._folder / "environments")
        work = self._work(name, job.spec, settings, str(self._adapter()))
        return trl_record(*run_script(python, "benchmarks.peers.trl_grpo", work, self._scratch(name)))

    def _work(self, name: str, spec: dict[str, Any], settings: Mapping[str, Any], adapter: str = "") -> Work:
        return Work(
            spec=spec,
            model=str(model()),
            adapter=adapter,
            max_context=CONTEXT,
            settings=dict(settings),
            out=str(self._scratch(name) / "events.jsonl"),
        )

    # ---------------------------------------------------------------- SkyRL

    def skyrl(self) -> dict[str, Any]:
        """The warm-up on its server, then GRPO from there, with one client and with several at once."""
        python = environments.skyrl(self._folder / "environments")
        folder, base = self._scratch("skyrl"), self._float32_model()
        adapters = sum(SKYRL_STEPS) + 2  # one for each client, the base model, and the warm-up's
        with skyrl_server(python, base, folder, adapters, LORA["rank"]) as url:

            def client(spec: dict[str, Any], count: int, state: str) -> list[dict[str, Any]]:
                settings = {"url": url, "base_model": str(base), "clients": count, "state": state}
                work = self._work("skyrl", spec, settings)
                return run_script(python, "benchmarks.peers.skyrl_client", work, folder)[2]

            supervised = client(warm_up_spec(), 1, "")
            state = supervised[-1]["path"]
            runs = []
            for count, made in SKYRL_STEPS.items():
                spec = self._job("skyrl", FAMILIES[0], 1, steps=made).spec
                runs.append(skyrl_record(count, client(spec, count, state)))
        steps = [event for event in supervised if event["event"] == "supervised"]
        return {"supervised": steps, "runs": runs}

    def _float32_model(self) -> Path:
        """SkyRL computes in the checkpoint's type, and float32 is the faster one on a CPU without AMX."""
        folder = self._folder / "model-float32"
        if not folder.exists():
            source, partial = str(model()), self._folder / "model-float32.partial"
            AutoTokenizer.from_pretrained(source).save_pretrained(partial)
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(partial)
            partial.rename(folder)
        return folder


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for environments, storage and finished parts")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where the results go; unset: only the parts are run")
    args = parser.parse_args(argv)
    benchmark, parts = Benchmark(args.work, args.steps), Parts(args.work / "parts")

    def part(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found = parts.read(name)
        if found is None:
            print(f"{name} …", file=sys.stderr, flush=True)
            found = {"part": name, "commit": report.commit(), **measure()}
            parts.write(name, found)
        return found

    part("warm-up", benchmark.warm_up)
    trial = part("trial", benchmark.trial)
    settings = table.fastest(trial["tried"])
    records = [trial]
    for repetition in range(args.repetitions):
        records.append(part(f"trl-{repetition}", partial(benchmark.trl, repetition, settings)))
        records.append(part(f"clora-{repetition}", partial(benchmark.clora, repetition)))
    records.append(part("skyrl", benchmark.skyrl))
    if args.out is None:
        return
    home = args.work / "environments"
    report.write(
        args.out,
        "benchmarks.peers",
        {
            "steps": args.steps,
            "repetitions": args.repetitions,
            "prompts": PROMPTS,
            "group": GROUP,
            "at_once": AT_ONCE,
            "commits": sorted({record["commit"] for record in records}),
            "trl": settings,
            "trl_versions": environments.versions(environments.trl(home), PEER_PACKAGES),
            "skyrl_versions": environments.versions(environments.skyrl(home), PEER_PACKAGES),
        },
        table.headlines(records, AT_ONCE),
        records,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["render"]:
        print(table.render(json.loads(Path(sys.argv[2]).read_text())))
    else:
        main()
