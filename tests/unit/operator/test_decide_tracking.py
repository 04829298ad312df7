"""An experiment's trackers: their keys from Secrets of its namespace, what the engine is told, what is said."""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import Any

import pytest

from clora_api.control import DesiredExperiment, Phase, ReportedTracker, spec_digest
from clora_operator.cache import Cache
from clora_operator.decide import decide_experiment
from clora_operator.desired import keys_digest, token_digest
from clora_operator.observe import Answer, Memory, ObservedExperiment
from clora_operator.observer import Observer
from clora_operator.plan import Plan, PutOnEngine
from clora_operator.resources import Experiment
from clora_operator.tracking_keys import TrackingKeys, needs_keys, read_keys
from tests.unit.operator.factories import (
    NOW,
    SETTINGS,
    ago,
    condition,
    experiment,
    message,
    observed,
    priority_classes,
    report,
    running,
    said,
    view,
)

KEY = "a-key-of-a-tenant-0123456789"
WANDB = {"kind": "WandB", "project": "p", "secretRef": {"name": "wandb", "key": "key"}}
OFFLINE = {"kind": "MLflow", "project": "p", "mode": "Offline"}


def tracked(*trackers: dict[str, Any], status: dict[str, Any] | None = None) -> Experiment:
    return experiment(status=running() if status is None else status, tracking=list(trackers))


def secret(value: bytes = KEY.encode(), key: str = "key", label: str | None = "true") -> dict[str, Any]:
    labels = {} if label is None else {"clora.dev/tracking": label}
    return {"metadata": {"labels": labels}, "data": {key: base64.b64encode(value).decode()}}


def keys_of(of: Experiment, found: dict[str, Any] | None) -> TrackingKeys:
    return read_keys(needs_keys(of), lambda name: found, NOW)


def look(of: Experiment, found: dict[str, Any] | None = None, **fields: Any) -> ObservedExperiment:
    keys = keys_of(of, found) if needs_keys(of) else None
    return observed(of, **({"tracking_keys": keys} | fields))


def decide(of: Experiment, found: dict[str, Any] | None = None, **fields: Any) -> Plan:
    return decide_experiment(look(of, found, **fields), NOW, SETTINGS)


# ------------------------------------------------------------------------------------------------ the key


@pytest.mark.parametrize("value", [KEY.encode(), KEY.encode() + b"\n"])
def test_a_labelled_secret_gives_its_key(value: bytes) -> None:
    found = keys_of(tracked(WANDB, OFFLINE), secret(value))
    assert dict(found.keys) == {"WandB": KEY}
    assert found.missing == ""
    assert KEY not in repr(found)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "there is no Secret wandb in its namespace"),
        (secret(label=None), "kubectl label secret wandb clora.dev/tracking=true"),
        (secret(label="false"), "kubectl label secret wandb clora.dev/tracking=true"),
        ({"metadata": {}}, "kubectl label secret wandb clora.dev/tracking=true"),
        (secret(key="other"), "Secret wandb has no key key"),
        (secret(b""), "Secret wandb has no key key"),
        (secret(b" \n"), "holds no API key"),
        (secret(b"two\nlines"), "holds no API key"),
        (secret(b"\xff"), "holds no API key"),
        (secret(b"a" * 5000), "holds no API key"),
    ],
)
def test_others_do_not_and_the_remedy_is_said(found: dict[str, Any] | None, words: str) -> None:
    of = tracked(WANDB)
    assert words in keys_of(of, found).missing
    plan = decide(of, found, view=view(report(of)))
    assert said(plan, "Tracked") == ("False", "TrackingSecretUnusable")
    assert words in message(plan, "Tracked")
    assert said(plan, "Progressing") == ("True", "Running")  # training goes on
    assert plan.requeue_after is not None
    assert plan.requeue_after <= 30
    assert [event.type for event in plan.events if event.reason == "TrackingSecretUnusable"] == ["Warning"]


async def test_the_secret_is_read_now_and_then_and_only_for_who_may_run() -> None:
    reads = []
    now = NOW

    class Secrets:
        def secret(self, namespace: str, name: str) -> dict[str, Any] | None:
            reads.append((namespace, name))
            return secret()

    observer = Observer(Secrets(), Cache(), None, priority_classes(), lambda: now)  # type: ignore[arg-type]
    of = tracked(WANDB)
    found = await observer._tracking_keys(of, Memory())
    assert found is not None
    assert await observer._tracking_keys(of, Memory(tracking_keys=found)) is found
    other = tracked(WANDB | {"secretRef": {"name": "other", "key": "key"}})
    await observer._tracking_keys(other, Memory(tracking_keys=found))
    now = NOW + timedelta(seconds=31)
    await observer._tracking_keys(of, Memory(tracking_keys=found))
    assert reads == [("team", "wandb"), ("team", "other"), ("team", "wandb")]
    ended = tracked(WANDB, status=running() | {"conditions": [condition("Succeeded", "True", "Completed")]})
    for nobody in (tracked(), tracked(OFFLINE), ended):
        assert await observer._tracking_keys(nobody, Memory()) is None


# ------------------------------------------------------------------------------------------------ the engine


def test_the_engine_is_told_the_key_once_and_again_when_it_is_another() -> None:
    of = tracked(WANDB)
    (put,) = decide(of, secret(), view=view(report(of))).actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.tracking_keys == {"WandB": KEY}
    assert KEY not in repr(put)
    assert DesiredExperiment.model_validate(put.desired.to_api()) == put.desired
    told = Memory(wants_slot=True, answer=Answer(spec_digest(put.desired), ago(1), keys=keys_digest(put.desired)))
    assert decide(of, secret(), view=view(report(of)), memory=told).actions == ()
    (again,) = decide(of, secret(b"another-key"), view=view(report(of)), memory=told).actions
    assert isinstance(again, PutOnEngine)
    assert again.desired.tracking_keys == {"WandB": "another-key"}
    (without,) = decide(of, None, view=view(report(of)), memory=told).actions
    assert isinstance(without, PutOnEngine)
    assert without.desired.tracking_keys == {}
    failed = Memory(wants_slot=True, answer=Answer(spec_digest(put.desired), ago(9), error="no answer"))
    assert decide(of, secret(), view=view(report(of)), memory=failed).actions == (put,)


def test_secrets_are_no_part_of_a_digest() -> None:
    of = tracked(WANDB)
    (put,) = decide(of, secret(), view=view()).actions
    assert isinstance(put, PutOnEngine)
    bare = put.desired.model_copy(update={"tracking_keys": None})
    assert spec_digest(bare) == spec_digest(put.desired)
    assert keys_digest(bare) == token_digest(put.desired) == ""
    assert KEY not in keys_digest(put.desired) != ""


def test_an_experiment_without_trackers_is_told_as_ever() -> None:
    of = experiment(status=running())
    (put,) = decide(of, view=view()).actions
    assert isinstance(put, PutOnEngine)
    assert "tracking" not in put.desired.to_api()["spec"]
    assert "trackingKeys" not in put.desired.to_api()


# ------------------------------------------------------------------------------------------------ what is said


def test_what_its_trackers_do_is_said() -> None:
    of = tracked(WANDB, OFFLINE)
    good = [ReportedTracker(kind="WandB", step=3), ReportedTracker(kind="MLflow", step=3)]
    plan = decide(of, secret(), view=view(report(of, tracking=good)))
    assert said(plan, "Tracked") == ("True", "Tracking")
    assert message(plan, "Tracked") == "WandB (Online), MLflow (Offline) get the metrics of every commit"
    bad = [good[0].model_copy(update={"problem": "no answer"}), good[1]]
    plan = decide(of, secret(), view=view(report(of, tracking=bad)))
    assert said(plan, "Tracked") == ("False", "TrackingFailed")
    assert message(plan, "Tracked") == "WandB: no answer"
    assert said(plan, "Progressing") == ("True", "Running")


@pytest.mark.parametrize("reported", [[], [ReportedTracker(kind="MLflow")]])
def test_before_it_has_begun_nothing_is_said(reported: list[ReportedTracker]) -> None:
    of = tracked(OFFLINE)
    plan = decide(of, view=view(report(of, tracking=reported)))
    assert plan.status is None or "Tracked" not in [c["type"] for c in plan.status["conditions"]]


def test_of_one_that_is_tracked_no_more_it_is_said() -> None:
    before = running()
    before["conditions"] = [*before["conditions"], condition("Tracked", "True", "Tracking")]
    plan = decide(experiment(status=before), view=view(report(experiment())))
    assert said(plan, "Tracked") == ("False", "NotTracked")


def test_the_end_says_how_it_was_tracked() -> None:
    of = tracked(OFFLINE)
    over = report(of, Phase.SUCCEEDED, tracking=[ReportedTracker(kind="MLflow", step=10)])
    plan = decide(of, view=view(over))
    assert said(plan, "Succeeded") == ("True", "Completed")
    assert said(plan, "Tracked") == ("True", "Tracking")
