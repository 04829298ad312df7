"""What is done about a LoRAExperiment that has succeeded or failed: an engine which still runs it (a deadline has
passed) is told to stop, and once ttlSecondsAfterFinished are over it is deleted. Pure.

But for its serving (decide_serving) its status stays as it is: what has ended never runs again. Leaves out the release
of what it holds: deletion is an ordinary one, with its finalizer and its deletionPolicy.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from clora_api.control import Phase, RunMode
from clora_api.v1alpha1.conditions import ExperimentCondition
from clora_operator.case import PUT_RETRY_SECONDS, Case, let_go
from clora_operator.decide_serving import serving_after_the_end
from clora_operator.observe import ObservedExperiment
from clora_operator.plan import DeleteExperiment, Plan
from clora_operator.resources import Experiment, find_condition, from_rfc3339
from clora_operator.settings import Settings


def after_the_end(o: ObservedExperiment, now: datetime, settings: Settings) -> Plan:
    report = o.report
    if report is not None and report.phase in (Phase.PREPARING, Phase.RUNNING) and report.mode is not RunMode.SUSPEND:
        return Plan(actions=(let_go(Case(o, now, settings)),), requeue_after=PUT_RETRY_SECONDS)
    seconds = o.experiment.spec.ttl_seconds_after_finished if o.experiment.spec else None
    plan = serving_after_the_end(Case(o, now, settings))
    if seconds is None:
        return plan
    left = (_ended_at(o.experiment) + timedelta(seconds=seconds) - now).total_seconds()
    if left <= 0:
        return Plan(actions=(DeleteExperiment(),))
    return replace(plan, requeue_after=left if plan.requeue_after is None else min(left, plan.requeue_after))


def _ended_at(experiment: Experiment) -> datetime:
    """status.completionTime; where somebody has removed or spoilt it, the time of the condition that says the end."""
    status = experiment.status
    try:
        return from_rfc3339(status.completion_time or "")
    except ValueError:
        ends = (find_condition(status.conditions, kind) for kind in _ENDS)
        return max(from_rfc3339(end.last_transition_time) for end in ends if end is not None and end.status == "True")


_ENDS = (ExperimentCondition.SUCCEEDED, ExperimentCondition.FAILED)
