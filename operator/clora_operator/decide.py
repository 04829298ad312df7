"""decide_experiment: all policy about one LoRAExperiment. Pure: what was observed and the time go in, a Plan comes out.

The questions of `_course` are asked in order and the first that has an answer decides. The engine's answer outranks
memory and status. Leaves out deletion (decide_release) and which engine an experiment belongs to (placement).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from clora_api import FINALIZER
from clora_api.control import DesiredExperiment, ExperimentReport, Phase
from clora_api.v1alpha1.conditions import ExperimentCondition, Reason
from clora_operator.case import (
    LOOK_AGAIN_SECONDS,
    PUT_RETRY_SECONDS,
    Case,
    attaching,
    leave_slot,
    unaccepted,
    waiting,
)
from clora_operator.claims import EVICTING, NOT_LET_IN, Assignment, taken_by
from clora_operator.decide_end import after_the_end
from clora_operator.decide_release import decide_release
from clora_operator.decide_serving import knows_token, secret_actions, served, serving_call, serving_status
from clora_operator.decide_tracking import tracked
from clora_operator.desired import engine_key, keys_digest, token_digest
from clora_operator.experiment_status import Course, End, experiment_plan
from clora_operator.observe import ObservedExperiment, lacks_commits
from clora_operator.plan import AddFinalizer, DeleteOnEngine, Plan, PutOnEngine, soonest
from clora_operator.resources import find_condition, from_rfc3339
from clora_operator.settings import Settings
from clora_operator.status import Verdict, clip

LONGEST_BACKOFF_SECONDS = 300.0


def decide_experiment(o: ObservedExperiment, now: datetime, settings: Settings) -> Plan:
    if o.experiment.meta.deleted is not None:
        return decide_release(o, now, settings)
    over, told = o.experiment.finished, o.experiment.status.engine is not None
    if FINALIZER not in o.experiment.meta.finalizers and (told or not over):
        return Plan(actions=(AddFinalizer(),))  # also of one that has ended, whose finalizer an uninstall has taken
    if over:
        return after_the_end(o, now, settings)
    if o.assignment is None:
        return Plan()  # placement has not seen it yet and will wake it
    case = Case(o, now, settings)
    course = next(course for question in _QUESTIONS if (course := question(case)) is not None)
    if case.occupying and (problem := _what_is_wrong_with_its_spec(case)) is not None:
        again = LOOK_AGAIN_SECONDS if course.requeue_after is None else course.requeue_after
        course = replace(course, accepted=problem, requeue_after=again)
    if course.undecided:
        return Plan(wants_slot=True)
    course = _with_its_token(case, course)
    if made := secret_actions(o):
        course = replace(course, actions=(*made, *course.actions), requeue_after=0.0)
    course = replace(course, served=served(o, case.seconds_silent, settings), tracked=tracked(o))
    if o.tracking_keys is not None and course.end is None:  # no event tells of a Secret
        course = replace(course, requeue_after=soonest(course.requeue_after, LOOK_AGAIN_SECONDS))
    return experiment_plan(o, course, serving_status(o, settings), now, settings)


# ------------------------------------------------------------------------------- the questions, in order


def _has_it_ended(case: Case) -> Course | None:
    report, attempts = case.report, case.o.experiment.status.restarts
    if report is None:
        return None
    if report.phase is Phase.SUCCEEDED:
        return Course(end=End(ExperimentCondition.SUCCEEDED, Reason.COMPLETED, report.message or "all steps are made"))
    if report.phase is not Phase.FAILED or report.attempt < attempts:
        return None
    if not report.retryable:
        where = f"{_field(report.field)}: " if report.field else ""
        reason, message = _engines_word(report)
        return Course(end=End(ExperimentCondition.FAILED, reason, where + message))
    limit = case.o.experiment.spec.backoff_limit if case.o.experiment.spec else 0
    if report.attempt >= limit:
        message = f"failed {report.attempt + 1} times, backoffLimit is {limit}; the last time: {report.message}"
        return Course(end=End(ExperimentCondition.FAILED, Reason.BACKOFF_LIMIT_EXCEEDED, message))
    return None


def _is_it_overdue(case: Case) -> Course | None:
    deadline = _deadline(case)
    if deadline is None or case.now < deadline:
        return None
    message = f"not finished after activeDeadlineSeconds {case.spec.active_deadline_seconds}"
    return Course(end=End(ExperimentCondition.FAILED, Reason.DEADLINE_EXCEEDED, message))


def _is_it_unacceptable(case: Case) -> Course | None:
    o = case.o
    assert o.assignment is not None
    if o.experiment.spec is None and not case.occupying:
        return unaccepted(Reason.INVALID_SPEC, o.experiment.invalid)
    if o.assignment.reason in (Reason.ENGINE_NOT_FOUND, Reason.RANK_TOO_HIGH):
        return unaccepted(o.assignment.reason, o.assignment.message)
    if o.assignment.reason in NOT_LET_IN | {Reason.DOES_NOT_FIT} and not case.occupying:
        return unaccepted(o.assignment.reason, o.assignment.message)
    if case.occupying:
        return None  # what it runs with was accepted, whatever has happened to its spec and its sources since
    if o.priority.reason is not None:
        return unaccepted(o.priority.reason, o.priority.problem)
    if o.data_missing:
        return replace(unaccepted(Reason.DATA_NOT_FOUND, o.data_missing), requeue_after=LOOK_AGAIN_SECONDS)
    if o.init is not None and o.init.source is None and o.init.reason != Reason.WAITING_FOR_INIT:
        assert o.init.reason is not None
        return unaccepted(o.init.reason, o.init.message)
    if o.init is not None and o.init.engine not in (None, case.engine_name):
        message = f"initFrom.experiment: its steps are on LoRAEngine {o.init.engine}, not on {case.engine_name}"
        return unaccepted(Reason.INIT_FROM_NOT_FOUND, message)
    if (wrong := _what_is_wrong_with_its_spec(case)) is not None:
        return replace(unaccepted(Reason.INVALID_SPEC, wrong.message), requeue_after=LOOK_AGAIN_SECONDS)
    return None


def _what_is_wrong_with_its_spec(case: Case) -> Verdict | None:
    """What runs with an earlier one goes on, or leaves, all the same."""
    if case.o.experiment.spec is None:
        return Verdict("False", Reason.INVALID_SPEC, case.o.experiment.invalid)
    problem = case.refusal
    if problem is None:
        return None
    where = f"{_field(problem.field)}: " if problem.field else ""
    return Verdict("False", Reason.INVALID_SPEC, where + (problem.detail or problem.title))


def _is_its_engine_silent(case: Case) -> Course | None:
    """Only for an experiment that may be running there: whoever waits, waits for a ready engine anyway."""
    view = case.o.view
    before = find_condition(case.o.experiment.status.conditions, ExperimentCondition.ATTACHED)
    live = case.occupying or (before is not None and (before.status != "False" or before.reason == Reason.ATTACHING))
    if not live or (view is not None and view.reachable):
        return None
    left = case.settings.unreachable_grace_seconds - case.seconds_silent
    if left > 0:
        return Course(requeue_after=left, wants_slot=True)
    trouble = (view.error if view else "") or "no answer yet"
    how = "is not ready" if view is not None and view.starting else "does not answer"
    message = f"LoRAEngine {case.engine_name} {how}: {trouble}"
    unknown = Verdict("Unknown", Reason.ENGINE_UNREACHABLE, message)
    return Course(attached=unknown, progressing=unknown, wants_slot=True)


def _is_it_suspended(case: Case) -> Course | None:
    spec = case.o.experiment.spec
    if spec is None or not spec.suspend:
        return None
    if not case.occupying:
        return waiting(Reason.SUSPENDED, "spec.suspend is true")
    return leave_slot(case, Reason.SUSPENDING, "finishing the step before the suspension")


def _must_it_leave(case: Case) -> Course | None:
    """Placement wants its slot back."""
    assignment = case.o.assignment
    assert assignment is not None
    if not case.occupying or assignment.reason not in EVICTING:
        return None
    course = leave_slot(case, assignment.reason, f"finishing the step before it detaches: {assignment.message}")
    return replace(
        course, wants_slot=True, queue_position=assignment.position, preempted_by=assignment.preemptor or None
    )


def _does_it_wait_after_a_failure(case: Case) -> Course | None:
    report, attempts = case.report, case.o.experiment.status.restarts
    if report is None or report.phase is not Phase.FAILED:
        return None
    attempt = max(attempts, report.attempt + 1)
    pause = min(case.settings.retry_backoff_seconds * 2 ** min(attempt - 1, 16), LONGEST_BACKOFF_SECONDS)
    seen = case.o.memory.failed
    since = seen[1] if seen and seen[0] == report.attempt else case.now
    left = pause - (case.now - since).total_seconds()
    if left <= 0 and attempts == attempt:
        return None
    tries = f"try {attempt} of {case.spec.backoff_limit} follows {pause:g} s after the failure"
    message = f"{tries}; {report.reason}: {report.message}"
    return replace(waiting(Reason.RETRYING, message), restarts=attempt, requeue_after=max(left, 0.0))


def _does_it_wait_for_its_commits(case: Case) -> Course | None:
    """Without a slot: others can use it while somebody looks for the volume."""
    answer = case.o.memory.answer
    if answer is None or not answer.without_commits or case.occupying:
        return None
    left = LOOK_AGAIN_SECONDS - (case.now - answer.at).total_seconds()
    info = case.o.view.info if case.o.view else None
    restarted = info is not None and answer.epoch not in (None, info.epoch)  # with its volume again, or its model
    if left <= 0 or restarted:
        return None
    return replace(waiting(Reason.CHECKPOINT_UNREACHABLE, answer.trouble), requeue_after=left)


def _does_it_wait_for_a_slot(case: Case) -> Course | None:
    o = case.o
    assert o.assignment is not None
    if case.occupying:
        return None
    if o.init is not None and o.init.source is None:
        return waiting(Reason.WAITING_FOR_INIT, o.init.message)
    if o.assignment.reason is None and not o.assignment.admitted:
        return Course(undecided=True)  # placement has yet to learn that it wants a slot
    if o.assignment.reason is Reason.ENGINE_DRAINING:
        return replace(waiting(o.assignment.reason, o.assignment.message), wants_slot=True)
    if o.view is None or not o.view.ready:
        if _just_asked(case):
            return Course(requeue_after=1.0, wants_slot=True, queue_position=o.experiment.status.queue_position)
        message = f"LoRAEngine {case.engine_name} is not ready"
        if o.assignment.reason is Reason.WAITING_FOR_ENGINE:
            message = o.assignment.message
        return replace(waiting(Reason.WAITING_FOR_ENGINE, message), wants_slot=True)
    if o.assignment.admitted:
        return None
    assert o.assignment.reason is not None
    return replace(_in_the_queue(case, o.assignment), wants_slot=True, queue_position=o.assignment.position)


def _just_asked(case: Case) -> bool:
    """An operator that has just started has no answer of the engine's yet: who was in its queue is still there."""
    view, status = case.o.view, case.o.experiment.status
    attached = find_condition(status.conditions, ExperimentCondition.ATTACHED)
    if attached is None or attached.reason not in (Reason.QUEUED, Reason.PREEMPTED):
        return False
    if view is not None and (view.info is not None or view.error):
        return False
    return case.seconds_silent < case.settings.unreachable_grace_seconds


def _in_the_queue(case: Case, assignment: Assignment) -> Course:
    """Who was preempted says so until it has a slot again; and who cannot start, so that nobody is preempted for it."""
    assert assignment.reason is not None
    if lacks_commits(case.o.experiment, case.o.memory):
        message = f"the engine's storage lacked its commits when it was last asked; {assignment.message}"
        return waiting(Reason.CHECKPOINT_UNREACHABLE, message)
    preemptor = assignment.preemptor or case.o.experiment.status.preempted_by
    if not preemptor or assignment.reason not in (Reason.QUEUED, Reason.PREEMPTED):
        return waiting(assignment.reason, assignment.message)
    message = assignment.message
    if assignment.reason is Reason.QUEUED:
        message = f"{taken_by(preemptor)}; {message}"
    return replace(waiting(Reason.PREEMPTED, message), preempted_by=preemptor)


def _how_is_it_attached(case: Case) -> Course:
    """It has a slot, or may take one."""
    o, report = case.o, case.report
    status = o.experiment.status
    claimed = status.engine is not None and status.engine.name == case.engine_name
    course = attaching(f"LoRAEngine {case.engine_name} prepares the adapter")
    if not claimed or (o.init is not None and status.init_from is None):
        # Written before the engine is told: an operator that dies in between must not choose another engine.
        return replace(course, claim=True, requeue_after=0.0)
    desired = None if case.refusal is not None else case.desired
    if desired is not None and (report is None or _differs(case, report, desired)):
        return _put(case, desired, course)
    if report is None:
        return course
    if report.phase is Phase.RUNNING and report.adapter_loaded:
        message = f"LoRAEngine {case.engine_name} holds the adapter (epoch {report.epoch})"
        progressing = Verdict("True", Reason.RUNNING, "steps are being made")
        if report.reason == Reason.STORAGE_FULL:
            progressing = Verdict("False", Reason.STORAGE_FULL, clip(report.message, 1024))
        attached = Verdict("True", Reason.ENGINE_CONFIRMED, message)
        course = Course(attached=attached, progressing=progressing, wants_slot=True)
    return course


_QUESTIONS: tuple[Callable[[Case], Course | None], ...] = (
    _has_it_ended,
    _is_it_unacceptable,
    _is_it_overdue,
    _is_its_engine_silent,
    _is_it_suspended,
    _must_it_leave,
    _does_it_wait_after_a_failure,
    _does_it_wait_for_its_commits,
    _does_it_wait_for_a_slot,
    _how_is_it_attached,
)


# ------------------------------------------------------------------------------- helpers


def _put(case: Case, desired: DesiredExperiment, course: Course) -> Course:
    """Tells the engine, unless it did not take the same a moment ago. A running experiment's conditions wait for the
    answer: a change of its spec is no detachment."""
    attached = find_condition(case.o.experiment.status.conditions, ExperimentCondition.ATTACHED)
    if case.occupying and attached is not None and attached.status == "True":
        course = replace(course, attached=None)
    answer = case.o.memory.answer
    if answer is None or answer.digest != case.digest:
        return replace(course, actions=(PutOnEngine(engine_key(case.o), desired),), requeue_after=0.0)
    left = PUT_RETRY_SECONDS - (case.now - answer.at).total_seconds()
    if answer.full and case.o.view is not None and case.o.view.full_until is None:
        left = 0.0  # a slot has become free since
    if not answer.trouble or left <= 0:
        return replace(course, actions=(PutOnEngine(engine_key(case.o), desired),), requeue_after=0.0)
    if course.attached is not None and answer.full:
        course = replace(waiting(Reason.QUEUED, answer.trouble), wants_slot=True)
    elif course.attached is not None:
        course = attaching(f"LoRAEngine {case.engine_name} has not taken it and is asked again: {answer.trouble}")
    return replace(course, requeue_after=left)


def _with_its_token(case: Case, course: Course) -> Course:
    """Unless the engine is told with everything else, or to let go of it."""
    if any(isinstance(action, PutOnEngine | DeleteOnEngine) for action in course.actions):
        return course
    call, again = serving_call(case)
    actions = (*course.actions, call) if call is not None else course.actions
    return replace(course, actions=actions, requeue_after=soonest(course.requeue_after, again))


def _differs(case: Case, report: ExperimentReport, desired: DesiredExperiment) -> bool:
    if report.phase is Phase.DELETING:
        return False
    told = (report.spec_digest, report.mode) == (case.digest, desired.mode)
    if not told or report.attempt < desired.attempt or not knows_token(case.o, report, token_digest(desired)):
        return True
    answer, keys = case.o.memory.answer, keys_digest(desired)
    return keys != ("" if answer is None or answer.trouble else answer.keys)


def _deadline(case: Case) -> datetime | None:
    start, spec = case.o.experiment.status.start_time, case.o.experiment.spec
    seconds = spec.active_deadline_seconds if spec else None
    return from_rfc3339(start) + timedelta(seconds=seconds) if start and seconds else None


def _field(path: str | None) -> str:
    return path if path and path.startswith("spec") else f"spec.{path}"


def _engines_word(report: ExperimentReport) -> tuple[Reason, str]:
    """Reason and message of a failure. A reason that is not in the list, of another release's engine say, is told in
    the message: programs that read conditions know the list."""
    if report.reason in _REASONS:
        return Reason(report.reason), report.message
    return Reason.EXPERIMENT_ERROR, f"{report.reason}: {report.message}" if report.reason else report.message


_REASONS = frozenset(Reason)
