"""What a step is drawn from, how far ahead, and what a new life finds in the log."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from clora_api.control import DesiredExperiment
from clora_engine import plan as planning
from clora_engine.config import EngineConfig
from clora_engine.drawing import Ahead, Drawer, Drawn, policy_lag
from clora_engine.errors import EngineError
from clora_engine.journal import Journal
from clora_engine.patience import Patience
from clora_engine.plan import Plan
from clora_engine.rollout_config import Prompt
from clora_engine.types import Group, Trajectory
from tests.engine_fixtures import rl_spec
from tests.unit.engine.chat_fixtures import CHATML, tiny_tokenizer

TOKENIZER = tiny_tokenizer(CHATML)
OnGroup = Callable[[Group], Awaitable[None]]


def a_plan(tmp_path: Path, *, max_steps: int = 9, temperature: str = "1.0", **algorithm: Any) -> Plan:
    spec = rl_spec(maxSteps=max_steps, sampling={"temperature": temperature, "maxTokens": 8})
    spec["algorithm"] = {"promptsPerStep": 3, "groupSize": 2} | algorithm
    desired = DesiredExperiment.model_validate({"uid": "u", "namespace": "n", "name": "e", "spec": spec})
    config = EngineConfig(
        model="m", storage=tmp_path, token_file=tmp_path / "token", max_model_len=512, max_off_policy_steps=3
    )
    return planning.build(desired, config, TOKENIZER)


class Played:
    """Groups of two, with spread where the data position is in `spread`."""

    def __init__(self, spread: Sequence[int], version: int = 0) -> None:
        self.spread, self.version = spread, version
        self.prompts: list[tuple[int, int]] = []
        self.environment_seconds = 0.5

    async def step(self, prompts: Sequence[Prompt], on_group: OnGroup) -> list[Group]:
        groups = []
        for prompt in prompts:
            self.prompts.append((prompt.index, prompt.position))
            rewards = (1.0, 0.0) if prompt.position in self.spread else (1.0, 1.0)
            trajectories = [Trajectory(ids=[1], mask=[1], logprobs=[-1.0], reward=r, turns=1) for r in rewards]
            groups.append(
                Group(
                    index=prompt.index,
                    example=prompt.position,
                    version_step=self.version,
                    prompt=[1],
                    trajectories=trajectories,
                )
            )
            await on_group(groups[-1])
        return groups


def opened(tmp_path: Path, epoch: int = 1) -> Journal:
    journal = Journal(tmp_path, "u", epoch)
    journal.claim("n", "e")
    return journal


async def draw(journal: Journal, plan: Plan, played: Played, position: int = 10) -> Drawn:
    patience = Patience(print, lambda: True)
    return await Drawer(journal, lambda _: cast(Any, played), patience).draw(plan, 1, position)


async def test_without_refill_a_step_is_its_prompts(tmp_path: Path) -> None:
    played = Played(spread=[])
    drawn = await draw(opened(tmp_path), a_plan(tmp_path), played)
    assert played.prompts == [(0, 10), (1, 11), (2, 12)]
    assert (drawn.position, drawn.drawn, drawn.environment_seconds) == (13, 3, 0.5)
    assert drawn.trained(lambda _: False) == drawn.groups


async def test_refill_draws_until_enough_groups_have_spread(tmp_path: Path) -> None:
    plan = a_plan(tmp_path, maxRefillPrompts=9)
    played = Played(spread=[11, 14, 15])
    drawn = await draw(opened(tmp_path), plan, played)
    assert [at for _, at in played.prompts] == [10, 11, 12, 13, 14, 15]
    assert drawn.position == 16
    assert [group.example for group in drawn.trained(plan.scoring.has_spread)] == [11, 14, 15]


async def test_refill_ends_at_its_bound_with_what_there_is(tmp_path: Path) -> None:
    plan = a_plan(tmp_path, maxRefillPrompts=4)
    drawn = await draw(opened(tmp_path), plan, Played(spread=[13]))
    assert (len(drawn.groups), drawn.position) == (7, 17)
    assert [group.example for group in drawn.trained(plan.scoring.has_spread)] == [13, 10, 11]


async def test_a_new_life_draws_what_is_missing_and_comes_to_the_same_groups(tmp_path: Path) -> None:
    plan = a_plan(tmp_path, maxRefillPrompts=9)
    whole = await draw(opened(tmp_path / "a"), plan, Played(spread=[11, 14, 15]))
    journal = opened(tmp_path / "b")
    for group in (whole.groups[3], whole.groups[1]):
        journal.append_group(1, group)
    again = Played(spread=[11, 14, 15])
    drawn = await draw(journal, plan, again)
    assert drawn.groups == whole.groups
    assert drawn.position == whole.position
    assert [at for _, at in again.prompts] == [10, 12, 14, 15]
    nothing = Played(spread=[])
    assert (await draw(journal, plan, nothing)).groups == whole.groups
    assert nothing.prompts == []


@pytest.mark.parametrize(("changes", "position"), [({"temperature": "0.5"}, 10), ({"groupSize": 3}, 10), ({}, 11)])
async def test_groups_that_do_not_fit_the_spec_any_more_are_drawn_anew(
    tmp_path: Path, changes: dict[str, Any], position: int
) -> None:
    journal = opened(tmp_path)
    await draw(journal, a_plan(tmp_path), Played(spread=[]))
    again = Played(spread=[])
    await draw(journal, a_plan(tmp_path, **changes), again, position)
    assert len(again.prompts) == 3


@pytest.mark.parametrize(("lag", "version", "drawn"), [(2, 3, 0), (1, 3, 3), (1, 4, 0), (0, 5, 0)])
async def test_groups_older_than_the_spec_now_allows_are_drawn_anew(
    tmp_path: Path, lag: int, version: int, drawn: int
) -> None:
    journal, patience = opened(tmp_path), Patience(print, lambda: True)
    again = Played(spread=[], version=5)
    for played, plan in (
        (Played(spread=[], version=version), a_plan(tmp_path, maxOffPolicySteps=2)),
        (again, a_plan(tmp_path, maxOffPolicySteps=lag)),
    ):
        drawer = Drawer(journal, lambda _, played=played: cast(Any, played), patience)  # type: ignore[misc]
        await drawer.draw(plan, 6, 10)
    assert len(again.prompts) == drawn


class Broken(Played):
    """An environment that fails every episode."""

    async def step(self, prompts: Sequence[Prompt], on_group: OnGroup) -> list[Group]:
        groups = await super().step(prompts, on_group)
        failed = [msgspec.structs.replace(groups[0].trajectories[0], error="Timeout: no answer")] * 2
        return [msgspec.structs.replace(group, trajectories=failed) for group in groups]


async def test_a_broken_environment_is_not_asked_for_more_groups(tmp_path: Path) -> None:
    played = Broken(spread=[])
    drawn = await draw(opened(tmp_path), a_plan(tmp_path, maxRefillPrompts=90), played)
    assert (len(played.prompts), drawn.position) == (3, 13)


class Slow:
    """Draws when it is told to."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.go = asyncio.Semaphore(0)
        self.error: Exception | None = None

    async def draw(self, plan: Plan, step: int, position: int) -> Drawn:
        self.begun.append(step)
        await self.go.acquire()
        if self.error is not None:
            raise self.error
        return Drawn(step, [], position + 3, 3, 3, 1.0, 0.0)

    async def settle(self) -> list[int]:
        for _ in range(20):
            await asyncio.sleep(0)
        return self.begun


@pytest.mark.parametrize("off_policy", [0, 1, 3])
async def test_no_step_is_begun_before_its_time(tmp_path: Path, off_policy: int) -> None:
    slow, plan = Slow(), a_plan(tmp_path, max_steps=9, maxOffPolicySteps=off_policy)
    ahead = Ahead(slow)
    for _ in range(100):
        slow.go.release()
    position = 0
    for step in range(1, 10):
        drawn = await ahead.take(plan, step, position)
        position = drawn.position
        assert (drawn.step, position) == (step, 3 * step)
        assert await slow.settle() == list(range(1, min(9, step + off_policy) + 1))
    await ahead.close()


async def test_a_step_is_drawn_while_another_is_trained_and_its_end_is_clean(tmp_path: Path) -> None:
    slow, plan = Slow(), a_plan(tmp_path, maxOffPolicySteps=1)
    ahead = Ahead(slow)
    slow.go.release()
    await ahead.take(plan, 1, 0)
    assert await slow.settle() == [1, 2]
    await ahead.close()
    slow.go.release()
    assert (await ahead.take(plan, 2, 3)).step == 2
    assert slow.begun[:3] == [1, 2, 2]
    await ahead.close()


async def test_a_changed_spec_begins_the_next_step_anew(tmp_path: Path) -> None:
    slow, plan = Slow(), a_plan(tmp_path, maxOffPolicySteps=2)
    ahead = Ahead(slow)
    for _ in range(9):
        slow.go.release()
    await ahead.take(plan, 1, 0)
    await slow.settle()
    changed = a_plan(tmp_path, promptsPerStep=2)
    assert (await ahead.take(changed, 2, 3)).step == 2
    assert await slow.settle() == [1, 2, 3, 2]
    await ahead.close()


async def test_what_drawing_raises_is_raised_when_the_step_is_taken(tmp_path: Path) -> None:
    slow, plan = Slow(), a_plan(tmp_path, maxOffPolicySteps=1)
    ahead = Ahead(slow)
    slow.go.release()
    await ahead.take(plan, 1, 0)
    slow.error = EngineError("broken")
    slow.go.release()
    await slow.settle()
    with pytest.raises(EngineError, match="broken"):
        await ahead.take(plan, 2, 3)


@pytest.mark.parametrize("change", [{"weight": 7}, {"checkpoint": {"keep": 9}}, {"stopWhen": None}])
async def test_what_does_not_decide_drawing_keeps_what_is_drawn_ahead(tmp_path: Path, change: dict[str, Any]) -> None:
    slow, plan = Slow(), a_plan(tmp_path, maxOffPolicySteps=2)
    ahead = Ahead(slow)
    for _ in range(9):
        slow.go.release()
    await ahead.take(plan, 1, 0)
    await slow.settle()
    spec = type(plan.spec).model_validate(plan.spec.to_api() | change)
    assert (await ahead.take(replace(plan, spec=spec), 2, 3)).step == 2
    assert await slow.settle() == [1, 2, 3, 4]
    await ahead.close()


async def test_nobody_waits_for_what_was_cancelled(tmp_path: Path) -> None:
    slow, plan = Slow(), a_plan(tmp_path, maxOffPolicySteps=1)
    ahead = Ahead(slow)
    taking = asyncio.create_task(ahead.take(plan, 1, 0))
    await slow.settle()
    slow.error = cast(Exception, asyncio.CancelledError())
    slow.go.release()
    with pytest.raises(EngineError, match="has ended"):
        await taking


async def test_who_ends_drawing_waits_for_what_is_being_written(tmp_path: Path) -> None:
    journal, begun, go = opened(tmp_path), threading.Event(), threading.Event()
    append = journal.append_group

    def slowly(step: int, group: Group) -> None:
        begun.set()
        assert go.wait(60)
        append(step, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "append_group", slowly)
        drawing = asyncio.create_task(draw(journal, a_plan(tmp_path), Played(spread=[])))
        await asyncio.to_thread(begun.wait, 60)
        drawing.cancel()
        await asyncio.sleep(0)
        go.set()
        await asyncio.wait([drawing])
    assert drawing.cancelled()
    assert sorted(journal.read_groups(1)) == [0]


def test_policy_lag_counts_from_the_newest_version() -> None:
    groups = [Group(index=i, example=i, version_step=v, prompt=[], trajectories=[]) for i, v in enumerate([3, 4, 5])]
    assert policy_lag(groups, 5) == {"policy_lag_mean": 1.0, "policy_lag_max": 2.0}
    assert policy_lag([], 5) == {}
