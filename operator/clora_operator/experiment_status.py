"""From the course that decide has found for an experiment to its whole status, its events, and when to write. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from clora_api.control import ExperimentReport
from clora_api.v1alpha1.conditions import ExperimentCondition, Reason, derive_state
from clora_api.v1alpha1.experiment import (
    BestCheckpoint,
    CheckpointStatus,
    Condition,
    EngineStatusRef,
    ExperimentStatus,
    InitFromStatus,
    Progress,
    ServingStatus,
)
from clora_operator.claims import EVICTING
from clora_operator.observe import ObservedExperiment
from clora_operator.plan import Action, Event, Plan, soonest
from clora_operator.resources import find_condition, from_rfc3339, to_rfc3339
from clora_operator.settings import Settings
from clora_operator.status import Verdict, clip, delay_of_write, event_of, set_conditions, transitions, weigh

SPEC_VALID = Verdict("True", Reason.SPEC_VALID, "the spec can run on its engine")


@dataclass(frozen=True, slots=True)
class End:
    kind: Literal[ExperimentCondition.SUCCEEDED, ExperimentCondition.FAILED]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What is to be said and done of an unfinished experiment.

    accepted, attached, progressing   None: as it was (accepted: SpecValid, unless the engine had refused this spec)
    served, tracked                   None: as it was
    claim                             write into status which engine it belongs to, and what it starts from
    restarts                          retries so far; None: as it was
    preempted_by                      who has taken its slot; None: as it was, until it has a slot again
    undecided                         nothing can be said before the next placement
    """

    accepted: Verdict | None = None
    attached: Verdict | None = None
    progressing: Verdict | None = None
    served: Verdict | None = None
    tracked: Verdict | None = None
    end: End | None = None
    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None
    wants_slot: bool = False
    queue_position: int | None = None
    claim: bool = False
    restarts: int | None = None
    preempted_by: str | None = None
    undecided: bool = False


def experiment_plan(
    o: ObservedExperiment, course: Course, serving: ServingStatus | None, now: datetime, settings: Settings
) -> Plan:
    """The Plan of a course: its status is written now, or not yet, or not at all."""
    old = o.experiment.status
    new = _status(o, course, now).model_copy(update={"serving": serving})
    raw_old, raw_new = o.experiment.raw_status, new.to_api()
    weight = weigh(raw_old, raw_new)
    delay = delay_of_write(weight, o.memory.last_write, now, settings)
    write = weight != "none" and delay == 0
    return Plan(
        actions=course.actions,
        status=raw_new if write else None,
        events=events_of(transitions(old.conditions, new.conditions)) if write else (),
        requeue_after=soonest(course.requeue_after, delay or None, _until_deadline(o, new, now)),
        wants_slot=course.wants_slot,
    )


def _status(o: ObservedExperiment, course: Course, now: datetime) -> ExperimentStatus:
    old, report = o.experiment.status, o.report
    verdicts = _verdicts(o, course)
    conditions = set_conditions(old.conditions, verdicts, o.experiment.meta.generation, now)
    attached = verdicts.get(ExperimentCondition.ATTACHED)
    attached_now = attached is not None and attached.status == "True"
    init = o.init.source if o.init and (course.claim or old.init_from) else None
    return ExperimentStatus(
        conditions=conditions,
        observed_generation=o.experiment.meta.generation,
        state=derive_state({c.type: (c.status, c.reason) for c in conditions}),
        engine=_engine(o, course),
        progress=_progress(o, report) if report else old.progress,
        queue_position=course.queue_position,
        restarts=old.restarts if course.restarts is None else course.restarts,
        checkpoint=_checkpoint(report) or old.checkpoint,
        best_checkpoint=_best(report) or old.best_checkpoint,
        init_from=InitFromStatus(uid=init.uid, step=init.step) if init else old.init_from,
        start_time=old.start_time or (to_rfc3339(now) if attached_now or (course.end and report) else None),
        completion_time=to_rfc3339(now) if course.end else None,
        preempted_by=_preempted_by(old, course),
    )


def _preempted_by(old: ExperimentStatus, course: Course) -> str | None:
    """Forgotten once it has a slot again, or does not wait for one any more."""
    over = course.attached is not None and course.attached.reason in _NOT_PREEMPTED
    return None if course.end or over else course.preempted_by or old.preempted_by


def _verdicts(o: ObservedExperiment, course: Course) -> dict[str, Verdict]:
    if course.end is not None:
        end = course.end
        other: dict[str, Verdict] = {
            ExperimentCondition.SUCCEEDED: Verdict("False", end.reason),
            ExperimentCondition.FAILED: Verdict("False", Reason.NOT_FAILED),
        }
        kept = o.report is not None and o.report.keeps_slot
        slot = "it keeps its slot to be served" if kept else "its slot is free"
        stopped = Verdict("False", Reason.DETACHED, f"the experiment has ended; {slot}")
        return _known(
            {
                ExperimentCondition.ACCEPTED: course.accepted or _accepted(o),
                ExperimentCondition.ATTACHED: stopped,
                ExperimentCondition.PROGRESSING: Verdict("False", end.reason, end.message),
                **other,
                end.kind: Verdict("True", end.reason, end.message),
                ExperimentCondition.SERVED: course.served,
                ExperimentCondition.TRACKED: course.tracked,
            }
        )
    return _known(
        {
            ExperimentCondition.ACCEPTED: course.accepted or _accepted(o),
            ExperimentCondition.ATTACHED: course.attached,
            ExperimentCondition.PROGRESSING: course.progressing if course.attached else None,
            ExperimentCondition.SUCCEEDED: Verdict("False", Reason.NOT_FINISHED),
            ExperimentCondition.FAILED: Verdict("False", Reason.NOT_FAILED),
            ExperimentCondition.SERVED: course.served,
            ExperimentCondition.TRACKED: course.tracked,
        }
    )


def _known(said: dict[str, Verdict | None]) -> dict[str, Verdict]:
    return {kind: verdict for kind, verdict in said.items() if verdict is not None}


def _accepted(o: ObservedExperiment) -> Verdict:
    """An engine's refusal of this very spec stands until the engine has taken it: a restarted operator, which has
    forgotten the answer, asks again without saying meanwhile that all is well. What runs while its priority class goes
    runs on, at priority 0."""
    if o.priority.reason is not None:
        return Verdict("False", o.priority.reason, o.priority.problem)
    before = find_condition(o.experiment.status.conditions, ExperimentCondition.ACCEPTED)
    refused = before is not None and before.status == "False" and before.reason == Reason.INVALID_SPEC
    unanswered = o.report is None and o.memory.answer is None
    if before is not None and refused and unanswered and before.observed_generation == o.experiment.meta.generation:
        return Verdict("False", Reason.INVALID_SPEC, before.message)
    return SPEC_VALID


def _engine(o: ObservedExperiment, course: Course) -> EngineStatusRef | None:
    old, report = o.experiment.status.engine, o.report
    if report is not None and (old is not None or course.claim):
        return EngineStatusRef(
            name=old.name if old else (o.assignment.engine or "" if o.assignment else ""),
            epoch=report.epoch,
            adapter_version=clip(report.adapter_version, 128),
            adapter_digest=clip(report.adapter_digest, 128),
        )
    if course.claim and o.assignment is not None and o.assignment.engine is not None:
        epoch = o.view.info.epoch if o.view and o.view.info else 0
        return EngineStatusRef(name=o.assignment.engine, epoch=epoch)
    return old


def _progress(o: ObservedExperiment, report: ExperimentReport) -> Progress:
    said = report.progress
    spec = o.experiment.spec
    max_steps = spec.max_steps if spec else said.max_steps
    left = None
    if said.seconds_per_step is not None and math.isfinite(said.seconds_per_step):
        left = max(0, round((max_steps - said.step) * said.seconds_per_step))
    finite = {name: value for name, value in sorted(said.metrics.items()) if math.isfinite(value)}
    return Progress(
        step=said.step,
        max_steps=max_steps,
        percent=max(0, min(100, said.step * 100 // max_steps)) if max_steps else 0,
        reward=_short(said.reward) if said.reward is not None and math.isfinite(said.reward) else "",
        phase=clip(said.activity, 32),
        metrics={name: _short(value) for name, value in list(finite.items())[:16] if len(name) <= 253},
        seconds_waited=max(0, round(said.seconds_waited)) if math.isfinite(said.seconds_waited) else 0,
        estimated_remaining_seconds=left,
        last_step_time=clip(said.last_step_time, 64) if said.last_step_time else None,
    )


def _checkpoint(report: ExperimentReport | None) -> CheckpointStatus | None:
    if report is None or report.checkpoint is None:
        return None
    said = report.checkpoint
    return CheckpointStatus(step=said.step, path=clip(said.path, 1024), digest=clip(said.digest, 128))


def _best(report: ExperimentReport | None) -> BestCheckpoint | None:
    if report is None or report.best is None or not math.isfinite(report.best.value):
        return None
    best = report.best
    return BestCheckpoint(step=best.step, metric=clip(best.metric, 64), value=_short(best.value))


def _short(value: float) -> str:
    return f"{value:.4g}"


def _until_deadline(o: ObservedExperiment, status: ExperimentStatus, now: datetime) -> float | None:
    seconds = o.experiment.spec.active_deadline_seconds if o.experiment.spec else None
    if seconds is None or status.start_time is None or status.completion_time is not None:
        return None
    return max(0.1, (from_rfc3339(status.start_time) + timedelta(seconds=seconds) - now).total_seconds())


def events_of(changed: list[Condition]) -> tuple[Event, ...]:
    """One for each transition that a person would want to be told of."""
    events = []
    for condition in changed:
        kind, status = condition.type, condition.status
        if kind == ExperimentCondition.ACCEPTED and status == "False":
            events.append(event_of(condition, warning=True))
        elif kind == ExperimentCondition.ATTACHED and status == "True" and condition.reason in EVICTING:
            continue  # told once it has left
        elif kind == ExperimentCondition.ATTACHED and condition.reason not in _TOLD_ELSEWHERE:
            events.append(event_of(condition, warning=status == "Unknown"))
        elif kind == ExperimentCondition.PROGRESSING and condition.reason == Reason.RETRYING:
            events.append(event_of(condition, warning=True))
        elif kind == ExperimentCondition.SERVED and condition.reason not in _NO_NEWS_OF_SERVING:
            events.append(event_of(condition, warning=condition.reason in _TROUBLE_OF_SERVING))
        elif kind == ExperimentCondition.TRACKED and condition.reason != Reason.NOT_TRACKED:
            events.append(event_of(condition, warning=status == "False"))
        elif kind in (ExperimentCondition.SUCCEEDED, ExperimentCondition.FAILED) and status == "True":
            events.append(event_of(condition, warning=kind == ExperimentCondition.FAILED))
    return tuple(events)


# reasons of Served that pass by themselves, or that somebody has chosen
_NO_NEWS_OF_SERVING = {
    Reason.NOT_ATTACHED,
    Reason.ATTACHING,
    Reason.QUEUED,
    Reason.WAITING_FOR_ENGINE,
    Reason.NOT_SERVED,
}
_TROUBLE_OF_SERVING = {
    Reason.SERVING_FAILED,
    Reason.SECRET_IN_USE,
    Reason.SECRET_REFUSED,
    Reason.SERVING_NOT_OFFERED,
}

# reasons of Attached with which a preemption is over
_NOT_PREEMPTED = {Reason.ENGINE_CONFIRMED, Reason.SUSPENDING, Reason.SUSPENDED}

# reasons of Attached that another condition's event tells
_TOLD_ELSEWHERE = {
    Reason.RETRYING,
    Reason.DETACHED,
    Reason.INVALID_SPEC,
    Reason.ENGINE_NOT_FOUND,
    Reason.RANK_TOO_HIGH,
    Reason.DOES_NOT_FIT,
    Reason.PRIORITY_CLASS_NOT_FOUND,
    Reason.PRIORITY_CLASS_NOT_ALLOWED,
    Reason.PRIORITY_CLASS_UNREADABLE,
    Reason.NAMESPACE_NOT_ALLOWED,
    Reason.NAMESPACE_UNREADABLE,
    Reason.DATA_NOT_FOUND,
    Reason.INIT_FROM_NOT_FOUND,
    Reason.INIT_FROM_FAILED,
}
