"""The life of experiments: attach, progress, end; queue, suspend, delete; retries; starting from another experiment."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from clora_api.control import DesiredExperiment
from clora_api.v1alpha1.experiment import ExperimentSpec
from tests.integration.operator_fixtures import TOKEN, Stage, condition, stage, status, wait_for

pytestmark = pytest.mark.integration
__all__ = ["stage"]

SLOW = {"stepSeconds": "0.3"}
ENDLESS = 100_000


def test_from_apply_to_succeeded(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=6, arguments=SLOW)
    attached = cluster.wait_reason("one", "Attached", "EngineConfirmed")
    assert condition(attached, "Attached")["status"] == "True"
    assert attached["metadata"]["finalizers"] == ["clora.dev/release"]
    assert status(attached)["engine"]["name"] == "main"
    assert status(attached)["engine"]["epoch"] == 1
    moving = cluster.wait("one", lambda o: status(o).get("progress", {}).get("step", 0) >= 2, "two steps")
    assert status(moving)["progress"]["maxSteps"] == 6
    assert status(moving)["progress"]["metrics"]["tokensPerSecond"]
    done = cluster.wait_state("one", "Succeeded")
    assert status(done)["progress"]["step"] == 6
    assert status(done)["progress"]["percent"] == 100
    assert status(done)["checkpoint"]["step"] == 6
    assert condition(done, "Attached")["reason"] == "Detached"
    assert status(done)["completionTime"] >= status(done)["startTime"]
    assert len(engine.events("attach", uid)) == 1
    cluster.wait_events("one", "EngineConfirmed", "Completed")


def test_a_finished_experiment_never_runs_again(stage: Stage) -> None:
    """Neither a changed spec nor an engine that has forgotten it makes it run."""
    engine = stage.start_engine()
    operator = stage.start_operator()
    uid = stage.cluster.experiment("one")
    done = stage.cluster.wait_state("one", "Succeeded")
    engine.kill()
    engine.start()
    stage.cluster.patch("one", {"spec": {"maxSteps": 10}})
    operator.kill()
    operator.start()
    other = stage.cluster.experiment("two")
    stage.cluster.wait_state("two", "Succeeded")  # the operator has worked since
    assert len(engine.events("attach", uid)) == 1
    assert len(engine.events("attach", other)) == 1
    assert status(stage.cluster.get("one"))["completionTime"] == status(done)["completionTime"]


def test_the_queue_of_a_full_engine(stage: Stage) -> None:
    engine = stage.start_engine(max_experiments=1)
    stage.start_operator()
    cluster = stage.cluster
    first = cluster.experiment("a-first", max_steps=ENDLESS, arguments=SLOW)
    cluster.wait_state("a-first", "Running")
    second = cluster.experiment("b-second", max_steps=2)
    queued = cluster.wait_state("b-second", "Queued")
    assert status(queued)["queuePosition"] == 1
    assert "full" in condition(queued, "Attached")["message"]
    third = cluster.experiment("c-third", max_steps=2)
    assert status(cluster.wait_state("c-third", "Queued"))["queuePosition"] == 2
    cluster.delete("a-first")
    cluster.wait_gone("a-first")
    done = cluster.wait_state("b-second", "Succeeded")
    assert "queuePosition" not in status(done)
    cluster.wait_state("c-third", "Succeeded")
    assert engine.events("leave", first)
    assert [len(engine.events("attach", uid)) for uid in (first, second, third)] == [1, 1, 1]


def test_the_engine_has_the_last_word_on_room(stage: Stage) -> None:
    """A slot that somebody else took: 409, Queued, and taken when it is free."""
    engine = stage.start_engine(max_experiments=1)
    spec = ExperimentSpec.model_validate(
        {
            "engineRef": {"name": "main"},
            "environment": {"name": "WordProblems", "arguments": SLOW},
            "data": {"builtin": "Generated"},
            "maxSteps": ENDLESS,
        }
    )
    stranger = DesiredExperiment(uid="stranger", namespace="elsewhere", name="stranger", spec=spec)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = f"{engine.endpoint}/v1/experiments/stranger"
    body = stranger.model_dump(mode="json", by_alias=True, exclude_none=True)
    httpx.put(url, json=body, headers=headers, trust_env=False).raise_for_status()
    stage.start_operator()
    stage.cluster.experiment("one")
    stage.cluster.wait_state("one", "Queued")
    httpx.delete(url, headers=headers, trust_env=False).raise_for_status()
    stage.cluster.wait_state("one", "Succeeded")


def test_suspend_and_resume(stage: Stage) -> None:
    engine = stage.start_engine(max_experiments=1)
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=8, arguments=SLOW)
    cluster.wait("one", lambda o: status(o).get("progress", {}).get("step", 0) >= 1, "a step")
    cluster.patch("one", {"spec": {"suspend": True}})
    held = cluster.wait("one", lambda o: condition(o, "Attached").get("reason") == "Suspended", "the suspension")
    assert condition(held, "Attached")["status"] == "False"
    cluster.experiment("two")  # the slot is free for others
    cluster.wait_state("two", "Succeeded")
    step = engine.get(f"/v1/experiments/{uid}")["progress"]["step"]
    cluster.patch("one", {"spec": {"suspend": False}})
    done = cluster.wait_state("one", "Succeeded")
    assert status(done)["progress"]["step"] == 8
    attaches = engine.events("attach", uid)
    assert len(attaches) == 2
    assert attaches[1]["step"] == step  # it went on where it was


def test_suspended_from_the_start_touches_no_engine(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    uid = stage.cluster.experiment("one", suspend=True)
    stage.cluster.wait_state("one", "Suspended")
    assert uid not in engine.uids()


def test_a_changed_spec_reaches_the_engine_without_a_detachment(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW)
    before = cluster.wait_state("one", "Running")
    cluster.patch("one", {"spec": {"maxSteps": 4}})
    done = cluster.wait_state("one", "Succeeded")
    assert len(engine.events("attach", uid)) == 1
    assert status(done)["progress"]["step"] >= 4
    assert status(done)["startTime"] == status(before)["startTime"]


@pytest.mark.parametrize("policy", ["Retain", "Delete"])
def test_deletion_asks_the_engine_first(stage: Stage, policy: str) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    uid = stage.cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW, deletionPolicy=policy)
    stage.cluster.wait_state("one", "Running")
    stage.cluster.delete("one")
    stage.cluster.wait_gone("one")
    assert uid not in engine.uids()
    assert engine.has_files(uid) == (policy == "Retain")


def test_a_retryable_failure_is_tried_again(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    arguments = {"failAtStep": "2", "failures": "2"}
    uid = stage.cluster.experiment("one", max_steps=4, arguments=arguments)
    done = stage.cluster.wait_state("one", "Succeeded")
    assert status(done)["restarts"] == 2
    assert [event["step"] for event in engine.events("attach", uid)] == [0, 1, 1]


def test_backoff_limit(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    uid = stage.cluster.experiment("one", arguments={"failAtStep": "2"}, backoffLimit=1)
    failed = stage.cluster.wait_state("one", "Failed")
    assert condition(failed, "Failed")["reason"] == "BackoffLimitExceeded"
    assert "step 2 went wrong" in condition(failed, "Failed")["message"]
    assert len(engine.events("attach", uid)) == 2


def test_a_failure_of_the_users_own_is_final_at_once(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    arguments = {"failAtStep": "2", "retryable": "false", "reason": "InvalidData"}
    uid = stage.cluster.experiment("one", arguments=arguments)
    failed = stage.cluster.wait_state("one", "Failed")
    assert condition(failed, "Failed")["reason"] == "InvalidData"
    assert len(engine.events("attach", uid)) == 1


def test_active_deadline(stage: Stage) -> None:
    engine = stage.start_engine(max_experiments=1)
    stage.start_operator()
    uid = stage.cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW, activeDeadlineSeconds=2)
    failed = stage.cluster.wait_state("one", "Failed")
    assert condition(failed, "Failed")["reason"] == "DeadlineExceeded"
    wait_for(lambda: len(engine.events("leave", uid)) == 1, "the engine to stop it")
    stage.cluster.experiment("two")
    stage.cluster.wait_state("two", "Succeeded")


def test_init_from_waits_and_then_starts_from_the_last_step(stage: Stage) -> None:
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    start = {"experiment": {"name": "warm-up"}}
    uid = cluster.experiment("one", initFrom=start)
    waiting = cluster.wait_reason("one", "Accepted", "InitFromNotFound")
    assert "warm-up" in condition(waiting, "Accepted")["message"]
    source = cluster.experiment("warm-up", max_steps=5, arguments=SLOW)
    waiting = cluster.wait_reason("one", "Attached", "WaitingForInit")
    assert condition(waiting, "Accepted")["status"] == "True"
    assert uid not in engine.uids()
    cluster.wait_state("warm-up", "Succeeded")
    done = cluster.wait_state("one", "Succeeded")
    assert status(done)["initFrom"] == {"uid": source, "step": 5}


def test_init_from_a_failed_experiment(stage: Stage) -> None:
    stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    cluster.experiment("warm-up", arguments={"failAtStep": "2", "retryable": "false"})
    cluster.wait_state("warm-up", "Failed")
    cluster.experiment("one", initFrom={"experiment": {"name": "warm-up"}})
    cluster.wait_reason("one", "Accepted", "InitFromFailed")
    cluster.experiment("two", initFrom={"experiment": {"name": "warm-up", "step": 1}})  # which it had reached
    cluster.wait_state("two", "Succeeded")


def test_an_engine_chosen_by_labels(stage: Stage) -> None:
    full = stage.start_engine("full", max_experiments=1)
    stage.start_operator()
    cluster = stage.cluster
    selector: dict[str, Any] = {"engineRef": None, "engineSelector": {"matchLabels": {"pool": "tests"}}}
    cluster.experiment("one", max_steps=ENDLESS, arguments=SLOW, **selector)
    cluster.wait_state("one", "Running")
    free = stage.start_engine("free", max_experiments=1)
    uid = cluster.experiment("two", **selector)
    done = cluster.wait_state("two", "Succeeded")
    assert status(done)["engine"]["name"] == "free"
    assert uid in free.uids()
    assert uid not in full.uids()


def test_labels_choose_an_engine_that_has_what_it_needs(stage: Stage) -> None:
    small = stage.start_engine("a-small", max_off_policy_steps=1)
    stage.start_operator()
    cluster = stage.cluster
    selector: dict[str, Any] = {"engineRef": None, "engineSelector": {"matchLabels": {"pool": "tests"}}}
    uid = cluster.experiment("one", algorithm={"maxOffPolicySteps": 2}, **selector)
    refused = condition(cluster.wait_reason("one", "Accepted", "DoesNotFit"), "Accepted")
    lacks = "spec.algorithm.maxOffPolicySteps 2 is above its maxOffPolicySteps 1"
    assert refused["message"].endswith(f"LoRAEngine a-small: {lacks}")
    stage.start_engine("b-large", max_experiments=1, max_off_policy_steps=2)
    done = cluster.wait_state("one", "Succeeded")
    assert status(done)["engine"]["name"] == "b-large"
    assert not small.events("attach", uid)
