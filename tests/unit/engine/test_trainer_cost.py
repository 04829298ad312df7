"""trainer.slots: Auto, on machines whose passes take known times."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from clora_engine.trainer import Trainer
from clora_engine.trainer_cost import FEWEST_TOKENS, Choice, CostModel, _rows, choose
from clora_engine.trainer_pass import Request
from clora_engine.types import LoraConfig, Loss
from tests.numerics.tiny import tiny_trainer

SMALL_CALLS_PAY = CostModel(overhead=0.1, per_token=0.001, per_adapter=0.01)
SEGMENTS_COST = CostModel(overhead=0.02, per_token=0.001, per_adapter=0.05)


@dataclass
class Machine:
    """A trainer whose passes take, by this clock, what a cost model says; the passes themselves are real."""

    trainer: Trainer
    now: float = 0.0

    @classmethod
    def of(cls, model: CostModel) -> Machine:
        machine = cls(tiny_trainer(budget=2048))

        def take_time(_: object, __: object, arguments: dict[str, Tensor]) -> None:
            adapters = len(machine.trainer._base.current.segments)
            tokens = arguments["input_ids"].numel()
            machine.now += model.overhead + model.per_token * tokens + model.per_adapter * (adapters - 1)

        machine.trainer._base.decoder.register_forward_pre_hook(take_time, with_kwargs=True)
        return machine

    def clock(self) -> float:
        return self.now

    def seconds(self, choice: Choice, tokens: int) -> float:
        """For four calls of so many tokens that wait at the same time."""
        self.trainer.slots = 4
        requests = [Request(f"t{n}", _rows(tokens, n), Loss(name="CrossEntropy", denominator=1.0)) for n in range(4)]
        for request in requests:
            if request.adapter not in self.trainer.store:
                self.trainer.create(request.adapter, LoraConfig(rank=8, alpha=8))
        together = choice.slots > 1 and tokens < choice.join_below
        started = self.now
        for calls in [requests] if together else [[request] for request in requests]:
            assert not any(isinstance(one, Exception) for one in self.trainer.forward_backward_joined(calls))
        return self.now - started


def test_the_model_is_found_from_three_passes() -> None:
    model = SMALL_CALLS_PAY
    found = CostModel.fit((64, 256), (model.seconds(1, 64), model.seconds(1, 256)), 4, model.seconds(4, 64))
    for name in ("overhead", "per_token", "per_adapter"):
        assert getattr(found, name) == pytest.approx(getattr(model, name))
    # The threshold is where joining four saves 5 % of the joined pass, no sooner and no later.
    threshold = model.join_below(4)
    for tokens, pays in ((threshold - 1, True), (threshold + 2, False)):
        assert (4 * model.seconds(1, tokens) >= 1.05 * model.seconds(4, tokens)) == pays
    assert SEGMENTS_COST.join_below(4) == 0
    assert CostModel(overhead=1e-6, per_token=1.0, per_adapter=0.0).join_below(8) == 0, f"below {FEWEST_TOKENS} tokens"


FORCED_TOGETHER, FORCED_IN_TURN = Choice(4, 2048), Choice(1, 0)


@pytest.mark.parametrize(
    ("model", "tokens", "wrong"),
    [
        (SMALL_CALLS_PAY, 64, FORCED_IN_TURN),
        (SEGMENTS_COST, 64, FORCED_TOGETHER),
        (SEGMENTS_COST, 256, FORCED_TOGETHER),
    ],
)
def test_auto_is_faster_than_the_wrong_choice(
    model: CostModel, tokens: int, wrong: Choice, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine.of(model)
    with caplog.at_level(logging.INFO, "clora.trainer"):
        auto = choose(machine.trainer, 4, clock=machine.clock)
    assert (auto.slots > 1) == (model is SMALL_CALLS_PAY)
    assert "trainer.slots" in caplog.text
    assert machine.seconds(auto, tokens) < machine.seconds(wrong, tokens)


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        (SMALL_CALLS_PAY, r"4, joining calls below \d+ tokens"),
        (SEGMENTS_COST, r"1, for a pass's overhead of 0\.020 s is too little to share"),
    ],
)
def test_predicted_and_measured_seconds_are_logged_whichever_is_chosen(
    model: CostModel, chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine.of(model)
    with caplog.at_level(logging.INFO, "clora.trainer"):
        auto = choose(machine.trainer, 4, clock=machine.clock)
    assert auto.join_below == pytest.approx(model.join_below(4), abs=2)
    size = 64
    together, in_turn = f"{model.seconds(4, size):.3f}", f"{4 * model.seconds(1, size):.3f}"
    assert re.search(
        rf"trainer\.slots: {chosen}; 4 calls of {size} tokens: predicted {together} s together and {in_turn} s in turn,"
        rf" measured {together} s together",
        caplog.text,
    )


def test_nothing_of_the_measurement_remains() -> None:
    machine = Machine.of(SMALL_CALLS_PAY)
    choose(machine.trainer, 4, clock=machine.clock)
    assert machine.trainer.store.host_bytes == 0
    assert machine.trainer.slots == 1
    assert not any(buffer.any() for slot in machine.trainer.store._slots for buffer in slot.buffers.values())


@pytest.mark.parametrize("settings", [{"budget": 64}, {"budget": 2048, "most": 1}])
def test_where_there_is_nothing_to_join_nothing_is_measured(settings: dict[str, Any]) -> None:
    most = settings.pop("most", 4)
    assert choose(tiny_trainer(**settings), most) == Choice(1, 0)
