"""Where a step's groups come from: the log of an earlier life, or the sampler; on time, or ahead of it.

`Drawer` draws the groups of one step, and further ones for those without spread, if the algorithm says so. `Ahead`
calls it for one step after another and may be up to maxOffPolicySteps ahead of the step that is being trained. Each
group leases the version that is the newest when it starts, so that a step which is drawn while another is trained is at
most so many steps off-policy. Every group is logged when it is finished: after a kill, what was drawn is not drawn
again, ahead or not, unless its version was lost with the steps that were not committed (Journal.resume).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from clora_engine.errors import EngineError
from clora_engine.journal import Journal
from clora_engine.patience import Patience
from clora_engine.plan import Plan
from clora_engine.rollout import Rollouts
from clora_engine.rollout_config import Prompt
from clora_engine.sampler import Lease
from clora_engine.types import Group

MakeRollouts = Callable[[Plan], Rollouts[Lease]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The groups of a step, by index. position: in the data, after them. wanted: groups that the step is to train on.
    drawn: groups that came from the sampler rather than from the log. seconds: wall-clock, in all and in which an
    environment was asked."""

    step: int
    groups: list[Group]
    position: int
    wanted: int
    drawn: int
    seconds: float
    environment_seconds: float

    def trained(self, has_spread: Callable[[Group], bool]) -> list[Group]:
        """Of refilled groups, those to train on: the ones with spread first, up to `wanted`."""
        if len(self.groups) <= self.wanted:
            return self.groups
        return sorted(self.groups, key=lambda group: not has_spread(group))[: self.wanted]


class Drawer:
    """Draws groups of one experiment and logs them in its journal."""

    def __init__(self, journal: Journal, rollouts: MakeRollouts, patience: Patience) -> None:
        self._journal = journal
        self._patience = patience
        self._rollouts = rollouts

    async def draw(self, plan: Plan, step: int, position: int) -> Drawn:
        """Draws the groups of `step` with examples from `position` on, but for those that are logged already."""
        started = time.monotonic()
        wanted = plan.spec.algorithm.prompts_per_step
        logged = await asyncio.to_thread(self._journal.read_groups, step)
        rollouts = self._rollouts(plan)

        async def log_group(group: Group) -> None:
            await self._patience.keep(lambda: _to_its_end(self._journal.append_group, step, group))

        groups: list[Group] = []
        drawn = 0
        while count := _missing(plan, groups):
            ahead = {i: position + i for i in range(len(groups), len(groups) + count)}
            known = {i: logged[i] for i in ahead if i in logged and _reusable(plan, step, logged[i], ahead[i])}
            prompts = [Prompt(i, at, plan.data.train.example(at)) for i, at in ahead.items() if i not in known]
            fresh = {group.index: group for group in await rollouts.step(prompts, log_group)}
            groups += [known[i] if i in known else fresh[i] for i in ahead]
            drawn += len(fresh)
            if all(trajectory.error for group in groups[-count:] for trajectory in group.trajectories):
                break  # the environment is broken: asking it more often mends nothing
        seconds = time.monotonic() - started
        return Drawn(step, groups, position + len(groups), wanted, drawn, seconds, rollouts.environment_seconds)


async def _to_its_end(write: Callable[[int, Group], None], step: int, group: Group) -> None:
    """In a thread, which a cancellation waits for: afterwards nobody writes to the folder any more."""
    writing = asyncio.create_task(asyncio.to_thread(write, step, group))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


def _missing(plan: Plan, groups: list[Group]) -> int:
    """How many further groups the step needs; 0 when it has all, or may have no more."""
    algorithm = plan.spec.algorithm
    room = algorithm.prompts_per_step + algorithm.max_refill_prompts - len(groups)
    if len(groups) < algorithm.prompts_per_step:
        return algorithm.prompts_per_step - len(groups)
    if room <= 0:
        return 0
    spread = sum(plan.scoring.has_spread(group) for group in groups)
    return min(room, algorithm.prompts_per_step - spread)


def _reusable(plan: Plan, step: int, group: Group, position: int) -> bool:
    """Whether a logged group is what would be drawn: the spec may have been changed since."""
    algorithm = plan.spec.algorithm
    same = group.example == position and len(group.trajectories) == algorithm.group_size
    young = group.version_step >= step - 1 - algorithm.max_off_policy_steps
    return same and young and group.temperature == plan.temperature


class DrawerLike(Protocol):
    async def draw(self, plan: Plan, step: int, position: int) -> Drawn: ...


class Ahead:
    """Hands out the groups of one step after another. `close` it when no more are taken."""

    def __init__(self, drawer: DrawerLike) -> None:
        self._drawer = drawer
        self._drawing: tuple[object, ...] = ()  # Plan.drawing
        self._taken = 0  # the step that was asked for last
        self._asked = asyncio.Event()
        self._ready: asyncio.Queue[Drawn | Exception] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def take(self, plan: Plan, step: int, position: int) -> Drawn:
        """The groups of `step`. To be called once the version of the step before is published: from now on, up to
        maxOffPolicySteps further steps may be drawn with it.

        Raises what drawing them raised. What was drawn ahead under a plan that draws otherwise is dropped; as far as it
        still fits, it comes back from the log.
        """
        if self._task is None or plan.drawing != self._drawing or step != self._taken + 1:
            await self.close()
            self._drawing, self._ready = plan.drawing, asyncio.Queue()
            self._taken = step
            self._task = asyncio.create_task(self._draw(plan, step, position), name="draw-ahead")
            # whatever it ends by, nobody waits for ever
            ended = EngineError("what draws trajectories has ended", reason="DrawingEnded")
            self._task.add_done_callback(lambda _, ready=self._ready: ready.put_nowait(ended))  # type: ignore[misc]
        self._taken = step
        self._asked.set()
        drawn = await self._ready.get()
        if isinstance(drawn, Exception):
            await self.close()
            raise drawn
        assert drawn.step == step
        return drawn

    async def close(self) -> None:
        """Ends what is being drawn ahead; finished groups are in the log."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _draw(self, plan: Plan, step: int, position: int) -> None:
        try:
            while step <= plan.spec.max_steps:
                while step > self._taken + plan.spec.algorithm.max_off_policy_steps:
                    self._asked.clear()
                    await self._asked.wait()
                drawn = await self._drawer.draw(plan, step, position)
                self._ready.put_nowait(drawn)
                step, position = step + 1, drawn.position
        except Exception as error:
            self._ready.put_nowait(error)


def policy_lag(groups: Sequence[Group], newest: int) -> dict[str, float]:
    """policy_lag_mean and policy_lag_max: steps between the version that a group was drawn with and `newest`, the one
    that is trained on it."""
    lags = [max(0, newest - group.version_step) for group in groups]
    return {"policy_lag_mean": sum(lags) / len(lags), "policy_lag_max": float(max(lags))} if lags else {}
