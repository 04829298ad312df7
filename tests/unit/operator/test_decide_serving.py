"""An experiment that is served to tenants: what the engine is told, what is said, and its slot after the end."""

from __future__ import annotations

import base64
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from clora_api.control import DesiredServing, ExperimentReport, Phase, Problem, ReportedServing, RunMode, spec_digest
from clora_api.v1alpha1.conditions import Reason
from clora_operator.cache import Cache
from clora_operator.claims import Assignment, Claim
from clora_operator.decide import decide_experiment
from clora_operator.decide_serving import secret_name
from clora_operator.desired import to_be_served, token_digest
from clora_operator.links import EngineView
from clora_operator.observe import Answer, Init, Memory, ObservedExperiment, ServingAnswer, ServingSecret
from clora_operator.observer import Observer, claims
from clora_operator.placement import place
from clora_operator.plan import CreateToken, DeleteExperiment, DeleteOnEngine, Plan, PutOnEngine, ServeOnEngine
from clora_operator.resources import Engine, Experiment, to_rfc3339
from clora_operator.settings import ServiceAddressing
from tests.unit.operator.factories import (
    NOW,
    SETTINGS,
    UID,
    ago,
    as_stored,
    condition,
    desired,
    engine,
    experiment,
    message,
    metadata,
    namespaces,
    observed,
    priority_classes,
    report,
    running,
    said,
    spec,
    view,
)
from tests.unit.operator.test_placement import admitted, claim, room
from tests.unit.operator.test_preemption import holder, leaving

TOKEN = "a-token-for-tenants"
SECRET = ServingSecret("one-serving", TOKEN, foreign=False, at=NOW)
ON = {"serving": {"enabled": True}}
ENGINE = engine(image="i", serving={"enabled": True})
QUEUED = Assignment("main", reason=Reason.QUEUED, message="place 1", position=1)
TAKEN = Assignment("main", reason=Reason.PREEMPTED, message="high has taken its slot", position=1, preemptor="high")
DRAINS = Assignment("main", reason=Reason.ENGINE_DRAINING, message="main drains")


def ended(kind: str = "Succeeded", *more: dict[str, Any], **fields: Any) -> Experiment:
    status = running(completionTime=to_rfc3339(ago(60))) | {"conditions": [condition(kind, "True", "Completed"), *more]}
    return experiment(status=status, **(ON | fields))


def serves(*reports: ExperimentReport, offers: bool = True, **fields: Any) -> EngineView:
    seen = view(*reports, **fields)
    assert seen.info is not None
    return replace(seen, info=seen.info.model_copy(update={"serves": offers}))


def is_served(of: Experiment, **fields: Any) -> ExperimentReport:
    """As the engine reports one that has ended and answers."""
    return report(of, Phase.SUCCEEDED, keeps_slot=True, serving=ReportedServing(version="one@10"), **fields)


def told(of: Experiment, **fields: Any) -> Memory:
    """The engine took what `of` says now, with its token."""
    seen = observed(of, engine=ENGINE, serving_secret=SECRET)
    put = to_be_served(seen)
    assert put is not None
    return Memory(wants_slot=True, answer=Answer(spec_digest(put), ago(1), token_digest(put), **fields))


def look(of: Experiment, **fields: Any) -> ObservedExperiment:
    values: dict[str, Any] = {"engine": ENGINE, "serving_secret": SECRET, "view": serves()}
    return observed(of, **(values | fields))


def decide(of: Experiment, **fields: Any) -> Plan:
    return decide_experiment(look(of, **fields), NOW, SETTINGS)


# ------------------------------------------------------------------------------------------------ while it trains


def test_its_secret_is_made_first_and_only_where_an_engine_serves() -> None:
    of = experiment(status=running(), **ON)
    none = ServingSecret("one-serving", None, foreign=False, at=NOW)
    seen = serves(report(of, serving=None))
    plan = decide(of, view=seen, serving_secret=none)
    assert CreateToken("one-serving") in plan.actions
    assert plan.requeue_after == 0.0
    closed = engine(image="i")
    plan = decide(of, view=seen, serving_secret=none, engine=closed)
    assert plan.actions == ()
    assert said(plan, "Served") == ("False", "ServingNotOffered")
    assert "serving" not in (plan.status or {})


def test_the_engine_is_told_the_token_once_and_again_when_it_is_another() -> None:
    of = experiment(status=running(), **ON)
    seen = serves(report(of))
    (put,) = decide(of, view=seen).actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.serving_token == TOKEN
    assert put.desired.spec.serving is None  # the token says it
    assert TOKEN not in repr(put)
    knows = Memory(wants_slot=True, answer=Answer(spec_digest(put.desired), ago(1), token_digest(put.desired)))
    assert decide(of, view=seen, memory=knows).actions == ()
    rotated = replace(SECRET, token="another-token-for-tenants")
    (again,) = decide(of, view=seen, memory=knows, serving_secret=rotated).actions
    assert isinstance(again, PutOnEngine)
    assert again.desired.serving_token == rotated.token


def test_turned_off_it_is_told_without_a_token() -> None:
    of = experiment(status=running())
    runs = report(of, serving=ReportedServing(version="one@3"))
    before = Memory(wants_slot=True, answer=Answer(spec_digest(desired(of)), ago(1), "digest-of-a-token"))
    (put,) = decide(of, view=serves(runs), serving_secret=None, memory=before).actions
    assert isinstance(put, PutOnEngine)
    assert put.desired.serving_token is None
    assert decide(of, view=serves(runs), serving_secret=None, memory=Memory(wants_slot=True)).actions == (put,)


@pytest.mark.parametrize(
    ("secret", "token"),
    [(None, None), (ServingSecret("one-serving", None, foreign=False, at=NOW), None), (SECRET, TOKEN)],
)
def test_a_refused_spec_keeps_no_revoked_token_valid(secret: ServingSecret | None, token: str | None) -> None:
    of = experiment(status=running(), **ON)
    runs = serves(report(of, spec_digest="of-the-earlier-spec", serving=ReportedServing(version="one@3")))
    problem = Problem(type="https://clora.dev/problems/invalid-spec", title="t", status=422)
    answer = Answer(spec_digest(desired(of)), ago(1), "digest-of-another-token", problem=problem)
    memory = Memory(wants_slot=True, answer=answer)
    plan = decide(of, view=runs, serving_secret=secret, memory=memory)
    call = only_call(plan)
    assert call.serving == DesiredServing(serving_token=token, weight=100)
    assert said(plan, "Accepted") == ("False", "InvalidSpec")
    assert said(plan, "Attached") == ("True", "EngineConfirmed")
    assert calls(decide(of, view=runs, serving_secret=secret, memory=replace(memory, serving=taken(call)))) == []


def taken(call: ServeOnEngine, seconds: float = 0, **fields: Any) -> ServingAnswer:
    return ServingAnswer(token_digest(call.serving), ago(seconds), call.serving.weight, **fields)


def calls(plan: Plan) -> list[Any]:
    return [action for action in plan.actions if isinstance(action, ServeOnEngine | PutOnEngine)]


def only_call(plan: Plan) -> ServeOnEngine:
    (call,) = calls(plan)
    assert isinstance(call, ServeOnEngine)
    assert (call.engine, call.uid) == (ENGINE.key, UID)
    assert TOKEN not in repr(call)
    assert plan.requeue_after == 0.0
    return call


UNREADABLE = replace(experiment(status=running(), **ON), spec=None, invalid="spec.colour: Extra inputs")
NOWHERE = Init(None, Reason.WAITING_FOR_INIT, "waiting for two")


@pytest.mark.parametrize(
    ("of", "fields"),
    [
        (experiment(status=running(), **ON), {"data_missing": "its ConfigMap is gone"}),
        (experiment(status=running(), **ON), {"init": NOWHERE}),
        (UNREADABLE, {}),
        (experiment(status=running(), suspend=True, **ON), {"data_missing": "gone", "phase": Phase.SUSPENDED}),
    ],
)
@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_token_is_told_whatever_is_missing_for_everything_else(
    of: Experiment, fields: dict[str, Any], secret: ServingSecret | None
) -> None:
    """By an operator that has just started, and knows nothing of what was told."""
    phase = fields.get("phase", Phase.RUNNING)
    whole = experiment(status=running(), **ON)
    runs = serves(report(whole, phase, serving=ReportedServing(version="one@3", weight=100)))
    rest = {"view": runs, "serving_secret": secret} | {k: v for k, v in fields.items() if k != "phase"}
    call = only_call(decide(of, **rest))
    assert call.serving.serving_token == (secret.token if secret else None)
    assert call.serving.weight == (None if of.spec is None else 100)
    after = Memory(wants_slot=True, serving=taken(call))
    assert calls(decide(of, memory=after, **rest)) == []
    rotated = replace(SECRET, token="another-token-for-tenants")
    again = only_call(decide(of, memory=after, **(rest | {"serving_secret": rotated})))
    assert again.serving.serving_token == rotated.token


def test_a_call_that_failed_is_made_again_after_a_pause_and_said() -> None:
    of = experiment(status=running() | {"conditions": [condition("Served", "True", "Serving")]})
    fields: dict[str, Any] = {
        "view": serves(report(of, serving=ReportedServing(version="one@3"))),
        "data_missing": "its ConfigMap is gone",
        "serving_secret": None,
    }
    call = only_call(decide(of, **fields))
    failed = Memory(wants_slot=True, serving=taken(call, 2, error="HTTP 500"))
    plan = decide(of, memory=failed, **fields)
    assert calls(plan) == []
    assert plan.requeue_after == 3
    assert said(plan, "Served") == ("False", "NotServed")
    assert "has not taken that yet: HTTP 500" in message(plan, "Served")
    later = replace(failed, serving=taken(call, 5, error="HTTP 500"))
    assert only_call(decide(of, memory=later, **fields)) == call


@pytest.mark.parametrize("secret", [None, SECRET])
def test_an_engine_of_an_earlier_release_is_asked_rarely_and_the_condition_says_why(
    secret: ServingSecret | None,
) -> None:
    of = experiment(
        status=running() | {"conditions": [condition("Served", "True", "Serving")]}, **(ON if secret else {})
    )
    fields: dict[str, Any] = {
        "view": serves(report(of, serving=ReportedServing(version="one@3"))),
        "data_missing": "its ConfigMap is gone",
        "serving_secret": secret,
    }
    call = only_call(decide(of, **fields))
    asked = Memory(wants_slot=True, serving=taken(call, 5, error="Not Found", unknown=True))
    plan = decide(of, memory=asked, **fields)
    assert calls(plan) == []
    assert plan.requeue_after is not None
    assert plan.requeue_after > 5
    assert said(plan, "Served") == ("False", "ServingNotOffered" if secret else "NotServed")
    assert "is of an earlier release" in message(plan, "Served")
    assert "spec.drain" in message(plan, "Served")
    assert TOKEN not in message(plan, "Served")
    assert calls(decide(of, memory=replace(asked, serving=taken(call, 599, error="?", unknown=True)), **fields)) == []
    later = replace(asked, serving=taken(call, 600, error="Not Found", unknown=True))
    assert only_call(decide(of, memory=later, **fields)) == call
    # what its next pod is told with everything else replaces it
    put = Memory(wants_slot=True, serving=taken(call, 9, error="?", unknown=True), answer=told(of).answer)
    assert "earlier release" not in message(decide(of, memory=put, **fields), "Served")


def test_nothing_is_called_where_a_put_or_a_deletion_tells_it_or_nobody_listens() -> None:
    of = experiment(status=running(), suspend=True, **ON)
    runs = report(of, serving=ReportedServing(version="one@3"))
    (put,) = decide(of, view=serves(runs)).actions
    assert isinstance(put, PutOnEngine)
    (delete,) = decide(of, view=serves(runs), data_missing="gone").actions
    assert isinstance(delete, DeleteOnEngine)
    for seen in (serves(), serves(report(of, Phase.DELETING)), serves(runs, down_since=ago(100), error="refused")):
        assert calls(decide(of, view=seen, data_missing="gone")) == []


@pytest.mark.parametrize(("weight", "is_told"), [(None, False), (100, True), (50, False)])
def test_a_weight_is_told_though_its_data_are_gone(weight: int | None, is_told: bool) -> None:
    of = experiment(status=running(), weight=50, **ON)
    runs = serves(report(of, serving=ReportedServing(version="one@3", weight=weight)))
    known = ServingAnswer(token_digest(DesiredServing(serving_token=TOKEN)), ago(9), 100)
    plan = decide(of, view=runs, data_missing="gone", memory=Memory(wants_slot=True, serving=known))
    assert [call.serving.weight for call in calls(plan)] == [50] * is_told


def test_what_a_later_put_has_told_counts() -> None:
    of = experiment(status=running(), **ON)
    runs = serves(report(of, serving=ReportedServing(version="one@3")))
    old = ServingAnswer("digest-of-another-token", ago(9))
    assert calls(decide(of, view=runs, memory=replace(told(of), serving=old))) == []
    newer = replace(old, at=NOW)
    (put,) = calls(decide(of, view=runs, memory=replace(told(of), serving=newer)))
    assert isinstance(put, PutOnEngine)


def test_a_spec_that_cannot_be_read_goes_on_being_served_after_its_end() -> None:
    whole = ended("Succeeded", condition("Served", "True", "Serving"))
    of = replace(whole, spec=None, invalid="spec.colour: no")
    assert of.asks_to_be_served
    plan = decide(of, view=serves(is_served(whole)))
    assert only_call(plan).serving == DesiredServing(serving_token=TOKEN)
    after = decide(of, view=serves(is_served(whole)), memory=Memory(serving=taken(only_call(plan))))
    assert calls(after) == []
    assert not [action for action in after.actions if isinstance(action, DeleteOnEngine)]


def test_where_it_answers_and_with_what() -> None:
    of = experiment(status=running(), **ON)
    runs = report(of, serving=ReportedServing(version="one@3"))
    plan = decide(of, view=serves(runs), memory=told(of))
    assert said(plan, "Served") == ("True", "Serving")
    assert plan.status is not None
    assert plan.status["serving"] == {
        "endpoint": "http://main.team.svc:8000/v1",
        "secretName": "one-serving",
        "version": "one@3",
    }
    assert TOKEN not in str(plan)
    assert [event.reason for event in plan.events] == ["Serving"]


@pytest.mark.parametrize(
    ("of_engine", "endpoint"),
    [
        ({"image": "i", "serving": {"enabled": True, "endpoint": "https://models.example.com/v1"}},) * 2,
        (
            {
                "endpoint": "http://x",
                "tokenSecretRef": {"name": "t"},
                "serving": {"enabled": True, "endpoint": "http://y"},
            },
        )
        * 2,
    ],
)
def test_an_address_of_the_engines_own(of_engine: dict[str, Any], endpoint: dict[str, Any]) -> None:
    of = experiment(status=running(), **ON)
    plan = decide(of, view=serves(report(of)), engine=engine(**of_engine))
    assert plan.status is not None
    assert plan.status["serving"]["endpoint"] == endpoint["serving"]["endpoint"]


def test_without_dns_it_is_the_services_address() -> None:
    of = experiment(status=running(), **ON)
    there = replace(ENGINE, status=ENGINE.status.model_copy(update={"endpoint": "http://[fd00::1]:8080"}))
    settings = replace(SETTINGS, service_addressing=ServiceAddressing.CLUSTER_IP)
    plan = decide_experiment(look(of, view=serves(report(of)), engine=there), NOW, settings)
    assert plan.status is not None
    assert plan.status["serving"]["endpoint"] == "http://[fd00::1]:8000/v1"


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"serving_secret": ServingSecret("one-serving", None, foreign=True, at=NOW)}, ("False", "SecretInUse")),
        (
            {
                "serving_secret": ServingSecret("one-serving", None, foreign=False, at=NOW),
                "memory": Memory(secret_problem="exceeded quota: secrets"),
            },
            ("False", "SecretRefused"),
        ),
        ({"engine": engine(image="i")}, ("False", "ServingNotOffered")),
        ({"offers": False}, ("False", "ServingNotOffered")),
        ({"serving": ReportedServing()}, ("False", "NotAttached")),
        ({"serving": ReportedServing(problem="torn")}, ("False", "ServingFailed")),
        ({"down_since": ago(100), "error": "refused"}, ("Unknown", "EngineUnreachable")),
    ],
)
def test_why_it_does_not_answer(fields: dict[str, Any], verdict: tuple[str, str]) -> None:
    of = experiment(status=running(), **ON)
    seen = serves(
        report(of, serving=fields.pop("serving", None)),
        offers=fields.pop("offers", True),
        **{name: fields.pop(name) for name in ("down_since", "error") if name in fields},
    )
    assert said(decide(of, view=seen, **fields), "Served") == verdict


def test_a_new_version_with_each_step_is_no_transition() -> None:
    of = experiment(status=running(), **ON)
    first = decide(of, view=serves(report(of, serving=ReportedServing(version="one@3"))), memory=told(of))
    stored = replace(as_stored(of, first), spec=of.spec)
    later = serves(report(of, step=4, serving=ReportedServing(version="one@4")))
    plan = decide(stored, view=later, memory=replace(told(of), last_write=ago(1)))
    assert plan.status is None
    assert plan.events == ()


# ------------------------------------------------------------------------------------------------ after the end


def test_it_keeps_its_slot_and_says_so() -> None:
    of = experiment(status=running(), **ON)
    plan = decide(of, view=serves(is_served(of)), memory=told(of))
    assert said(plan, "Succeeded") == ("True", "Completed")
    assert said(plan, "Served") == ("True", "Serving")
    assert "keeps its slot" in message(plan, "Attached")
    after = replace(as_stored(of, plan), spec=of.spec)
    assert decide(after, view=serves(is_served(of)), memory=told(of)) == Plan(wants_slot=True, requeue_after=30)


def test_an_engine_that_knows_nothing_of_it_is_told_to_serve_and_not_to_train() -> None:
    of = ended()
    plan = decide(of, data_missing="its ConfigMap is gone")
    (put,) = plan.actions
    assert isinstance(put, PutOnEngine)
    assert (put.desired.mode, put.desired.serving_token) == (RunMode.SERVE, TOKEN)
    assert plan.wants_slot
    assert decide(of, view=serves(is_served(of)), memory=told(of)).actions == ()
    (once_more,) = decide(of, view=serves(is_served(of)), memory=Memory()).actions  # an operator that has just started
    assert once_more == put


@pytest.mark.parametrize(("weight", "is_told"), [(None, False), (100, True), (50, False)])
def test_a_weight_that_was_changed_after_the_end_is_told(weight: int | None, is_told: bool) -> None:
    of = ended(weight=50)
    reported = is_served(of).model_copy(update={"serving": ReportedServing(version="one@10", weight=weight)})
    memory = told(of)
    assert memory.answer is not None
    plan = decide(of, view=serves(reported), memory=replace(memory, answer=replace(memory.answer, at=ago(60))))
    assert [put.desired.spec.weight for put in plan.actions if isinstance(put, PutOnEngine)] == [50] * is_told


@pytest.mark.parametrize("assignment", [None, QUEUED, DRAINS])
def test_without_a_slot_it_is_not_put(assignment: Assignment | None) -> None:
    of = ended()
    plan = decide(of, assignment=assignment)
    assert plan.actions == ()
    assert plan.wants_slot
    if assignment is not None:
        assert said(plan, "Served") == ("False", str(assignment.reason))
        assert message(plan, "Served") == assignment.message


@pytest.mark.parametrize("assignment", [TAKEN, DRAINS])
def test_evicted_it_gives_its_slot_up_and_comes_back(assignment: Assignment) -> None:
    of = ended("Succeeded", condition("Served", "True", "Serving"))
    plan = decide(of, view=serves(is_served(of)), memory=told(of), assignment=assignment)
    assert plan.actions == (DeleteOnEngine(ENGINE.key, UID, "Retain"),)
    assert plan.wants_slot
    gone = decide(of, view=serves(), memory=told(of), assignment=assignment)
    assert gone.actions == ()
    assert said(gone, "Served") == ("False", str(assignment.reason))
    assert len(gone.events) == 1
    (back,) = decide(of, view=serves(), memory=told(of)).actions
    assert isinstance(back, PutOnEngine)


@pytest.mark.parametrize("off", [{"serving": None}, {"serving": {"enabled": False}}])
def test_turned_off_after_the_end_it_leaves(off: dict[str, Any]) -> None:
    of = ended("Succeeded", condition("Served", "True", "Serving"), **off)
    assert not of.asks_to_be_served
    plan = decide(of, view=serves(is_served(of)), serving_secret=None)
    assert plan.actions == (DeleteOnEngine(ENGINE.key, UID, "Retain"),)
    assert said(plan, "Served") == ("False", "NotServed")
    assert not plan.wants_slot
    assert plan.status is not None
    assert plan.status["state"] == "Succeeded"
    after = replace(as_stored(of, plan), spec=of.spec)
    assert decide(after, view=serves(), serving_secret=None) == Plan()


def test_what_has_failed_is_not_served() -> None:
    of = ended("Failed")
    assert not of.asks_to_be_served
    assert decide(of, serving_secret=None) == Plan()


@pytest.mark.parametrize(("seconds", "asked"), [(1, False), (5, True)])
def test_a_full_engine_is_asked_again_after_a_pause(seconds: float, asked: bool) -> None:
    of = ended()
    full = Problem(type="https://clora.dev/problems/capacity-exceeded", title="t", status=409, detail="full")
    memory = told(of, problem=full)
    assert memory.answer is not None
    memory = replace(memory, answer=replace(memory.answer, at=ago(seconds)))
    plan = decide(of, memory=memory)
    assert bool(plan.actions) is asked
    assert said(plan, "Served") == ("False", "Queued")
    assert plan.requeue_after is not None


FOREIGN = ServingSecret("one-serving", None, foreign=True, at=NOW)
NONE = ServingSecret("one-serving", None, foreign=False, at=NOW)
NO_COMMITS = Problem(
    type="https://clora.dev/problems/conflict", title="t", status=409, reason=Reason.CHECKPOINT_UNREACHABLE
)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"serving_secret": FOREIGN}, "SecretInUse"),
        ({"serving_secret": NONE, "memory": Memory(wants_slot=True, secret_problem="quota")}, "SecretRefused"),
        ({"view": serves(offers=False)}, "ServingNotOffered"),
        ({"memory": told(ended(), problem=NO_COMMITS), "assignment": Assignment("main")}, "ServingFailed"),
    ],
)
def test_what_cannot_be_served_wants_no_slot_and_no_engine_awake(fields: dict[str, Any], reason: str) -> None:
    of = ended("Succeeded", condition("Served", "True", "Serving"))
    plan = decide(of, **fields)
    assert said(plan, "Served") == ("False", reason)
    assert not plan.wants_slot
    assert plan.requeue_after is not None
    assert not [action for action in plan.actions if isinstance(action, PutOnEngine)]
    memory = replace(fields.get("memory", Memory()), serving_secret=fields.get("serving_secret", SECRET))
    remembered = {name: getattr(memory, name) for name in ("answer", "serving_secret", "secret_problem", "wants_slot")}
    (found,) = asked(of, fields.get("view", serves()), **remembered)
    assert not found.needs


@pytest.mark.parametrize(("secret", "problem"), [(FOREIGN, ""), (NONE, "quota")])
def test_without_its_secret_it_leaves(secret: ServingSecret, problem: str) -> None:
    of = ended("Succeeded", condition("Served", "True", "Serving"))
    memory = replace(told(of), secret_problem=problem)
    plan = decide(of, view=serves(is_served(of)), serving_secret=secret, memory=memory)
    assert DeleteOnEngine(ENGINE.key, UID, "Retain") in plan.actions
    assert not plan.wants_slot


def test_commits_are_looked_for_again() -> None:
    memory = told(ended(), problem=NO_COMMITS)
    assert memory.answer is not None
    later = replace(memory, answer=replace(memory.answer, at=ago(30)))
    assert decide(ended(), memory=later, assignment=Assignment("main")).wants_slot
    (put,) = decide(ended(), memory=later).actions
    assert isinstance(put, PutOnEngine)


def test_its_ttl_goes_on() -> None:
    of = ended("Succeeded", ttlSecondsAfterFinished=100)
    plan = decide(of, view=serves(is_served(of)), memory=told(of))
    assert plan.requeue_after == 30
    soon = decide_experiment(look(of, view=serves(is_served(of))), NOW + timedelta(seconds=35), SETTINGS)
    assert soon.requeue_after is not None
    assert soon.requeue_after <= 5
    later = decide_experiment(look(of, view=serves(is_served(of))), NOW + timedelta(seconds=41), SETTINGS)
    assert later.actions == (DeleteExperiment(),)


# ------------------------------------------------------------------------------------------------ its slot


def asked(of: Experiment, seen: EngineView, of_engine: Engine = ENGINE, **memory: Any) -> list[Claim]:
    cache = Cache()
    cache.put("engine", {"metadata": metadata("main", "e"), "spec": of_engine.spec.to_api() if of_engine.spec else {}})
    cache.put(
        "experiment",
        {"metadata": metadata("one", UID), "spec": of.spec.to_api() if of.spec else spec(), "status": of.raw_status},
    )

    class Links:
        def view(self, _: Any) -> EngineView:
            return seen

    known = {UID: Memory(**memory)} if memory else {}
    return claims(cache, Links(), known, priority_classes(), namespaces())  # type: ignore[arg-type]


def test_it_holds_its_slot_like_any_other_and_takes_nobodys() -> None:
    of = ended("Succeeded", condition("Served", "True", "Serving"))
    (held,) = asked(of, serves(is_served(of)), wants_slot=True)
    assert (held.holds, held.leaving, held.served, held.attached) == (True, False, True, True)
    (wants,) = asked(of, serves(), wants_slot=True)
    assert (wants.holds, wants.wants, wants.needs, wants.preempts) == (False, True, True, False)


@pytest.mark.parametrize(
    ("of", "of_engine"),
    [(ended("Failed"), ENGINE), (ended(serving=None), ENGINE), (ended(), engine(image="i"))],
)
def test_others_that_have_ended_want_none(of: Experiment, of_engine: Engine) -> None:
    assert asked(of, serves(), of_engine, wants_slot=True) == []
    (held,) = asked(of, serves(is_served(of)), of_engine)
    assert (held.leaving, held.wants) == (True, False)


def test_what_trains_comes_before_what_is_served_at_the_same_priority() -> None:
    found = place([room(capacity=1)], [claim("served", 1, served=True), claim("new", 9)])
    assert set(admitted(found)) == {"new"}
    found = place([room(capacity=1)], [claim("served", 1, served=True, priority=5), claim("new", 9)])
    assert set(admitted(found)) == {"served"}


def test_after_a_restart_what_was_served_has_its_slot_again() -> None:
    was = claim("served", 1, served=True, attached=True)
    assert set(admitted(place([room(capacity=1)], [was, claim("queued", 0)]))) == {"served"}


def test_a_higher_priority_takes_the_slot_of_what_is_only_served_first() -> None:
    holders = [holder("served", 1, served=True), holder("trains", 2)]
    assert leaving(place([room(capacity=2)], [*holders, claim("high", 9, priority=10)])) == {"served": "high"}
    assert leaving(place([room(capacity=2)], [*holders, claim("equal", 9)])) == {}


@pytest.mark.parametrize(
    ("owner", "data", "token", "foreign"),
    [
        (None, None, None, False),
        (UID, TOKEN, TOKEN, False),
        (UID, f"{TOKEN}\n", TOKEN, False),
        ("a-namesake-that-is-gone", TOKEN, None, True),
        (None, TOKEN, None, True),
        (UID, "short", None, True),
        (UID, "x" * 513, None, True),
    ],
)
async def test_only_its_own_secret_counts_and_is_read_now_and_then(
    owner: str | None, data: str | None, token: str | None, foreign: bool
) -> None:
    reads = []
    now = NOW

    class Secrets:
        def secret(self, namespace: str, name: str) -> dict[str, Any] | None:
            reads.append((namespace, name))
            owners = [{"uid": owner}] if owner else []
            encoded = {"token": base64.b64encode((data or "").encode()).decode()}
            return {"metadata": {"ownerReferences": owners}, "data": encoded} if data is not None else None

    observer = Observer(Secrets(), Cache(), None, priority_classes(), lambda: now)  # type: ignore[arg-type]
    found = await observer._serving_secret(ended(), Memory())
    assert found is not None
    assert (found.token, found.foreign) == (token, foreign)
    assert TOKEN not in repr(found)
    assert await observer._serving_secret(ended(), Memory(serving_secret=found)) is found
    now = NOW + timedelta(seconds=31)
    await observer._serving_secret(ended(), Memory(serving_secret=found))
    assert reads == [("team", "one-serving")] * 2
    assert await observer._serving_secret(ended("Failed"), Memory()) is None


def test_names_of_secrets_are_names() -> None:
    assert secret_name(ended()) == "one-serving"
    of = ended()
    assert secret_name(replace(of, meta=replace(of.meta, name="a" * 244 + ".b"))) == "a" * 244 + "-serving"
