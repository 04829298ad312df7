"""What an experiment tells the engine's parts while it runs. Its whole life: integration/test_engine_life.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from clora_api.control import DesiredExperiment
from clora_engine.config import EngineConfig
from clora_engine.experiment import Experiment
from clora_engine.plan import Plan
from clora_engine.progress import Progress
from clora_engine.training import Services
from clora_engine.work_left import WorkLeft
from tests.engine_fixtures import rl_spec


class Queue:
    """The sampler's gate, or the trainer's queue: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []
        self.removed: list[str] = []

    def register(self, uid: str, weight: int, remaining: int) -> None:
        self.told.append((uid, weight, remaining))

    def remove(self, uid: str) -> None:
        self.removed.append(uid)


def left(sampler: Queue, trainer: Queue, folder: Path) -> Services:
    config = EngineConfig(model="tiny", storage=folder, token_file=folder / "token")
    return Services(config, cast(Any, trainer), cast(Any, sampler), None)


def desired(**changes: Any) -> DesiredExperiment:
    body = {"uid": "u", "namespace": "n", "name": "e", "spec": rl_spec(**changes)}
    return DesiredExperiment.model_validate(body)


def test_a_new_weight_is_told_to_both_queues_at_once_and_only_when_it_changes(tmp_path: Path) -> None:
    gate, queue = Queue(), Queue()
    experiment = Experiment(desired(), left(gate, queue, tmp_path), 1, lambda: None)
    experiment.update(desired(weight=300))
    assert gate.told == queue.told == []  # nobody knows of it yet
    plan = cast(Plan, SimpleNamespace(remaining_tokens=lambda step, per_step: 1000, samples=True))
    experiment._tell_work_left(plan)
    experiment.update(desired(weight=1))
    experiment.update(desired(weight=1, maxSteps=9))
    assert gate.told == queue.told == [("u", 300, 1000), ("u", 1, 1000)]


def test_one_number_tells_both_queues_and_who_never_samples_takes_no_seats(tmp_path: Path) -> None:
    gate, queue = Queue(), Queue()
    work = WorkLeft(left(gate, queue, tmp_path), "u")
    plan = SimpleNamespace(remaining_tokens=lambda step, per_step: round((10 - step) * per_step), samples=True)
    progress = Progress(step=4, step_tokens=50.0)
    work.tell(cast(Plan, plan), progress, 100)
    assert gate.told == queue.told == [("u", 100, 300)]
    plan.samples = False
    progress.step = 5
    work.tell(cast(Plan, plan), progress, 100)
    assert (gate.told[1:], queue.told[1:]) == ([], [("u", 100, 250)])
    work.leave_trainer()
    work.reweigh(7)
    assert (queue.removed, len(gate.told), len(queue.told)) == (["u"], 1, 2)
