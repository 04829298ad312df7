"""What is done about a LoRAExperiment that has succeeded or failed. Pure.

Its status stays as it is: what has ended never runs again.
"""

from __future__ import annotations

from clora_api.control import Phase, RunMode
from clora_operator.case import PUT_RETRY_SECONDS
from clora_operator.desired import desired_experiment, engine_key
from clora_operator.observe import ObservedExperiment
from clora_operator.plan import Action, DeleteOnEngine, Plan, PutOnEngine


def after_the_end(o: ObservedExperiment) -> Plan:
    """Nothing, but that an engine which still runs it (a deadline has passed) is told to stop."""
    report = o.report
    if report is None or report.phase not in (Phase.PREPARING, Phase.RUNNING) or report.mode is RunMode.SUSPEND:
        return Plan()
    desired = desired_experiment(o, RunMode.SUSPEND)
    stop: Action = DeleteOnEngine(engine_key(o), o.experiment.meta.uid, "Retain")
    if desired is not None:
        stop = PutOnEngine(engine_key(o), desired)
    return Plan(actions=(stop,), requeue_after=PUT_RETRY_SECONDS)
