"""What an experiment tells the engine's parts while it runs. Its whole life: integration/test_engine_life.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from clora_api.control import DesiredExperiment
from clora_engine.config import EngineConfig
from clora_engine.experiment import Experiment
from clora_engine.training import Services
from tests.engine_fixtures import rl_spec


class Gate:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def register(self, uid: str, weight: int, remaining: int) -> None:
        self.told.append((uid, weight, remaining))


def desired(**changes: Any) -> DesiredExperiment:
    body = {"uid": "u", "namespace": "n", "name": "e", "spec": rl_spec(**changes)}
    return DesiredExperiment.model_validate(body)


def test_a_new_weight_is_told_to_the_gate_at_once_and_only_when_it_changes(tmp_path: Path) -> None:
    gate = Gate()
    config = EngineConfig(model="tiny", storage=tmp_path, token_file=tmp_path / "token")
    services = Services(config, cast(Any, None), cast(Any, gate), None)
    experiment = Experiment(desired(), services, 1, lambda: None)
    experiment.update(desired(weight=300))
    assert gate.told == []  # it is not at the gate yet
    experiment._remaining = 1000
    experiment.update(desired(weight=1))
    experiment.update(desired(weight=1, maxSteps=9))
    assert gate.told == [("u", 1, 1000)]
