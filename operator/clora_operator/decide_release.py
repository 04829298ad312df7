"""What is to be done for a LoRAExperiment that is being deleted: the engine makes the last checkpoint and lets go, then
the finalizer goes. Pure.

Nobody waits for ever: an engine that is gone, or silent past the deadline, is given up with an Event. Should it come
back, the resync finds the adapter whose resource is gone and detaches it.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from clora_api import FINALIZER
from clora_api.v1alpha1.conditions import EngineCondition
from clora_operator.decide_sleep import wakes_on_demand, waking
from clora_operator.observe import ObservedExperiment
from clora_operator.plan import DeleteOnEngine, Event, Plan, RemoveFinalizer
from clora_operator.pod_template import START_SECONDS
from clora_operator.resources import find_condition, from_rfc3339
from clora_operator.settings import Settings

ASK_AGAIN_SECONDS = 1.0
GIVEN_UP = "ReleasedWithoutEngine"


def decide_release(o: ObservedExperiment, now: datetime, settings: Settings) -> Plan:
    meta, told = o.experiment.meta, o.experiment.status.engine
    assert meta.deleted is not None
    if FINALIZER not in meta.finalizers:
        return Plan()
    if told is None or o.memory.released:
        return Plan(actions=(RemoveFinalizer(),))
    view = o.view
    if o.engine is None and view is None:
        return _give_up(f"LoRAEngine {told.name} does not exist any more")
    files = o.experiment.spec.deletion_policy if o.experiment.spec else "Retain"
    reachable = view is not None and view.reachable
    if files == "Retain" and not reachable and o.engine is not None and waking(o.engine):
        return Plan(actions=(RemoveFinalizer(),))  # it has slept: nothing is attached to it, and its files stay
    left = (_deadline(o, settings) - now).total_seconds()
    if left <= 0:
        return _give_up(
            f"LoRAEngine {told.name} did not let go of the adapter within {settings.release_deadline_seconds:g} s"
        )
    if view is not None and view.reachable:
        action = DeleteOnEngine(o.experiment.engine_key(told.name), meta.uid, files)
        return Plan(actions=(action,), requeue_after=min(left, ASK_AGAIN_SECONDS))
    if o.engine is None and view is not None and view.down_since is not None:
        silent = (now - view.down_since).total_seconds()
        if silent >= settings.unreachable_grace_seconds:
            return _give_up(f"LoRAEngine {told.name} does not exist any more and does not answer")
    return Plan(requeue_after=min(left, ASK_AGAIN_SECONDS))


def _deadline(o: ObservedExperiment, settings: Settings) -> datetime:
    """Until when the engine is waited for. One that wakes has the time that its start may take, and from when it serves
    the same as any other."""
    deleted, engine = o.experiment.meta.deleted, o.engine
    assert deleted is not None
    patience = timedelta(seconds=settings.release_deadline_seconds)
    ready = find_condition(engine.status.conditions, EngineCondition.READY) if engine is not None else None
    if engine is None or engine.spec is None or engine.spec.scale_down_after_seconds is None or ready is None:
        return deleted + patience
    latest = deleted + timedelta(seconds=START_SECONDS)
    if ready.status == "True":
        return min(max(deleted, from_rfc3339(ready.last_transition_time)), latest) + patience
    return (latest if wakes_on_demand(engine) else deleted) + patience


def _give_up(message: str) -> Plan:
    event = Event("Warning", GIVEN_UP, f"{message}; the finalizer is released, files may be left in its storage")
    return Plan(actions=(RemoveFinalizer(),), events=(event,))
