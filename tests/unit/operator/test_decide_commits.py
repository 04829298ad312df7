"""Placement and decision in turn, for one of a high priority whose commits its engine's storage lacks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from clora_api import FINALIZER
from clora_api.control import Problem, spec_digest
from clora_api.v1alpha1.conditions import Reason
from clora_operator.cache import Cache
from clora_operator.decide import decide_experiment
from clora_operator.observe import Answer, Memory
from clora_operator.observer import claims
from clora_operator.placement import place
from clora_operator.plan import Plan, PutOnEngine
from clora_operator.priorities import Priority, PriorityClasses
from clora_operator.resources import Key
from tests.unit.operator.factories import (
    NOW,
    SETTINGS,
    UID,
    ago,
    claimed,
    desired,
    experiment,
    metadata,
    namespaces,
    observed,
    priority_classes,
    report,
    running,
    spec,
    view,
)
from tests.unit.operator.test_observe import links_with
from tests.unit.operator.test_placement import room

MISSING = Problem(
    type="https://clora.dev/problems/conflict",
    title="t",
    status=409,
    detail="the storage has no step 7",
    reason="CheckpointUnreachable",
)
LOW = replace(experiment(status=running()), meta=replace(experiment().meta, uid="low", name="low"))


@dataclass
class Cluster:
    """An engine of one slot, `low`, which is there, and one of a higher priority."""

    classes: PriorityClasses
    memory: Memory = field(default_factory=Memory)
    status: dict[str, Any] = field(default_factory=lambda: claimed(checkpoint={"step": 7, "path": "p", "digest": "d"}))
    low: bool = True
    held: bool = True  # by low
    turns: int = 0

    def turn(self) -> tuple[Reason | None, Plan]:
        """Every ten seconds: a placement, what is decided then, and that the engine refuses what it is asked. Why low
        has not got the slot, and the plan for the other."""
        self.turns += 1
        now, cache = NOW + timedelta(seconds=10 * self.turns), Cache()
        meta = metadata("one", UID, finalizers=[FINALIZER])
        cache.put("experiment", {"metadata": meta, "spec": spec(priorityClassName="high"), "status": self.status})
        if self.low:
            cache.put("experiment", {"metadata": metadata("low", "low"), "spec": spec(), "status": LOW.raw_status})
        seen = view(*([report(LOW)] if self.held else []))
        memories = {UID: self.memory, "low": Memory(wants_slot=True)}
        found = place([room(capacity=1)], claims(cache, links_with(seen), memories, self.classes, namespaces()))
        self.held = self.low and found["low"].admitted
        of = cache.experiment(Key("experiment", "team", "one"))
        assert of is not None
        plan = decide_experiment(
            observed(of, view=seen, assignment=found[UID], memory=self.memory, priority=Priority(1000)), now, SETTINGS
        )
        self.memory = replace(self.memory, wants_slot=plan.wants_slot)
        for action in plan.actions:
            assert isinstance(action, PutOnEngine)
            self.memory = replace(self.memory, answer=Answer(spec_digest(action.desired), now, problem=MISSING))
        self.status = dict(plan.status or self.status)
        return found["low"].reason if self.low else None, plan


@pytest.fixture
async def cluster() -> Cluster:
    classes = priority_classes(body={"value": 1000})
    await classes.read("high")
    return Cluster(classes)


def turns(cluster: Cluster, count: int) -> tuple[int, int]:
    """How often low had to leave, and how often the engine was asked."""
    made = [cluster.turn() for _ in range(count)]
    return sum(reason is Reason.PREEMPTED for reason, _ in made), sum(bool(plan.actions) for _, plan in made)


def test_nobody_makes_room_twice_for_what_cannot_start(cluster: Cluster) -> None:
    assert turns(cluster, 40) == (1, 1)
    cluster.memory = Memory()  # the operator starts anew
    assert turns(cluster, 40) == (0, 0)
    _, plan = cluster.turn()
    waits = experiment(status=cluster.status).status
    assert plan.wants_slot
    (attached,) = [c for c in waits.conditions if c.type == "Attached"]
    assert (attached.status, attached.reason) == ("False", "CheckpointUnreachable")
    assert "place 1 in its queue" in attached.message
    assert waits.queue_position == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_a_slot_that_comes_free_is_used_to_ask_again(cluster: Cluster, restarted: bool) -> None:
    turns(cluster, 40)
    cluster.memory = Memory() if restarted else cluster.memory
    cluster.low = cluster.held = False
    _, asked = turns(cluster, 40)
    assert 10 <= asked <= 14  # every half minute


@pytest.mark.parametrize(("epoch", "again"), [(1, False), (2, True)])
def test_a_restarted_engine_is_asked_at_once(epoch: int, again: bool) -> None:
    """It may have been given its volume, or its model, again."""
    of = experiment(status=claimed(checkpoint={"step": 7, "path": "p", "digest": "d"}))
    refused = Answer(spec_digest(desired(of)), ago(10), problem=MISSING, epoch=1)
    seen = view(epoch=epoch)
    plan = decide_experiment(observed(of, view=seen, memory=Memory(wants_slot=True, answer=refused)), NOW, SETTINGS)
    assert [type(action) for action in plan.actions] == [PutOnEngine] * again
