"""Who may have a slot: by number alone, whatever its spec."""

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
    """A supervisor of an engine with room for three experiments."""

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


async def test_every_slot_is_as_good_as_another_however_far_off_policy(stage: Stage) -> None:
    for uid, off_policy in (("a", 2), ("b", 0), ("c", 2)):
        assert await stage.put(uid, off_policy) is Phase.PREPARING
    with pytest.raises(CapacityError, match="all 3 slots"):
        await stage.put("d", 0)
    assert await stage.put("b", 2) is Phase.PREPARING


async def test_beyond_the_engines_limit_is_an_error_of_the_spec(stage: Stage) -> None:
    with pytest.raises(UserError, match=r"above this engine's capacity\.maxOffPolicySteps 2") as caught:
        await stage.put("a", 3)
    assert caught.value.field == "algorithm.maxOffPolicySteps"


async def test_a_running_experiment_that_asks_for_too_much_goes_on_as_it_was(stage: Stage) -> None:
    await stage.put("a", 1)
    with pytest.raises(UserError) as caught:
        await stage.put("a", 3)
    assert caught.value.field == "algorithm.maxOffPolicySteps"
    assert stage.supervisor.report("a").phase is Phase.PREPARING
    assert await stage.put("a", 0) is Phase.PREPARING


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
