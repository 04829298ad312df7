"""decide_experiment, as tables: what is observed -> what is done and said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clora_api.control import InitSource, Phase, Problem, ReportedBest, RunMode, spec_digest
from clora_api.v1alpha1.conditions import Reason
from clora_operator.claims import Assignment
from clora_operator.decide import decide_experiment
from clora_operator.observe import Answer, Init, Memory
from clora_operator.plan import AddFinalizer, DeleteOnEngine, PutOnEngine, RemoveFinalizer
from clora_operator.resources import to_rfc3339
from tests.unit.operator.factories import (
    ADMITTED,
    NOW,
    SETTINGS,
    ago,
    as_stored,
    claimed,
    condition,
    desired,
    experiment,
    message,
    observed,
    report,
    running,
    said,
    view,
)


def decide(*arguments: Any, **fields: Any) -> Any:
    return decide_experiment(observed(*arguments, **fields), NOW, SETTINGS)


# ---------------------------------------------------------------------------------------- the way up


def test_the_finalizer_comes_before_everything() -> None:
    bare = experiment()
    bare = replace(bare, meta=replace(bare.meta, finalizers=("somebody.else/s",)))
    plan = decide(bare)
    assert plan.actions == (AddFinalizer(),)
    assert plan.status is None


def test_nothing_is_said_before_placement() -> None:
    assert decide(experiment(), assignment=None).status is None
    plan = decide(experiment(), assignment=Assignment("main"), memory=Memory())
    assert plan.wants_slot
    assert plan.status is None


def test_the_engine_is_written_down_before_it_is_told() -> None:
    fresh = experiment()
    first = decide(fresh)
    assert first.actions == ()
    assert first.status is not None
    assert first.status["engine"]["name"] == "main"
    assert said(first, "Attached") == ("False", "Attaching")
    second = decide(as_stored(fresh, first))
    (put,) = second.actions
    assert isinstance(put, PutOnEngine)
    assert (put.engine.name, put.desired.uid, put.desired.mode) == ("main", "uid-1", RunMode.RUN)


def test_attached_only_when_the_engine_confirms_it() -> None:
    told = experiment(status=claimed())
    plan = decide(told, reported=report(told, Phase.PREPARING))
    assert said(plan, "Attached") == ("False", "Attaching")
    plan = decide(told, reported=report(told, adapter_loaded=False))
    assert said(plan, "Attached") == ("False", "Attaching")
    plan = decide(told, reported=report(told))
    assert said(plan, "Attached") == ("True", "EngineConfirmed")
    assert plan.actions == ()
    assert plan.status["state"] == "Running"
    assert plan.status["startTime"] == to_rfc3339(NOW)


def test_a_report_of_an_earlier_epoch_confirms_nothing() -> None:
    told = experiment(status=running())
    old = report(told)
    plan = decide(told, view=view(old, epoch=2))
    (put,) = plan.actions
    assert isinstance(put, PutOnEngine)
    assert said(plan, "Attached") == ("False", "Attaching")


def test_progress_goes_into_the_status() -> None:
    told = experiment(status=claimed())
    plan = decide(told, reported=report(told, step=4))
    progress = plan.status["progress"]
    assert (progress["step"], progress["maxSteps"], progress["percent"]) == (4, 10, 40)
    assert (progress["reward"], progress["estimatedRemainingSeconds"]) == ("0.5", 12)
    assert plan.status["checkpoint"]["step"] == 4
    assert plan.status["engine"]["adapterVersion"] == "one@4"
    assert "bestCheckpoint" not in plan.status


def test_a_full_storage_is_said_and_is_no_failure() -> None:
    told = experiment(status=running())
    full = report(told, reason="StorageFull", message="the engine's storage is full")
    plan = decide(told, reported=full)
    assert said(plan, "Attached") == ("True", "EngineConfirmed")
    assert said(plan, "Progressing") == ("False", "StorageFull")
    assert plan.status["state"] == "Running"
    assert plan.actions == ()


def test_the_best_checkpoint_goes_into_the_status() -> None:
    told = experiment(status=claimed())
    best = ReportedBest(step=3, metric="evalAccuracy", value=0.87654321)
    plan = decide(told, reported=report(told, step=4, best=best))
    assert plan.status["bestCheckpoint"] == {"step": 3, "metric": "evalAccuracy", "value": "0.8765"}


def test_what_an_engine_says_cannot_make_the_status_unwritable() -> None:
    told = experiment(status=claimed())
    long = "x" * 5000
    plan = decide(told, reported=report(told, adapter_version=long, adapter_digest=long))
    assert len(plan.status["engine"]["adapterVersion"]) == 128
    noisy = report(told).progress.model_copy(
        update={"metrics": {f"m{i:02d}": 1.0 for i in range(40)} | {"a-nan": float("nan")}, "reward": float("inf")}
    )
    plan = decide(told, reported=report(told, progress=noisy))
    assert len(plan.status["progress"]["metrics"]) == 16
    assert "a-nan" not in plan.status["progress"]["metrics"]
    assert plan.status["progress"]["reward"] == ""


# ---------------------------------------------------------------------------------------- what is unacceptable


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        ({"assignment": Assignment(None, reason=Reason.ENGINE_NOT_FOUND, message="no main")}, "EngineNotFound", "no"),
        ({"assignment": Assignment(None, reason=Reason.RANK_TOO_HIGH, message="rank 64")}, "RankTooHigh", "rank 64"),
        ({"assignment": Assignment(None, reason=Reason.DOES_NOT_FIT, message="a: no")}, "DoesNotFit", "a: no"),
        ({"data_missing": "spec.data.configMap: gone"}, "DataNotFound", "spec.data.configMap"),
        ({"init": Init(None, Reason.INIT_FROM_NOT_FOUND, "who?")}, "InitFromNotFound", "who?"),
        ({"init": Init(None, Reason.INIT_FROM_FAILED, "failed")}, "InitFromFailed", "failed"),
        ({"init": Init(InitSource(uid="x"), engine="other")}, "InitFromNotFound", "LoRAEngine other"),
    ],
)
def test_unacceptable(fields: dict[str, Any], reason: str, words: str) -> None:
    plan = decide(experiment(), **fields)
    assert said(plan, "Accepted") == ("False", reason)
    assert said(plan, "Attached") == ("False", reason)
    assert words in message(plan, "Accepted")
    assert plan.actions == ()
    assert not plan.wants_slot
    assert [event.type for event in plan.events] == ["Warning"]


def test_a_spec_of_another_release_is_refused_by_field() -> None:
    plan = decide(experiment(maxSteps=0))
    assert said(plan, "Accepted") == ("False", "InvalidSpec")
    assert message(plan, "Accepted").startswith("spec.maxSteps: ")


def refused(of: Any, field: str | None = "lora.rank", at: float = 1) -> Memory:
    problem = Problem(
        type="https://clora.dev/problems/invalid-spec", title="t", status=422, detail="is too high", field=field
    )
    return Memory(wants_slot=True, answer=Answer(spec_digest(desired(of)), ago(at), problem=problem))


def test_the_engines_refusal_names_the_field_and_is_not_repeated() -> None:
    told = experiment(status=claimed())
    plan = decide(told, memory=refused(told))
    assert said(plan, "Accepted") == ("False", "InvalidSpec")
    assert message(plan, "Accepted") == "spec.lora.rank: is too high"
    assert plan.actions == ()


def test_a_changed_spec_is_asked_about_again() -> None:
    told = experiment(status=claimed())
    changed = experiment(status=claimed(), maxSteps=20)
    plan = decide(changed, memory=refused(told))
    assert isinstance(plan.actions[0], PutOnEngine)
    assert said(plan, "Accepted") == ("True", "SpecValid")


def test_a_restarted_operator_does_not_take_a_refusal_back_before_it_has_asked() -> None:
    told = experiment(status=claimed(condition("Accepted", "False", "InvalidSpec", message="spec.x: no")))
    plan = decide(told)
    assert isinstance(plan.actions[0], PutOnEngine)
    assert said(plan, "Accepted") == ("False", "InvalidSpec")


def test_lost_data_does_not_disturb_what_runs() -> None:
    told = experiment(status=running(), data={"configMap": {"name": "d", "key": "k"}})
    plan = decide(told, reported=report(told), data_missing="gone")
    assert plan.actions == ()
    assert said(plan, "Attached") == ("True", "EngineConfirmed")


# ---------------------------------------------------------------------------------------- waiting


@pytest.mark.parametrize(
    ("fields", "reason", "state"),
    [
        (
            {"assignment": Assignment("main", reason=Reason.QUEUED, message="full", position=3)},
            "Queued",
            "Queued",
        ),
        (
            {"assignment": Assignment("main", reason=Reason.WAITING_FOR_ENGINE, message="not ready")},
            "WaitingForEngine",
            "Pending",
        ),
        ({"view": view(ready=False)}, "WaitingForEngine", "Pending"),
        ({"init": Init(None, Reason.WAITING_FOR_INIT, "waiting for x")}, "WaitingForInit", "Pending"),
    ],
)
def test_waiting(fields: dict[str, Any], reason: str, state: str) -> None:
    plan = decide(experiment(), **fields)
    assert said(plan, "Accepted") == ("True", "SpecValid")
    assert said(plan, "Attached") == ("False", reason)
    assert plan.status["state"] == state
    assert plan.actions == ()
    assert plan.wants_slot == (reason != "WaitingForInit")
    assert plan.status.get("queuePosition") == (3 if reason == "Queued" else None)


def test_an_engine_that_says_full_is_believed() -> None:
    told = experiment(status=claimed())
    problem = Problem(type="https://clora.dev/problems/capacity-exceeded", title="t", status=409, detail="all in use")
    answer = Answer(spec_digest(desired(told)), ago(1), problem=problem)
    full = view(full_until=ago(-4))
    plan = decide(told, view=full, memory=Memory(wants_slot=True, answer=answer))
    assert said(plan, "Attached") == ("False", "Queued")
    assert plan.actions == ()
    freed = decide(told, view=view(), memory=Memory(wants_slot=True, answer=answer))
    assert isinstance(freed.actions[0], PutOnEngine)


def test_a_put_without_an_answer_is_repeated_after_a_while() -> None:
    told = experiment(status=claimed())
    digest = spec_digest(desired(told))
    plan = decide(told, memory=Memory(wants_slot=True, answer=Answer(digest, ago(1), error="reset by peer")))
    assert plan.actions == ()
    assert plan.requeue_after == 4
    assert "reset by peer" in message(plan, "Attached")
    plan = decide(told, memory=Memory(wants_slot=True, answer=Answer(digest, ago(6), error="reset by peer")))
    assert isinstance(plan.actions[0], PutOnEngine)


def test_commits_that_the_engine_lacks_are_waited_for_without_a_slot() -> None:
    """The engine is told what was committed, and does not begin anew; it is asked again every half minute."""
    commits = {"step": 7, "path": "p", "digest": "d"}
    told = experiment(status=claimed(checkpoint=commits))
    (put,) = decide(told).actions
    assert put.desired.committed_step == 7
    problem = Problem(
        type="https://clora.dev/problems/conflict",
        title="t",
        status=409,
        detail="no step",
        reason="CheckpointUnreachable",
    )
    memory = Memory(wants_slot=True, answer=Answer(spec_digest(desired(told)), ago(10), problem=problem))
    plan = decide(told, memory=memory)
    assert said(plan, "Attached") == ("False", "CheckpointUnreachable")
    assert message(plan, "Attached") == "no step"
    assert (plan.actions, plan.wants_slot, plan.requeue_after) == ((), False, 20)
    assert plan.status["restarts"] == 0
    later = Memory(wants_slot=True, answer=Answer(spec_digest(desired(told)), ago(31), problem=problem))
    assert isinstance(decide(told, memory=later).actions[0], PutOnEngine)


# ---------------------------------------------------------------------------------------- a silent engine


def test_a_short_silence_changes_nothing() -> None:
    told = experiment(status=running())
    silent = view(report(told), down_since=ago(9), error="refused")
    plan = decide(told, view=silent, memory=Memory(last_write=NOW))
    assert plan.status is None
    assert plan.actions == ()
    assert plan.requeue_after == 1


def test_a_long_silence_is_unknown() -> None:
    told = experiment(status=running())
    plan = decide(told, view=view(report(told), down_since=ago(10), error="refused"))
    assert said(plan, "Attached") == ("Unknown", "EngineUnreachable")
    assert said(plan, "Progressing") == ("Unknown", "EngineUnreachable")
    assert plan.status["state"] == "Unknown"
    assert "refused" in message(plan, "Attached")


def test_a_missing_link_is_a_silence_too() -> None:
    told = experiment(status=running())
    assert decide(told, view=None, memory=Memory(silent_since=ago(5), last_write=NOW)).status is None
    plan = decide(told, view=None, memory=Memory(silent_since=ago(11)))
    assert said(plan, "Attached") == ("Unknown", "EngineUnreachable")


def test_who_waits_anyway_does_not_become_unknown() -> None:
    waits = experiment(status=claimed(condition("Attached", "False", "Queued")))
    plan = decide(
        waits, view=view(down_since=ago(100), ready=False), assignment=Assignment("main", reason=Reason.QUEUED)
    )
    assert said(plan, "Attached") == ("False", "WaitingForEngine")


# ---------------------------------------------------------------------------------------- suspension


def test_suspension_of_what_runs() -> None:
    told = experiment(status=running(), suspend=True)
    plan = decide(told, reported=report(told))
    (put,) = plan.actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.mode is RunMode.SUSPEND
    assert said(plan, "Attached") == ("True", "Suspending")
    plan = decide(told, reported=report(told, mode=RunMode.SUSPEND))
    assert plan.actions == ()


def test_suspended() -> None:
    told = experiment(status=running(), suspend=True)
    plan = decide(told, reported=report(told, Phase.SUSPENDED, mode=RunMode.SUSPEND))
    assert said(plan, "Attached") == ("False", "Suspended")
    assert plan.status["state"] == "Suspended"
    assert not plan.wants_slot
    assert plan.actions == ()


def test_resumption_needs_a_slot() -> None:
    told = experiment(status=claimed())
    suspended = report(told, Phase.SUSPENDED, mode=RunMode.SUSPEND)
    queued = Assignment("main", reason=Reason.QUEUED, message="full", position=1)
    assert decide(told, reported=suspended, assignment=queued).actions == ()
    (put,) = decide(told, reported=suspended).actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.mode is RunMode.RUN


# ---------------------------------------------------------------------------------------- changes of a running spec


def test_a_change_is_told_and_the_conditions_wait_for_the_answer() -> None:
    told = experiment(status=running(), maxSteps=20)
    before = report(told, spec_digest="of-the-old-spec")
    plan = decide(told, reported=before)
    (put,) = plan.actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.spec.max_steps == 20
    assert said(plan, "Attached") == ("True", "EngineConfirmed")


def test_a_refused_change_is_said() -> None:
    told = experiment(status=running(), maxSteps=20)
    plan = decide(told, view=view(report(told, spec_digest="of-the-old-spec")), memory=refused(told, "maxSteps"))
    assert said(plan, "Accepted") == ("False", "InvalidSpec")
    assert plan.actions == ()


# ---------------------------------------------------------------------------------------- ends


def test_success_is_final() -> None:
    told = experiment(status=running())
    plan = decide(told, reported=report(told, Phase.SUCCEEDED, step=10, adapter_loaded=False))
    assert said(plan, "Succeeded") == ("True", "Completed")
    assert said(plan, "Attached") == ("False", "Detached")
    assert plan.status["state"] == "Succeeded"
    assert plan.status["completionTime"] == to_rfc3339(NOW)
    assert [event.reason for event in plan.events] == ["Completed"]
    done = as_stored(told, plan)
    for later in (view(), view(report(told, Phase.SUSPENDED)), view(epoch=9), None):
        assert decide(done, view=later) == decide(done, view=None)
        assert decide(done, view=later).actions == ()


def failed(of: Any, *, attempt: int = 0, retryable: bool = True, reason: str = "Transient") -> Any:
    return report(of, Phase.FAILED, attempt=attempt, retryable=retryable, reason=reason, message="it broke")


def test_a_retryable_failure_backs_off_and_is_put_with_the_next_attempt() -> None:
    told = experiment(status=running())
    seen = Memory(wants_slot=True, failed=(0, NOW))
    first = decide(told, reported=failed(told), memory=seen)
    assert first.status["restarts"] == 1
    assert said(first, "Progressing") == ("False", "Retrying")
    assert first.requeue_after == SETTINGS.retry_backoff_seconds
    assert not first.wants_slot
    waiting = as_stored(told, first)
    assert decide(waiting, reported=failed(told), memory=seen).actions == ()
    later = Memory(wants_slot=True, failed=(0, ago(10)))
    (put,) = decide(waiting, reported=failed(told), memory=later).actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.attempt == 1


@pytest.mark.parametrize(
    ("limit", "restarts", "attempt", "reason"),
    [(0, 0, 0, "BackoffLimitExceeded"), (1, 0, 0, None), (1, 1, 1, "BackoffLimitExceeded"), (1, 1, 0, None)],
)
def test_backoff_limit(limit: int, restarts: int, attempt: int, reason: str | None) -> None:
    told = experiment(status=running(restarts=restarts), backoffLimit=limit)
    plan = decide(told, reported=failed(told, attempt=attempt))
    if reason is None:
        assert plan.status is None or said(plan, "Failed") == ("False", "NotFailed")
    else:
        assert said(plan, "Failed") == ("True", reason)
        assert "it broke" in message(plan, "Failed")


@pytest.mark.parametrize(
    ("given", "told_reason", "words"),
    [
        ("InvalidData", "InvalidData", "it broke"),
        ("ExperimentError", "ExperimentError", "it broke"),
        ("OfALaterRelease", "ExperimentError", "OfALaterRelease: it broke"),
        ("no signal!", "ExperimentError", "no signal!: it broke"),
        ("", "ExperimentError", "it broke"),
    ],
)
def test_a_final_failure_has_the_engines_reason_if_it_is_listed(given: str, told_reason: str, words: str) -> None:
    told = experiment(status=running())
    plan = decide(told, reported=failed(told, retryable=False, reason=given))
    assert said(plan, "Failed") == ("True", told_reason)
    assert message(plan, "Failed") == words
    assert said(plan, "Succeeded")[0] == "False"
    assert plan.events[0].type == "Warning"


def test_the_deadline_fails_it_and_stops_the_engine() -> None:
    told = experiment(status=running(), activeDeadlineSeconds=60)
    plan = decide(told, reported=report(told))
    assert said(plan, "Failed") == ("True", "DeadlineExceeded")
    (stop,) = decide(as_stored(told, plan), reported=report(told)).actions
    assert isinstance(stop, PutOnEngine)
    assert stop.desired.mode is RunMode.SUSPEND
    early = experiment(status=running(), activeDeadlineSeconds=70)
    assert decide(early, reported=report(early)).requeue_after == 10


# ---------------------------------------------------------------------------------------- deletion


def deleted(seconds: float, **fields: Any) -> Any:
    return experiment(meta={"deletionTimestamp": to_rfc3339(ago(seconds))}, **fields)


def test_release_without_an_engine_ever_told() -> None:
    assert decide(deleted(1)).actions == (RemoveFinalizer(),)


@pytest.mark.parametrize("policy", ["Retain", "Delete"])
def test_release_asks_the_engine_until_it_has_let_go(policy: str) -> None:
    gone = deleted(1, status=running(), deletionPolicy=policy)
    (ask,) = decide(gone, reported=report(gone)).actions
    assert isinstance(ask, DeleteOnEngine)
    assert (ask.uid, ask.files) == ("uid-1", policy)
    assert decide(gone, memory=Memory(released=True)).actions == (RemoveFinalizer(),)


def test_release_waits_for_a_silent_engine_until_the_deadline() -> None:
    silent = view(down_since=ago(60))
    waiting = decide(deleted(119, status=running()), view=silent)
    assert waiting.actions == ()
    assert waiting.requeue_after == 1
    given_up = decide(deleted(120, status=running()), view=silent)
    assert given_up.actions == (RemoveFinalizer(),)
    assert [(event.type, event.reason) for event in given_up.events] == [("Warning", "ReleasedWithoutEngine")]


@pytest.mark.parametrize(
    ("of_view", "released"),
    [(None, True), (view(down_since=ago(11)), True), (view(down_since=ago(1)), False), (view(), False)],
)
def test_release_from_an_engine_whose_resource_is_gone(of_view: Any, released: bool) -> None:
    """Nobody waits for the deadline where nobody can answer any more; an engine that still answers is asked."""
    plan = decide(deleted(1, status=running()), engine=None, view=of_view)
    assert (plan.actions == (RemoveFinalizer(),)) == released


def test_release_of_an_unreadable_spec_keeps_the_files() -> None:
    (ask,) = decide(deleted(1, status=running(), maxSteps=0, deletionPolicy="Delete")).actions
    assert isinstance(ask, DeleteOnEngine)
    assert ask.files == "Retain"


# ---------------------------------------------------------------------------------------- rate of writes


def test_progress_is_written_at_most_every_five_seconds() -> None:
    told = experiment(status=claimed())
    stored = as_stored(told, decide(told, reported=report(told, step=1)))
    soon = decide(stored, reported=report(told, step=2), memory=Memory(wants_slot=True, last_write=ago(2)))
    assert soon.status is None
    assert soon.requeue_after == 3
    later = decide(stored, reported=report(told, step=2), memory=Memory(wants_slot=True, last_write=ago(5)))
    assert later.status["progress"]["step"] == 2
    assert later.events == ()


def test_an_equal_status_is_not_written() -> None:
    told = experiment(status=claimed())
    stored = as_stored(told, decide(told, reported=report(told)))
    again = decide(stored, reported=report(told), memory=Memory(wants_slot=True, last_write=ago(500)))
    assert again.status is None
    assert again.events == ()


def test_a_transition_is_written_at_once() -> None:
    told = experiment(status=claimed())
    stored = as_stored(told, decide(told, reported=report(told)))
    end = report(told, Phase.SUCCEEDED, step=10)
    assert decide(stored, reported=end, memory=Memory(last_write=NOW)).status["state"] == "Succeeded"


def test_a_queue_position_is_written_every_thirty_seconds() -> None:
    fresh = experiment()
    queued = Assignment("main", reason=Reason.QUEUED, message="place 3", position=3)
    stored = as_stored(fresh, decide(fresh, assignment=queued))
    nearer = replace(queued, position=2, message="place 2")
    wait = decide(stored, assignment=nearer, memory=Memory(wants_slot=True, last_write=ago(10)))
    assert wait.status is None
    assert wait.requeue_after == 20
    told = decide(stored, assignment=nearer, memory=Memory(wants_slot=True, last_write=ago(30)))
    assert told.status["queuePosition"] == 2


def test_the_transition_time_moves_only_with_the_status() -> None:
    told = experiment(status=claimed(condition("Attached", "False", "Queued", since=50)))
    plan = decide(told, reported=report(told, Phase.PREPARING), assignment=ADMITTED)
    attached = next(c for c in plan.status["conditions"] if c["type"] == "Attached")
    assert attached["reason"] == "Attaching"
    assert attached["lastTransitionTime"] == to_rfc3339(ago(50))


def test_foreign_conditions_stay() -> None:
    told = experiment(status=claimed(condition("dashboard.example.com/Seen", "True", "Seen")))
    plan = decide(told, reported=report(told))
    assert said(plan, "dashboard.example.com/Seen") == ("True", "Seen")
