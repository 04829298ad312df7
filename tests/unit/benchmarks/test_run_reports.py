"""What the learning and throughput benchmarks make of their runs, on runs whose figures are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gsm8k_report, learning, learning_report, throughput_report
from benchmarks.engine_runs import Parts
from benchmarks.limits import Rates, limit_seconds

FAMILIES = ("kitchen", "garden")


def learnt(part: str, at_once: int, family: str, seed: int, rewards: list[float]) -> learning_report.Record:
    lines: list[dict[str, Any]] = [{"step": 0, "eval_accuracy": 0.25}]
    lines += [{"step": step, "reward_mean": reward} for step, reward in enumerate(rewards, 1)]
    lines[-1]["eval_accuracy"] = 0.75
    job = {"name": f"{part}-{family}-{seed}", "metrics": lines}
    return learning_report.record(part, at_once, job, "abc")


def curves(part: str, at_once: int, shift: float) -> list[learning_report.Record]:
    """Ends of .7 and .9 in one family, .8 and 1 in the other, all shifted."""
    ends = {("kitchen", 1): 0.7, ("kitchen", 2): 0.9, ("garden", 1): 0.8, ("garden", 2): 1.0}
    return [learnt(part, at_once, f, s, [0.2, 0.3, 0.4, *[end + shift] * 3]) for (f, s), end in ends.items()]


def test_a_run_s_ends_are_means_of_three_steps() -> None:
    one = learnt("n1", 1, "kitchen", 2, [0.0, 0.3, 0.6, 0.5, 0.8, 0.9, 1.0])
    assert (one["start"], one["end"], one["held_out"]) == (0.3, 0.9, [0.25, 0.75])
    assert (one["family"], one["seed"]) == ("kitchen", 2)


def test_differences_are_paired_and_in_deviations_between_seeds() -> None:
    serial, beside = curves("n1", 1, 0.0), curves("n4", 4, -0.05)
    # about their families' means: ±.1, ±.1; four values less two means
    assert learning_report.sigma(serial) == pytest.approx((4 * 0.01 / 2) ** 0.5)
    assert learning_report.deltas(serial, beside[::-1]) == pytest.approx([-0.05] * 4)
    found = learning_report.headlines([*serial, *beside])
    assert found == {"start_mean": 0.3, "end_mean": 0.825, "delta_over_sigma": 0.35}
    assert learning_report.headlines(serial) == {"start_mean": 0.3, "end_mean": 0.85}


def kept(parts: Parts, name: str, runs: int, reward: float, commit: str) -> None:
    """Writes the runs of one part of bench-learning, up to so many."""
    part = next(part for part in learning.parts_to_run() if part.name == name)
    for run in learning.jobs(part, None)[:runs]:
        lines = [{"step": 0, "eval_accuracy": 0.25}, {"step": 1, "reward_mean": reward, "eval_accuracy": 0.5}]
        parts.write(run.name, {"commit": commit, "job": {"name": run.name, "metrics": lines}})


def test_parts_of_another_run_stay_until_they_are_run_again(tmp_path: Path) -> None:
    out, first, second = tmp_path / "learning.json", Parts(tmp_path / "first"), Parts(tmp_path / "second")
    for name, reward in (("n1", 0.5), ("n8", 0.6), ("still", 0.25)):
        kept(first, name, 12, reward, "first")
    for seed in ("1", "2", "3"):  # a spread among seeds alone
        kept_run = first.read(f"n1-kitchen-{seed}")
        assert kept_run is not None
        kept_run["job"]["metrics"][1]["reward_mean"] = 0.5 + int(seed) / 10
        first.write(f"n1-kitchen-{seed}", kept_run)
    learning.publish(first, out)
    kept(second, "n8", 12, 0.7, "second")
    kept(second, "still", 3, 0.0, "second")  # not whole
    learning.publish(second, out)
    document = json.loads(out.read_text())
    assert document["settings"]["commits"] == ["first", "second"]
    assert {(one["part"], one["commit"]): one["end"] for one in document["records"] if one["family"] == "trips"} == {
        ("n1", "first"): 0.5,
        ("n8", "second"): 0.7,
        ("still", "first"): 0.25,
    }
    assert len(document["records"]) == 12 + 12 + 8


def job(name: str, ended: float, reward: float) -> dict[str, Any]:
    line = {"step": 1, "reward_mean": reward, "step_seconds": 4.0, "trained_tokens": 10.0}
    return {"name": name, "attached": 0.0, "ended": ended, "metrics": [{"step": 0}, line]}


def part(at_once: int, ends: Sequence[float], length: str = "long", scheduling: str = "FairShare") -> Any:
    names = [f"agentic-{family}-{seed}" for family in FAMILIES for seed in (1, 2)]
    rewards = [0.7, 0.9, 0.8, 1.0]
    measured = {
        "start_seconds": 30.0,
        "tool_seconds": 640.0,
        "cores": 2,
        "cpu_seconds": {"sampler": ends[-1], "trainer": ends[-1] / 2, "engine": ends[-1] / 50},
        "counters": {
            "sampler_busy_seconds": ends[-1] / 2,
            "trainer_busy_seconds": ends[-1] / 4,
            "sampler_generated_tokens": 1000.0,
            "sampler_prompt_tokens": 500.0,
            "sampler_cached_prompt_tokens": 200.0,
        },
        "jobs": [job(*values) for values in zip(names, ends, rewards, strict=True)],
    }
    case = {"workload": "agentic", "at_once": at_once, "scheduling": scheduling, "off_policy": 0}
    return throughput_report.record(f"p{at_once}{length}", case, length, measured)


def test_speed_ups_are_of_the_same_repetition() -> None:
    records = [
        part(1, [100, 200, 300, 400]),
        part(8, [150, 160, 170, 200]),
        part(1, [20, 40, 60, 80], "short0"),
        part(8, [20, 20, 20, 20], "short0"),
    ]
    runs = throughput_report.Runs(records)
    key = ("agentic", 8, "FairShare", 0)
    last = runs.speedup(key, "last")
    assert (last.median, last.low, last.high) == (3.0, 2.0, 4.0)
    assert runs.speedup(key, "first").median == pytest.approx((100 / 150 + 1) / 2, abs=1e-4)
    cold = runs.speedup(key, "last", cold=True)  # of the long one alone
    assert (cold.low, cold.high) == pytest.approx(((400 + 8 * 30) / 200,) * 2)
    assert runs.speedup(key, "mean").low == pytest.approx(250 / 170, abs=1e-4)


def test_shares_of_a_run() -> None:
    one = part(8, [150, 160, 170, 200])
    assert (one["sampler_idle"], one["trainer_idle"], one["tokens_per_second"]) == (0.5, 0.75, 5.0)
    assert one["cores_used"] == {"sampler": 0.5, "trainer": 0.25, "engine": 0.01}
    assert (one["prompt_tokens"], one["trained_tokens"], one["reward"]) == (300.0, 40.0, 0.85)


def test_a_limit_is_of_the_cores_or_of_the_tools() -> None:
    rates = Rates({4: 0.02, 32: 0.08}, many=0.001)
    # 1000 tokens at 5 ms, 300 + 2 * 40 positions at 1 ms; 640 s of tools, 4 at once
    assert limit_seconds(rates, part(1, [100, 200, 300, 400]), in_flight=4) == 160.0
    assert rates.compute_seconds(4, 1000.0, 300.0, 40.0) == pytest.approx(5.38)
    # 32 in flight: tokens at 2.5 ms, and the tools are no limit any more
    fast = {**part(8, [150, 160, 170, 200]), "tool_seconds": 0.0}
    assert limit_seconds(rates, fast, in_flight=4) == pytest.approx(2.5 + 0.38)


FEW = {"prompts": 3, "group": 4, "in_flight": 5, "tools_seconds": [0.5, 3.0]}


def test_a_workload_is_described_by_what_was_measured() -> None:
    full = FEW | {"in_flight": 12, "tools_seconds": None}
    assert throughput_report.description(full) == "12 episodes a step, all in flight, tools that answer at once."


def test_tables_and_plots_are_made(tmp_path: Path) -> None:
    records = [
        part(n, ends) | {"limit_seconds": 80.0} for n, ends in ((1, [100, 200, 300, 400]), (8, [150, 160, 170, 200]))
    ]
    document = {
        "command": "c",
        "commit": "d",
        "machine": {"cores": 2, "cpu": "e", "features": ["avx2"], "memory_gib": 3},
        "versions": {},
        "settings": {"steps": 10, "commits": ["d"], "workloads": {"agentic": FEW}},
        "headlines": throughput_report.headlines(records),
        "records": records,
    }
    table = throughput_report.render(document)
    assert "| 8 | FairShare | 2.00 (2.00–2.00) × |" in table
    assert "| 50%, 25%, 1% |" in table
    assert "`agentic_share_of_limit_n8` 0.4" in table
    assert (
        "12 episodes a step, 5 of an experiment in flight, and a calculator over HTTP that takes 0.5 to 3 s." in table
    )
    throughput_report.write_plot(records, tmp_path / "a.svg")
    serial, beside = curves("n1", 1, 0.0), curves("n4", 4, -0.05)
    learning_report.write_plot([*serial, *beside], tmp_path / "b.svg")
    assert all((tmp_path / name).read_text().startswith("<?xml") for name in ("a.svg", "b.svg"))


def measured(step: int, accuracy: float) -> dict[str, float]:
    return {
        "step": step,
        "eval_examples": 100.0,
        "eval_errors": 0.0,
        "eval_accuracy": accuracy,
        "eval_mean_at_k": accuracy / 2,
        "eval_pass_at_k": accuracy * 2,
    }


def test_gsm8k_s_three_figures_are_before_between_and_after() -> None:
    rewards = [0.1] * 5 + [0.2] * 5 + [0.3] * 5
    found = gsm8k_report.records(
        {
            "demonstrations": [measured(0, 0.01), {"step": 1}, measured(2, 0.1)],
            "reinforcement": [
                measured(0, 0.1),
                *({"step": step, "reward_mean": reward} for step, reward in enumerate(rewards, 1)),
                measured(16, 0.2) | {"reward_mean": 0.3},
            ],
        }
    )
    states = [one for one in found if "state" in one]
    assert [one["accuracy"] for one in states] == [0.01, 0.1, 0.2]
    assert states[1]["standard_error"] == pytest.approx(0.03)  # (.1 * .9 / 100) ** .5
    assert gsm8k_report.headlines(found) == {
        "base_accuracy": 0.01,
        "demonstrations_accuracy": 0.1,
        "reinforcement_accuracy": 0.2,
        "reward_start": 0.1,
        "reward_end": 0.3,
    }


def test_an_unfinished_gsm8k_run_shows_what_there_is() -> None:
    found = gsm8k_report.records({"demonstrations": [measured(0, 0.01), measured(2, 0.1)]})
    assert gsm8k_report.headlines(found) == {"base_accuracy": 0.01, "demonstrations_accuracy": 0.1}
