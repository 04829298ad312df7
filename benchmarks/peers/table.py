"""What the peers' runs come to: TRL's best settings, the headlines, and docs/benchmarks/peers.md. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.report import Spread

Record = Mapping[str, Any]

MEANING = {
    "over_trl_serial": "eight jobs by TRL, one after the other, without its cold starts, over clora's last of eight at"
    " once",
    "over_trl_serial_cold": "the same with a cold start for each of TRL's eight processes",
    "over_trl_single": "one job by TRL, without its cold start, over the same job alone on clora's warm engine",
    "trl_step_seconds": "a step of one job by TRL, the median",
    "clora_step_seconds": "a step of one job alone on clora, the median",
    "trl_cold_seconds": "from the start of TRL's process to the end of its first step",
    "skyrl_sampling_tokens_per_second": "SkyRL, one client, warm: tokens sampled a second",
    "skyrl_training_tokens_per_second": "SkyRL, one client, warm: tokens trained a second",
    "clora_sampling_tokens_per_second": "clora, one job: tokens sampled a second",
}


def fastest(tried: Sequence[Record]) -> dict[str, Any]:
    """The settings of the trial with the least time a trained token: what is sampled differs with the number type."""
    good = [one for one in tried if "step" in one]
    best = min(good, key=lambda one: one["step"]["seconds"] / one["step"]["trained_tokens"])
    return {name: value for name, value in best.items() if name != "step"}


def headlines(records: Sequence[Record], at_once: int) -> dict[str, float]:
    """Ratios are medians over repetitions, each of TRL and clora side by side; see MEANING."""
    trl, clora = _of(records, "trl-"), _of(records, "clora-")
    pairs = list(zip(trl, clora, strict=True))
    trl_steps, own_steps = _steps(trl), _steps([one["alone"] for one in clora])
    found = {
        "over_trl_serial": _median(at_once * t["job_seconds"] / c["together"]["last_seconds"] for t, c in pairs),
        "over_trl_serial_cold": _median(
            at_once * t["process_seconds"] / c["together"]["last_seconds"] for t, c in pairs
        ),
        "over_trl_single": _median(t["job_seconds"] / c["alone"]["last_seconds"] for t, c in pairs),
        "trl_step_seconds": _median(step["seconds"] for step in trl_steps),
        "clora_step_seconds": _median(step["seconds"] for step in own_steps),
        "trl_cold_seconds": _median(one["cold_seconds"] for one in trl),
        "clora_sampling_tokens_per_second": _rate(own_steps, "sampled_tokens", "rollout_seconds"),
    }
    for skyrl in _of(records, "skyrl"):
        alone = next(run for run in skyrl["runs"] if run["clients"] == 1)
        steps = _warm(alone)
        found["skyrl_sampling_tokens_per_second"] = _rate(steps, "sampled_tokens", "rollout_seconds")
        found["skyrl_training_tokens_per_second"] = _rate(steps, "trained_tokens", "train_seconds")
    return {name: round(value, 2) for name, value in found.items()}


def render(document: Record) -> str:
    """Markdown."""
    return "\n".join([*_head(document), *_trial(document), *_jobs(document), *_skyrl(document)])


# ------------------------------------------------------------------------------------------ parts of the page


def _head(document: Record) -> Iterator[str]:
    settings = document["settings"]
    yield from report.title("clora beside its peers", document)
    yield (
        f"{report.origin(document, settings['commits'])}"
        f" TRL's environment: {report.versions(settings['trl_versions'])}."
        f" SkyRL's: {report.versions(settings['skyrl_versions'])}."
    )
    yield ""
    yield (
        "SmolLM2-135M with a LoRA of rank 16 on all linear layers; one-step word problems with a calculator tool,"
        f" {settings['prompts']} prompts × {settings['group']} trajectories a step, {settings['steps']} steps a job,"
        f" {settings['repetitions']} repetitions, TRL and clora in turn. Every peer plays the same prompts in the same"
        " order through clora's environment code and chat template, from the same supervised start, with the same"
        " optimizer, learning rates, clip and denominator of the loss. What is sampled is each one's own."
    )
    yield ""
    yield from report.headline_rows("headline", document, MEANING)


def _trial(document: Record) -> Iterator[str]:
    settings = document["settings"]["trl"]
    yield ""
    yield "## TRL's settings"
    yield ""
    yield (
        "One step with each, cold start excluded; GRPOTrainer and PEFT, the environment by `rollout_func`, all rows"
        " generated in one batch, no gradient checkpointing, no reference model. The rest of the page uses the one with"
        f" the least time a trained token: {_named(settings)}."
    )
    yield ""
    yield "| dtype | micro batch | generation | step s | rollout s | training s | tokens trained | with padding |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in document["records"][0]["tried"]:
        names = f"| {one['dtype']} | {one['micro_batch']} | {one['generation']} "
        if "error" in one:
            yield f"{names}| does not run: `{one['error']}` | | | | |"
            continue
        step = one["step"]
        yield (
            f"{names}| {step['seconds']:.1f} | {step['rollout_seconds']:.1f} | {step['train_seconds']:.1f}"
            f" | {step['trained_tokens']:.0f} | {step['padded_tokens']:.0f} |"
        )


def _jobs(document: Record) -> Iterator[str]:
    trl, clora = _of(document["records"], "trl-"), _of(document["records"], "clora-")
    at_once = document["settings"]["at_once"]
    yield ""
    yield "## Jobs"
    yield ""
    yield (
        "Medians over repetitions and, of steps, over all steps; smallest and largest in parentheses. *Trained* are the"
        " positions that the trainer computes in a step: TRL computes every trajectory by itself and pads it, clora a"
        " group's prompt once, trajectories that are alike once, and groups in which all rewards are equal not at all."
        f" clora's engine was ready in {Spread.of([one['start_seconds'] for one in clora])} s and had made one step."
    )
    yield ""
    yield (
        "| | job s | with cold start s | step s | rollout s | training s | sampled tokens | trained tokens"
        " | reward, first step | reward, last step |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    yield _job_row(
        "TRL, one job",
        [one["job_seconds"] for one in trl],
        [one["process_seconds"] for one in trl],
        trl,
        "padded_tokens",
    )
    alone = [one["alone"] for one in clora]
    yield _job_row("clora, one job", [one["last_seconds"] for one in alone], [], alone, "trained_tokens")
    together = [one["together"] for one in clora]
    last = [one["last_seconds"] for one in together]
    yield _job_row(f"clora, {at_once} at once, the last", last, [], together, "trained_tokens")


def _job_row(name: str, job: Sequence[float], cold: Sequence[float], runs: Sequence[Record], trained: str) -> str:
    steps = _steps(runs)
    spreads = [Spread.of([step[key] for step in steps]) for key in ("seconds", "rollout_seconds", "train_seconds")]
    tokens = [_median(step[key] for step in steps) for key in ("sampled_tokens", trained)]
    numbers = sorted({step["step"] for step in steps})
    rewards = [
        statistics.fmean(step["reward_mean"] for step in steps if step["step"] == number)
        for number in (numbers[0], numbers[-1])
    ]
    cells = [
        name,
        str(Spread.of(job)),
        str(Spread.of(cold)) if cold else "",
        *map(str, spreads),
        *(f"{count:.0f}" for count in tokens),
        *(f"{reward:.2f}" for reward in rewards),
    ]
    return f"| {' | '.join(cells)} |"


def _skyrl(document: Record) -> Iterator[str]:
    for skyrl in _of(document["records"], "skyrl"):
        supervised = skyrl["supervised"]
        seconds = statistics.median(step["train_seconds"] for step in supervised[1:])
        yield ""
        yield "## SkyRL by the Tinker SDK"
        yield ""
        yield (
            "SkyRL's server with its JAX back end on the CPU in float32; clients of the Tinker SDK play the same"
            " episodes, each client with an adapter of its own. Groups without signal are left out, as clora leaves"
            " them out. The first step compiles and is not counted; rates are medians over the others,"
            " some of which meet new lengths and compile too. The supervised start was trained on the same server"
            f" ({len(supervised)} steps, {seconds:.1f} s each)."
        )
        yield ""
        yield (
            "| clients | step s (all clients) | sampling tok/s of a client | training tok/s of a client"
            " | reward, last step |"
        )
        yield "|---|---|---|---|---|"
        for run in skyrl["runs"]:
            steps = _warm(run)
            last = [step["reward_mean"] for step in steps if step["step"] == steps[-1]["step"]]
            yield (
                f"| {run['clients']} | {Spread.of(run['wall_seconds'][1:])}"
                f" | {_rate(steps, 'sampled_tokens', 'rollout_seconds'):.1f}"
                f" | {_rate(steps, 'trained_tokens', 'train_seconds'):.1f} | {statistics.fmean(last):.2f} |"
            )


# ------------------------------------------------------------------------------------------ figures


def _of(records: Sequence[Record], prefix: str) -> list[Record]:
    return [one for one in records if one["part"].startswith(prefix)]


def _steps(runs: Sequence[Record]) -> list[Record]:
    return [step for run in runs for step in run["steps"]]


def _warm(run: Record) -> list[Record]:
    """Steps of a SkyRL run but the first, which compiles."""
    return [step for step in run["steps"] if step["step"] > 1]


def _rate(steps: Sequence[Record], tokens: str, seconds: str) -> float:
    """Tokens a second, the median over the steps that took any time; 0 without one."""
    rates = [step[tokens] / step[seconds] for step in steps if step[seconds]]
    return statistics.median(rates) if rates else 0.0


def _median(values: Iterator[float]) -> float:
    return statistics.median(values)


def _named(settings: Mapping[str, Any]) -> str:
    return f"{settings['dtype']}, micro batches of {settings['micro_batch']} rows, {settings['generation']} generation"
