"""Serving an experiment's adapter to tenants: its Secret, what is said of it, and its slot after the end. Pure.

While it trains, the engine is told its token with everything else. After it has succeeded it keeps its slot, at its own
priority, and takes one again after its engine was restarted; it gives it up for a higher priority, when its engine
drains, when its namespace is let in no more, and when spec.serving is turned off. What to do about an experiment that
has failed is nothing: it is served no more.
"""

from __future__ import annotations

from datetime import datetime

from clora_api.control import DesiredExperiment, ExperimentReport, Phase
from clora_api.v1alpha1.conditions import ExperimentCondition, Reason, derive_state
from clora_api.v1alpha1.experiment import ExperimentStatus, ServingStatus
from clora_operator.case import LOOK_AGAIN_SECONDS, PUT_RETRY_SECONDS, Case
from clora_operator.claims import EVICTING
from clora_operator.desired import desired_serving, engine_key, offers_serving, to_be_served, token_digest
from clora_operator.experiment_status import events_of
from clora_operator.links import EngineView
from clora_operator.observe import ObservedExperiment, ServingSecret
from clora_operator.plan import Action, CreateToken, DeleteOnEngine, Plan, PutOnEngine, ServeOnEngine, soonest
from clora_operator.pod_template import TENANT_PORT
from clora_operator.resources import Engine, Experiment, find_condition
from clora_operator.settings import ServiceAddressing, Settings
from clora_operator.status import Verdict, clip, delay_of_write, set_conditions, transitions, weigh

ASK_AGAIN_SECONDS = 1.0
OLD_ENGINE_SECONDS = 600.0
"""After an engine of an earlier release did not know the call: its next pod does, and is told with everything else."""


def secret_name(experiment: Experiment) -> str:
    """Of a Secret, whose names may be as long as an experiment's."""
    return f"{experiment.meta.name[:245].rstrip('-.')}-serving"


def secret_actions(o: ObservedExperiment) -> tuple[Action, ...]:
    """Its Secret is made once an engine that serves is known."""
    secret = o.serving_secret
    if secret is None or secret.token is not None or secret.foreign or not offers_serving(o.engine):
        return ()
    return (CreateToken(secret.name),)


def cannot_be_served(secret: ServingSecret | None, secret_problem: str, view: EngineView | None) -> bool:
    """Its Secret is not to be had, or its engine, as it runs now, has no port for tenants: a slot would not help."""
    if secret is not None and (secret.foreign or (secret.token is None and secret_problem)):
        return True
    return view is not None and view.ready and view.info is not None and not view.info.serves


# ------------------------------------------------------------------------------------------------ what is said


def served(o: ObservedExperiment, seconds_silent: float, settings: Settings) -> Verdict | None:
    """Condition Served. None: nothing is to be said, or what was said last still stands."""
    if o.serving_secret is None:
        before = find_condition(o.experiment.status.conditions, ExperimentCondition.SERVED)
        return Verdict("False", Reason.NOT_SERVED, _why_not_asked(o)) if before else None
    name = _engine_name(o)
    if not offers_serving(o.engine):
        message = f"LoRAEngine {name} does not serve tenants: its spec.serving.enabled is false"
        return Verdict("False", Reason.SERVING_NOT_OFFERED, message) if o.engine is not None else _not_attached(o)
    if o.serving_secret.foreign:
        message = f"Secret {o.serving_secret.name} exists and is not this experiment's: remove it"
        return Verdict("False", Reason.SECRET_IN_USE, message)
    if o.serving_secret.token is None and o.memory.secret_problem:
        message = f"Secret {o.serving_secret.name} cannot be made: {o.memory.secret_problem}"
        return Verdict("False", Reason.SECRET_REFUSED, message)
    view = o.view
    if view is None or not view.reachable or view.info is None:
        if seconds_silent < settings.unreachable_grace_seconds:
            return None
        return Verdict("Unknown", Reason.ENGINE_UNREACHABLE, f"LoRAEngine {name} does not answer")
    if not view.info.serves:
        message = f"LoRAEngine {name} serves tenants from its next pod on: set its spec.drain to move to it"
        return Verdict("False", Reason.SERVING_NOT_OFFERED, message)
    return _as_reported(o)


def _as_reported(o: ObservedExperiment) -> Verdict:
    serving = o.report.serving if o.report else None
    if serving is not None and _too_old(o):
        message = f"what changed in who may ask for it waits: {_moves(o)}"
        return Verdict("False", Reason.SERVING_NOT_OFFERED, message)
    if serving is not None and serving.version:
        return Verdict("True", Reason.SERVING, f"{serving.version} answers on LoRAEngine {_engine_name(o)}")
    if serving is not None and serving.problem:
        return Verdict("False", Reason.SERVING_FAILED, serving.problem)
    return _not_attached(o)


def _not_attached(o: ObservedExperiment) -> Verdict:
    """With what placement says, of one that has ended; what trains says it elsewhere."""
    assignment, answer = o.assignment, o.memory.answer
    if not o.experiment.finished:
        return Verdict("False", Reason.NOT_ATTACHED, "its engine has no version of it now")
    if assignment is not None and assignment.reason is not None:
        return Verdict("False", assignment.reason, assignment.message)
    if answer is not None and answer.full:
        return Verdict("False", Reason.QUEUED, answer.trouble)
    if answer is not None and answer.trouble:
        return Verdict("False", Reason.SERVING_FAILED, answer.trouble)
    return Verdict("False", Reason.ATTACHING, f"LoRAEngine {_engine_name(o)} loads its last commit")


def _why_not_asked(o: ObservedExperiment) -> str:
    why = "it has failed" if o.experiment.serving_enabled else "spec.serving is not enabled"
    call, still = o.memory.serving, o.report.serving if o.report else None
    if still is None or call is None or not call.error:
        return why
    if _too_old(o):
        return f"{why}; its last token is still valid, for {_moves(o)}"
    return clip(f"{why}; LoRAEngine {_engine_name(o)} has not taken that yet: {call.error}", 1024)


def _too_old(o: ObservedExperiment) -> bool:
    """The engine reports the experiment, and did not know the last call about it, which nothing that was told since has
    replaced."""
    call, answer = o.memory.serving, o.memory.answer
    return o.report is not None and call is not None and call.unknown and (answer is None or answer.at <= call.at)


def _moves(o: ObservedExperiment) -> str:
    return (
        f"LoRAEngine {_engine_name(o)} is of an earlier release, which learns it only with a spec that it takes: move"
        " it to this one (spec.drain)"
    )


def _engine_name(o: ObservedExperiment) -> str:
    return o.engine.meta.name if o.engine else (o.assignment.engine or "" if o.assignment else "")


def serving_status(o: ObservedExperiment, settings: Settings) -> ServingStatus | None:
    """status.serving; None where it is not to be served, or nowhere."""
    secret, serving = o.serving_secret, o.report.serving if o.report else None
    if secret is None or secret.foreign or o.engine is None or not offers_serving(o.engine):
        return None
    version = clip(serving.version, 320) if serving else ""
    return ServingStatus(endpoint=_endpoint(o.engine, settings), secret_name=secret.name, version=version)


def _endpoint(engine: Engine, settings: Settings) -> str:
    assert engine.spec is not None
    if engine.spec.serving.endpoint is not None:
        return engine.spec.serving.endpoint
    if engine.spec.endpoint is not None:
        return ""
    if settings.service_addressing is ServiceAddressing.DNS:
        return f"http://{engine.meta.name}.{engine.meta.namespace}.svc:{TENANT_PORT}/v1"
    # of the Service, as the operator itself reaches it
    host = engine.status.endpoint.rpartition(":")[0]
    return f"{host}:{TENANT_PORT}/v1" if host else ""


# ------------------------------------------------------------------------------------------------ after the end


def serving_after_the_end(case: Case) -> Plan:
    """Plan() of one that is not to be served, and was not."""
    o, settings = case.o, case.settings
    verdict = served(o, case.seconds_silent, settings)
    asked = o.serving_secret is not None and offers_serving(o.engine)
    wanted = asked and not cannot_be_served(o.serving_secret, o.memory.secret_problem, o.view)
    action, again = _engine_action(case, wanted)
    status = _with_serving(o, verdict, settings, case.now)
    old, new = o.experiment.raw_status, status.to_api()
    if verdict is None and o.serving_secret is None and o.experiment.status.serving is None:
        new = dict(old)  # nothing of it is anybody's business
    weight = weigh(old, new)
    delay = delay_of_write(weight, o.memory.last_write, case.now, settings)
    write = weight != "none" and delay == 0
    made = secret_actions(o)
    # no event tells of a Secret that has come, gone or changed
    waits = [again, delay or None, 0.0 if made else None, *((_until_said(case), LOOK_AGAIN_SECONDS) if asked else ())]
    return Plan(
        actions=(*made, *((action,) if action else ())),
        status=new if write else None,
        events=events_of(transitions(o.experiment.status.conditions, status.conditions)) if write else (),
        requeue_after=soonest(*waits),
        wants_slot=wanted and not _waits_for_its_commits(case),
    )


def _waits_for_its_commits(case: Case) -> bool:
    """Without a slot, as one that trains: it is asked for now and then."""
    answer = case.o.memory.answer
    if answer is None or not answer.without_commits or (case.report is not None and case.report.keeps_slot):
        return False
    return (case.now - answer.at).total_seconds() < LOOK_AGAIN_SECONDS


def _engine_action(case: Case, wanted: bool) -> tuple[Action | None, float | None]:
    """What the engine is to be told, and when to look again. It is not told what it knows."""
    o, report, assignment = case.o, case.report, case.o.assignment
    holds = report is not None and report.keeps_slot
    evicted = assignment is not None and assignment.reason in EVICTING
    if holds and (not wanted or evicted):
        return DeleteOnEngine(engine_key(o), o.experiment.meta.uid, "Retain"), ASK_AGAIN_SECONDS
    secret = o.serving_secret
    if not wanted or secret is None or secret.token is None or assignment is None or not assignment.admitted:
        return None, None
    if report is not None and report.phase is Phase.DELETING:
        return None, ASK_AGAIN_SECONDS
    if o.view is None or not o.view.ready or o.view.info is None or not o.view.info.serves:
        return None, None
    desired, answer = to_be_served(o), o.memory.answer
    if desired is None:
        return serving_call(case)  # its spec cannot be read: nothing but who may ask for it is told
    if _knows(o, report, desired):
        return None, None
    left = 0.0
    if answer is not None and (answer.trouble or (report is not None and report.serving is not None)):
        stuck = answer.without_commits or (report is not None and report.serving is not None)
        pause = LOOK_AGAIN_SECONDS if stuck else PUT_RETRY_SECONDS
        left = pause - (case.now - answer.at).total_seconds() if answer.token == token_digest(desired) else 0.0
    return (None, left) if left > 0 else (PutOnEngine(engine_key(o), desired), 0.0)


def _knows(o: ObservedExperiment, report: ExperimentReport | None, desired: DesiredExperiment) -> bool:
    """The engine holds a slot for it, and has its token and its weight; an engine of an earlier release says none."""
    if report is None or not report.keeps_slot:
        return False
    weight = report.serving.weight if report.serving else None
    return weight in (None, desired.spec.weight) and knows_token(o, report, token_digest(desired))


def knows_token(o: ObservedExperiment, report: ExperimentReport, token: str) -> bool:
    """Whether the engine was told this token last, as far as is remembered: it tells nobody. Of an experiment that it
    knows it takes the token also when it refuses the spec."""
    answer, call = o.memory.answer, o.memory.serving
    if call is not None and (answer is None or answer.at <= call.at):
        return not call.error and call.token == token
    if answer is None or (answer.trouble and not answer.invalid):
        return not token and report.serving is None
    return answer.token == token


def serving_call(case: Case) -> tuple[Action | None, float | None]:
    """For one that its engine knows, when nothing else is told that goes with a token, whatever the reason: its spec is
    refused or cannot be read, or its data are gone. A revoked token has to end all the same."""
    o, report, call = case.o, case.report, case.o.memory.serving
    if report is None or report.phase is Phase.DELETING or o.view is None or not o.view.reachable:
        return None, None
    wanted = desired_serving(o)
    weighs = report.serving.weight if report.serving else None
    told = call is not None and not call.error and call.weight == wanted.weight
    same_weight = told or wanted.weight is None or weighs in (None, wanted.weight)
    if same_weight and knows_token(o, report, token_digest(wanted)):
        return None, None
    if call is not None and call.error:
        pause = OLD_ENGINE_SECONDS if _too_old(o) else PUT_RETRY_SECONDS
        left = pause - (case.now - call.at).total_seconds()
        if left > 0 and call.token == token_digest(wanted):
            return None, left
    return ServeOnEngine(engine_key(o), o.experiment.meta.uid, wanted), 0.0


def _until_said(case: Case) -> float | None:
    """Until a silent engine counts as unreachable."""
    if case.o.view is not None and case.o.view.reachable:
        return None
    left = case.settings.unreachable_grace_seconds - case.seconds_silent
    return left if left > 0 else None


def _with_serving(
    o: ObservedExperiment, verdict: Verdict | None, settings: Settings, now: datetime
) -> ExperimentStatus:
    """Its status as it ended, but for what is said of serving."""
    old, generation = o.experiment.status, o.experiment.meta.generation
    verdicts = {ExperimentCondition.SERVED.value: verdict} if verdict is not None else {}
    conditions = set_conditions(old.conditions, verdicts, generation, now)
    state = derive_state({c.type: (c.status, c.reason) for c in conditions})
    serving = serving_status(o, settings)
    update = {"conditions": conditions, "observed_generation": generation, "state": state, "serving": serving}
    return old.model_copy(update=update)
