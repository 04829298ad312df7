"""What a priorityClassName comes to."""

from __future__ import annotations

from typing import Any

import pytest

from clora_api.v1alpha1.conditions import Reason
from clora_operator.decide import decide_experiment
from clora_operator.kube import KubeError
from clora_operator.priorities import priority_of
from tests.unit.operator.factories import NOW, SETTINGS, experiment, observed, priority_classes, said


@pytest.mark.parametrize(
    ("body", "value", "preempts"),
    [
        ({"value": 1000}, 1000, True),
        ({"value": -5, "preemptionPolicy": "PreemptLowerPriority"}, -5, True),
        ({"value": 7, "preemptionPolicy": "Never"}, 7, False),
        ({"value": 7, "globalDefault": True}, 7, True),
    ],
)
def test_a_class(body: dict[str, Any], value: int, preempts: bool) -> None:
    found = priority_of("x", body)
    assert (found.value, found.preempts, found.reason) == (value, preempts, None)


@pytest.mark.parametrize(
    ("classes", "reason", "words"),
    [
        (priority_classes(body=None), Reason.PRIORITY_CLASS_NOT_FOUND, "there is no PriorityClass high: create it"),
        (priority_classes(status=403), Reason.PRIORITY_CLASS_UNREADABLE, "get on priorityclasses.scheduling.k8s.io"),
    ],
)
async def test_what_is_missing_is_said_with_its_remedy(classes: Any, reason: Reason, words: str) -> None:
    found = await classes.read("high")
    assert (found.value, found.reason) == (0, reason)
    assert found.problem.startswith("spec.priorityClassName: ")
    assert words in found.problem


@pytest.mark.parametrize(("value", "reserved"), [(1_000_000_000, False), (1_000_000_001, True), (2_000_001_000, True)])
def test_kubernetes_own_classes_are_not_for_experiments(value: int, reserved: bool) -> None:
    """Of the CRD's rules one says so of names; here it is said of values, which count."""
    found = priority_of("system-node-critical", {"value": value})
    if not reserved:
        assert (found.value, found.reason) == (value, None)
        return
    assert (found.value, found.reason) == (0, Reason.PRIORITY_CLASS_NOT_ALLOWED)
    assert found.problem.startswith("spec.priorityClassName: system-node-critical ")
    plan = decide_experiment(observed(experiment(), priority=found), NOW, SETTINGS)
    assert said(plan, "Accepted") == ("False", "PriorityClassNotAllowed")
    assert (plan.actions, plan.wants_slot) == ((), False)
    assert [event.reason for event in plan.events] == ["PriorityClassNotAllowed"], "told once"


async def test_a_server_that_does_not_answer_settles_nothing() -> None:
    classes = priority_classes(status=500)
    with pytest.raises(KubeError):
        await classes.read("high")
    await classes.refresh(["high"])
    assert classes.known("high") is None


async def test_a_resync_finds_classes_that_came_and_forgets_those_that_nobody_names() -> None:
    body: dict[str, Any] = {"value": 1}
    classes = priority_classes(body=body)
    await classes.read("a")
    await classes.read("b")
    body["value"] = 2
    assert (await classes.read("a")).value == 1
    await classes.refresh(["a"])
    known = classes.known("a")
    assert known is not None
    assert known.value == 2
    assert classes.known("b") is None
