"""What bench-gsm8k's runs come to: records, headlines, and the tables of docs/benchmarks/gsm8k.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import report

ENDS = 5  # steps at either end of the reinforcement over which a figure is a mean
BASE = "SmolLM2 as it comes"
NAMES = {"demonstrations": "with demonstrations", "reinforcement": "with reinforcement"}
BY_STEP = {
    "reward_mean": "mean reward",
    "groups_without_spread": "groups without spread",
    "turns_mean": "turns of an episode",
    "tool_errors": "calls answered with an error",
    "completion_tokens_mean": "tokens of the model in an episode",
    "truncated": "cut off by a token limit",
    "entropy": "entropy (nats a token)",
    "kl": "sampler against trainer, KL (nats a token)",
}

Record = dict[str, Any]


def records(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Record]:
    """Of the model's states, what was right on the test split; then of the reinforcement, its steps.

    metrics: by stage, in order, a line a step with step 0 first."""
    found: list[Record] = []
    for name, lines in metrics.items():
        measured = [line for line in lines if "eval_accuracy" in line]
        if not found:
            found.append(_state(BASE, measured[0]))
        found.append(_state(NAMES[name], measured[-1]))
    steps = [line for line in metrics.get("reinforcement", ()) if line["step"] > 0]
    if steps:
        found.append({"steps": [{name: line[name] for name in BY_STEP if name in line} for line in steps]})
    return found


def _state(name: str, line: Mapping[str, Any]) -> Record:
    count, accuracy = line["eval_examples"], line["eval_accuracy"]
    return {
        "state": name,
        "step": line["step"],
        "examples": int(count),
        "accuracy": round(accuracy, 4),
        "standard_error": round((accuracy * (1 - accuracy) / count) ** 0.5, 4),
        "mean_at_k": round(line["eval_mean_at_k"], 4),
        "pass_at_k": round(line["eval_pass_at_k"], 4),
        "errors": int(line["eval_errors"]),
    }


def headlines(found: Sequence[Record]) -> dict[str, float]:
    names = {BASE: "base_accuracy"} | {name: f"{stage}_accuracy" for stage, name in NAMES.items()}
    made = {names[one["state"]]: one["accuracy"] for one in found if "state" in one}
    for one in found:
        if "steps" in one:
            rewards = [step["reward_mean"] for step in one["steps"]]
            made["reward_start"] = round(statistics.fmean(rewards[:ENDS]), 4)
            made["reward_end"] = round(statistics.fmean(rewards[-ENDS:]), 4)
    return made


def render(document: Mapping[str, Any]) -> str:
    """The document as Markdown."""
    states = [one for one in document["records"] if "state" in one]
    steps: list[dict[str, float]] = next((one["steps"] for one in document["records"] if "steps" in one), [])
    return "\n".join([*_head(document), *_states(document["settings"], states), *_steps(steps)])


def _head(document: Mapping[str, Any]) -> Iterator[str]:
    settings = document["settings"]
    taught, trained = settings["algorithms"]["demonstrations"], settings["algorithms"]["reinforcement"]
    yield from report.title("GSM8K with a model of 135 million parameters, before and after", document)
    yield report.origin(document, settings["commits"])
    yield (
        f"SmolLM2-135M-Instruct, float32, LoRA of rank {settings['rank']}, environment GSM8K with calculator and"
        f" final_answer, at most {settings['max_turns']} turns. Demonstrations: {settings['steps']['demonstrations']}"
        f" steps of {taught['promptsPerStep']} solutions, their calculations as calls, without the prose, at a learning"
        f" rate of {taught['learningRate']}. Reinforcement: {settings['steps']['reinforcement']} steps of"
        f" {trained['estimator']}, {trained['promptsPerStep']} problems × {trained['groupSize']}, at"
        f" {trained['learningRate']}. Such a model solves few of these problems however it is trained; what is shown is"
        " that the whole way works on the real data. For a model that can, see"
        " [examples/gsm8k.yaml](../../examples/gsm8k.yaml)."
    )
    yield ""


def _states(settings: Mapping[str, Any], states: Sequence[Record]) -> Iterator[str]:
    k = settings["samples"]
    yield f"| of {settings['evaluated']} problems of the test split | greedy | mean of {k} drawn | one of {k} right |"
    yield "|---|---|---|---|"
    for one in states:
        yield (
            f"| {one['state']} | {one['accuracy']:.1%} ± {one['standard_error']:.1%} | {one['mean_at_k']:.1%}"
            f" | {one['pass_at_k']:.1%} |"
        )
    yield ""
    yield "±: one standard error of so many examples."


def _steps(steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    if not steps:
        return
    yield ""
    yield f"| reinforcement | first {ENDS} steps | last {ENDS} steps |"
    yield "|---|---|---|"
    for name, meaning in BY_STEP.items():
        ends = [[step[name] for step in part if name in step] for part in (steps[:ENDS], steps[-ENDS:])]
        if all(ends):
            yield f"| {meaning} | {statistics.fmean(ends[0]):.3g} | {statistics.fmean(ends[1]):.3g} |"
