"""One decision's inputs about one experiment, and the courses that several questions answer with. Pure.

Leaves out the questions themselves: those are decide's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from clora_api.control import OCCUPYING, DesiredExperiment, ExperimentReport, Phase, Problem, RunMode, spec_digest
from clora_api.v1alpha1.conditions import Reason
from clora_api.v1alpha1.experiment import ExperimentSpec
from clora_operator.desired import desired_experiment, engine_key
from clora_operator.experiment_status import Course
from clora_operator.observe import ObservedExperiment
from clora_operator.plan import Action, DeleteOnEngine, PutOnEngine
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
    def refusal(self) -> Problem | None:
        """The engine's, of the spec as it is now."""
        answer = self.o.memory.answer
        if answer is None or not answer.invalid or self.desired is None or answer.digest != self.digest:
            return None
        return answer.problem

    @property
    def seconds_silent(self) -> float:
        """Since its engine last answered, or since one was first looked for."""
        view = self.o.view
        since = (view.down_since if view else self.o.memory.silent_since) or self.now
        return (self.now - since).total_seconds()

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
    leaves = report.mode is RunMode.SUSPEND or report.phase is Phase.DELETING
    return Course(
        accepted=Verdict("False", Reason.DATA_NOT_FOUND, case.o.data_missing) if case.o.data_missing else None,
        attached=Verdict("True" if report.adapter_loaded else "False", reason, message),
        progressing=Verdict("False", reason, message),
        actions=() if leaves else (let_go(case),),
        requeue_after=PUT_RETRY_SECONDS,
    )


def let_go(case: Case) -> Action:
    """The engine commits and gives the slot back. One that cannot be told to suspend, for the spec that goes with it is
    not known or was refused, is taken off the engine, which commits too and keeps its files."""
    if case.desired is None or case.refusal is not None:
        return DeleteOnEngine(engine_key(case.o), case.o.experiment.meta.uid, "Retain")
    return PutOnEngine(engine_key(case.o), case.desired.model_copy(update={"mode": RunMode.SUSPEND}))
