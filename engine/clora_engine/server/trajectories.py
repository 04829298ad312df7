"""Logged trajectories for people: the tokens as text, by who wrote them, best or worst first, so many and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from clora_api.control import ReadablePart, ReadableTrajectory, TrajectoryOrder, TrajectoryPage
from clora_engine.types import Group, Trajectory

MAX_CHARACTERS = 100_000  # of one trajectory, its prompt included

Decode = Callable[[Sequence[int]], str]


def steps(rollouts: Path) -> list[int]:
    """Steps whose trajectories are kept, ascending."""
    return sorted(int(path.stem) for path in rollouts.glob("*.jsonl"))


def page(rollouts: Path, step: int | None, order: TrajectoryOrder, limit: int, decode: Decode) -> TrajectoryPage | None:
    """`limit` trajectories of a step (the latest, if None) in `order`; None if it keeps none of that step.

    A step that is being played shows the groups that are finished. Reads only: a line that is being written is left
    out.
    """
    kept = steps(rollouts)
    step = kept[-1] if step is None and kept else step
    if step not in kept:
        return None
    found = [
        (group, member, trajectory)
        for group in _groups(rollouts / f"{step:05d}.jsonl")
        for member, trajectory in enumerate(group.trajectories)
    ]
    good = [entry for entry in found if not entry[2].error]
    failed = [entry for entry in found if entry[2].error]
    chosen = {
        TrajectoryOrder.FIRST: found,
        TrajectoryOrder.BEST: sorted(good, key=lambda entry: -entry[2].reward),
        TrajectoryOrder.WORST: sorted(good, key=lambda entry: entry[2].reward),
        TrajectoryOrder.FAILED: failed,
    }[order]
    items = [_readable(*entry, decode) for entry in chosen[:limit]]
    return TrajectoryPage(step=step, steps=kept, total=len(found), failed=len(failed), items=items)


def _groups(path: Path) -> Iterable[Group]:
    lines = path.read_bytes().rpartition(b"\n")[0].split(b"\n")
    groups = (msgspec.json.decode(line, type=Group) for line in lines if line)
    by_index = {group.index: group for group in groups}
    return [by_index[index] for index in sorted(by_index)]


def _readable(group: Group, member: int, trajectory: Trajectory, decode: Decode) -> ReadableTrajectory:
    prompt, left = _cut(decode(group.prompt), MAX_CHARACTERS)
    parts = []
    marked = zip(trajectory.ids, trajectory.mask, strict=True)
    for by_model, run in groupby(marked, key=lambda pair: bool(pair[1])):
        text, left = _cut(decode([token for token, _ in run]), left)
        parts.append(ReadablePart(by="model" if by_model else "environment", text=text))
    return ReadableTrajectory(
        group=group.index,
        member=member,
        example=group.example,
        version_step=group.version_step,
        reward=trajectory.reward,
        turns=trajectory.turns,
        tool_calls=trajectory.tool_calls,
        tool_errors=trajectory.tool_errors,
        truncated=trajectory.truncated,
        error=trajectory.error,
        prompt=prompt,
        parts=parts,
    )


def _cut(text: str, left: int) -> tuple[str, int]:
    """The text within `left` characters, and how many are left after it."""
    if len(text) <= left:
        return text, left - len(text)
    return f"{text[:left]}… ({len(text) - left} characters more)", 0
