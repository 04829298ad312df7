"""What the demo shows at its end: reward by step, held-out accuracy, where the adapters are."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from local.cache import LocalClusterError


def report(experiments: list[dict[str, Any]], storage: Path, folder: Path) -> None:
    """Prints a block for each experiment and draws `folder`/reward.png. `storage`: the engine's."""
    curves = {}
    for experiment in experiments:
        name, uid = experiment["metadata"]["name"], experiment["metadata"]["uid"]
        lines = _metrics(storage / "experiments" / uid / "metrics.jsonl")
        print(f"\n{name}")
        rewards = [line["reward_mean"] for line in lines if "reward_mean" in line]
        if rewards:
            curves[name] = rewards
            first, last = statistics.fmean(rewards[:3]), statistics.fmean(rewards[-3:])
            print("  reward by step    " + " ".join(f"{r:.2f}" for r in rewards))
            print(f"  first 3, last 3   {first:.2f} -> {last:.2f}")
        else:
            losses = [line["loss"] for line in lines if "loss" in line]
            print(f"  loss              {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
        measured = [line for line in lines if "eval_accuracy" in line]
        if len(measured) > 1:
            before, after = measured[0], measured[-1]
            print(
                f"  held out, greedy  {before['eval_accuracy']:.3f} -> {after['eval_accuracy']:.3f}"
                f" on {after['eval_examples']:.0f} problems"
            )
        checkpoint = experiment["status"]["checkpoint"]["path"]
        print(f"  adapter (PEFT)    {storage / checkpoint}")
    if curves:
        print(f"\nplot                {_plot(curves, folder / 'reward.png')}")


def _metrics(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise LocalClusterError(f"{path} is missing: the engine's storage was removed under the demo")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _plot(curves: dict[str, list[float]], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for name, rewards in curves.items():
        axes.plot(range(1, len(rewards) + 1), rewards, marker="o", label=name)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Reward of both RL experiments on one engine")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
