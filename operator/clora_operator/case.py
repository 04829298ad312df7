"""One decision's inputs about one experiment, and the courses that several questions answer with. Pure.

Leaves out the questions themselves: those are decide's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from clora_api.control import OCCUPYING, DesiredExperiment, ExperimentReport, RunMode, spec_digest
from clora_api.v1alpha1.conditions import Reason
from clora_api.v1alpha1.experiment import ExperimentSpec
from clora_operator.desired import desired_experiment, engine_key
from clora_operator.experiment_status import Course
from clora_operator.observe import ObservedExperiment
from clora_operator.plan import Action, PutOnEngine
from clora_operator.settings import Settings
from clora_operator.status import Verdict

PUT_RETRY_SECONDS = 5.0  # after a PUT that the engine did not answer
LOOK_AGAIN_SECONDS = 30.0  # for what no event tells: a ConfigMap that appears


@dataclass(frozen=True)
class Case:
    """One decision's inputs, with what several questions need."""

    o: ObservedExperiment
    now: datetime
    settings: Settings

    @property
    def spec(self) -> ExperimentSpec:
        spec = self.o.experiment.spec
        assert spec is not None
        return spec

    @property
    def report(self) -> ExperimentReport | None:
        return self.o.report

    @property
    def occupying(self) -> bool:
        return self.report is not None and self.report.phase in OCCUPYING

    @cached_property
    def desired(self) -> DesiredExperiment | None:
        return desired_experiment(self.o)

    @cached_property
    def digest(self) -> str:
        """Of `desired`, whatever its mode; it takes the experiment's data in, so it is made once."""
        assert self.desired is not None
        return spec_digest(self.desired)

    @property
    def engine_name(self) -> str:
        assert self.o.assignment is not None
        return self.o.assignment.engine or ""


def waiting(reason: Reason, message: str) -> Course:
    verdict = Verdict("False", reason, message)
    return Course(attached=verdict, progressing=verdict)


def attaching(message: str) -> Course:
    return replace(waiting(Reason.ATTACHING, message), wants_slot=True)


def unaccepted(reason: Reason, message: str) -> Course:
    return replace(waiting(reason, message), accepted=Verdict("False", reason, message))


def leave_slot(case: Case, reason: Reason, message: str) -> Course:
    """Of one that holds a slot: the engine finishes its step, commits and detaches it."""
    report = case.report
    assert report is not None
    if case.desired is None:
        gone = Verdict("False", Reason.DATA_NOT_FOUND, f"{case.o.data_missing}: the engine cannot be told to suspend")
        return Course(accepted=gone, requeue_after=LOOK_AGAIN_SECONDS)
    actions: tuple[Action, ...] = ()
    if report.mode is not RunMode.SUSPEND:
        desired = case.desired.model_copy(update={"mode": RunMode.SUSPEND})
        actions = (PutOnEngine(engine_key(case.o), desired),)
    return Course(
        attached=Verdict("True" if report.adapter_loaded else "False", reason, message),
        progressing=Verdict("False", reason, message),
        actions=actions,
        requeue_after=PUT_RETRY_SECONDS,
    )
