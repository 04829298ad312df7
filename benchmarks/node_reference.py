"""The reference's published figures, and the four parameters that follow from those of one and of two experiments.

Trajectory, "Multi-LoRA Training for Continual Learning" (C-LoRA on SkyRL, 2026): one node, 4 + 4 H200,
Qwen3-4B-Instruct-2507, GSM8K with tools, 8 experiments of 10 steps, N at a time, serial = one after the other:
https://trajectory.ai/field-notes/multi-lora-training-for-continual-learning. Training is one tenant after the other.

What the columns mean follows from their numbers: the experiments run in waves of N, all times count from the first
wave's start, and last, mean and first are over all 8. Serial: 8575 = 4.5 × 15244 / 8. N = 2: four waves of 2204.5 s
whose first experiment ends at 2103 s have a mean of 5460.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.node import MAX_TURN_TOKENS, STEPS, TURNS, Costs, Outcome, Policy, simulate

Vector: TypeAlias = npt.NDArray[np.float64]

MAX_ITERATIONS, GOOD_ENOUGH, DIFFERENCE = 8, 0.003, 0.05
DIGITS = 6
"""Of a fitted parameter. More are not in the figures, and the last ones depend on the processor that numpy runs on."""
JOBS = 8
TRAIN_SECONDS = 30.0
"""A training step of this stack, by its authors, in the weeks of the measurement (as a round example):
https://github.com/NovaSky-AI/SkyRL/pull/1638. The figures of one and two experiments leave it open."""

REFERENCE = Policy(name="reference", seats=1024, by_step=True, slots=JOBS)
"""No gate: vLLM's first come, first served, which FairShare among equals comes to, with that stack's 1024 sequences a
GPU (https://github.com/NovaSky-AI/SkyRL, skyrl/train/config). The trainer takes all forward_backward calls that wait,
one after the other, and answers when all are done (https://github.com/NovaSky-AI/SkyRL/issues/1846)."""
UNLIMITED = replace(REFERENCE, name="reference without a limit on sequences", seats=1 << 20)


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds. last, mean, first: from the start of all to an experiment's end; step: of one experiment."""

    last: float
    mean: float
    first: float
    step: float


PUBLISHED = {
    1: Figures(15244, 8575, 1905, 191),
    2: Figures(8818, 5460, 2103, 215),
    4: Figures(6131, 4562, 2992, 303),
    8: Figures(5433, 5249, 3758, 500),
}


def in_waves(outcome: Outcome) -> Figures:
    """The columns for JOBS experiments, from the outcome of one wave of them; all waves are alike."""
    ends = outcome.ends
    waves = JOBS // len(ends)
    mean = (waves - 1) / 2 * outcome.last + sum(ends) / len(ends)
    return Figures(last=waves * outcome.last, mean=mean, first=ends[0], step=sum(ends) / len(ends) / STEPS)


def calibrate(published: Mapping[int, Figures], train: float = TRAIN_SECONDS, policy: Policy = REFERENCE) -> Costs:
    """The parameters from the columns of one and of two experiments; nothing else is looked at."""
    return fit(published[1], published[2], train, policy)


def fit(alone: Figures, pair: Figures, train: float, policy: Policy) -> Costs:
    """Two parameters from two figures, the time of an experiment alone and that of the wave of two, by Newton's method
    with both >= 0. Stops where no shorter step helps either."""
    wanted = np.array([alone.last / JOBS, pair.last / (JOBS / 2)])
    unit = np.array([(alone.step - train) / (TURNS * MAX_TURN_TOKENS), 2e-4])

    def costs(x: Vector) -> Costs:
        base, load = (float(f"{found:.{DIGITS}g}") for found in x * unit)
        return Costs(decode_base=base, decode_load=load, train=train)

    def miss(x: Vector) -> Vector:
        found: Vector = np.array([simulate(costs(x), policy, jobs).last for jobs in (1, 2)]) / wanted - 1.0
        return found

    best = np.array([1.0, 0.1])
    missed = miss(best)
    for _ in range(MAX_ITERATIONS):
        if np.abs(missed).max() < GOOD_ENOUGH:
            break
        slopes = np.array([(miss(best + d) - missed) / DIFFERENCE for d in np.eye(2) * DIFFERENCE]).T
        free = (best > 0.0) | (slopes.T @ missed < 0.0)  # not what is 0, and would be better still below
        step = np.zeros(2)
        step[free] = np.linalg.lstsq(slopes[:, free], -missed, rcond=None)[0]
        shorter = (np.maximum(best + part * step, 0.0) for part in (1.0, 0.5, 0.25, 0.125))
        better = next(((x, m) for x in shorter if np.linalg.norm(m := miss(x)) < np.linalg.norm(missed)), None)
        if better is None:
            break
        best, missed = better
    return costs(best)
