"""What is said of an experiment's trackers: condition Tracked. Pure.

Nothing else is decided here: trouble with a tracker changes no course of an experiment.
"""

from __future__ import annotations

from clora_api.v1alpha1.conditions import ExperimentCondition, Reason
from clora_operator.observe import ObservedExperiment
from clora_operator.resources import find_condition
from clora_operator.status import Verdict, clip


def tracked(o: ObservedExperiment) -> Verdict | None:
    """None: nothing is to be said, or what was said last still stands."""
    spec, before = o.experiment.spec, find_condition(o.experiment.status.conditions, ExperimentCondition.TRACKED)
    if spec is None:
        return None
    if not spec.tracking:
        return Verdict("False", Reason.NOT_TRACKED, "spec.tracking names no tracker") if before else None
    if o.tracking_keys is not None and o.tracking_keys.missing:
        return Verdict("False", Reason.TRACKING_SECRET_UNUSABLE, clip(o.tracking_keys.missing, 1024))
    reported = o.report.tracking if o.report else []
    if not reported:
        return None
    problems = [f"{tracker.kind}: {tracker.problem}" for tracker in reported if tracker.problem]
    if problems:
        return Verdict("False", Reason.TRACKING_FAILED, clip("; ".join(problems), 1024))
    if any(tracker.step is None for tracker in reported):
        return None  # it has just begun
    named = ", ".join(f"{tracker.kind} ({tracker.mode})" for tracker in spec.tracking)
    return Verdict("True", Reason.TRACKING, f"{named} get the metrics of every commit")
