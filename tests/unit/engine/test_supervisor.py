"""Who may have a slot: by number, and by the versions that the sampler must hold for each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from clora_api.control import DesiredExperiment, Phase
from clora_engine.best import Best
from clora_engine.errors import CapacityError, UserError
from clora_engine.journal import Journal
from clora_engine.supervisor import Supervisor
from clora_engine.types import AdapterInfo, LoraConfig
from tests.unit.engine.loop import Life, LocalTrainer, desired


class NeverReady(LocalTrainer):
    """Prepares for ever, so that what is put holds its slot."""

    async def create(self, adapter: str, config: LoraConfig) -> AdapterInfo:
        await asyncio.Event().wait()
        raise AssertionError


class Stage:
    """A supervisor of an engine with room for three experiments, and six versions on its sampler."""

    def __init__(self, tmp_path: Path) -> None:
        services = Life(tmp_path, desired()).experiment._services
        config = replace(services.config, max_experiments=3)
        self.supervisor = Supervisor(config, 1, "test")
        self.supervisor.open(replace(services, config=config, trainer=cast(Any, NeverReady())))

    async def put(self, uid: str, off_policy: int) -> Phase:
        wanted = desired(algorithm={"maxOffPolicySteps": off_policy}).model_copy(update={"uid": uid})
        return (await self.supervisor.put(DesiredExperiment.model_validate(wanted.model_dump()))).phase


@pytest.fixture
async def stage(tmp_path: Path) -> Any:
    made = Stage(tmp_path)
    yield made
    await made.supervisor.stop(0.0)


async def test_as_many_experiments_as_their_versions_fit(stage: Stage) -> None:
    assert await stage.put("a", 1) is Phase.PREPARING  # 3 versions
    with pytest.raises(CapacityError, match="the sampler holds 6 versions, 3 of them for other experiments"):
        await stage.put("b", 2)  # 4
    assert await stage.put("b", 1) is Phase.PREPARING
    with pytest.raises(CapacityError):
        await stage.put("c", 0)


async def test_synchronous_experiments_fill_every_slot(stage: Stage) -> None:
    for uid in ("a", "b", "c"):
        assert await stage.put(uid, 0) is Phase.PREPARING
    with pytest.raises(CapacityError, match="all 3 slots"):
        await stage.put("d", 0)


async def test_what_can_never_fit_is_an_error_of_the_spec(stage: Stage) -> None:
    with pytest.raises(UserError) as caught:
        await stage.put("a", 5)
    assert caught.value.field == "algorithm.maxOffPolicySteps"


async def test_a_running_experiment_keeps_its_slot_when_it_asks_for_too_much(stage: Stage) -> None:
    await stage.put("a", 1)
    await stage.put("b", 1)
    with pytest.raises(UserError) as caught:
        await stage.put("a", 2)
    assert caught.value.field == "algorithm.maxOffPolicySteps"
    assert await stage.put("a", 0) is Phase.PREPARING
    assert await stage.put("b", 2) is Phase.PREPARING


async def test_the_list_of_checkpoints_marks_the_best(stage: Stage, tmp_path: Path) -> None:
    journal = Journal(tmp_path, "listed", 1)
    journal.claim("n", "e")
    for step in range(3):
        journal.step_folder(step)
        journal.commit(step, 0, 0.0, Best(step=min(step, 1), metric="evalAccuracy", value=0.5))
    assert [(item.step, item.best) for item in stage.supervisor.checkpoints("listed").items] == [
        (0, False),
        (1, True),
        (2, False),
    ]
