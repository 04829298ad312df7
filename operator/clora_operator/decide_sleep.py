"""An engine that sleeps when it is idle: when it is idle, when its pod goes, and when it comes back. Pure.

The clock is condition Idle's lastTransitionTime, so that a restarted operator forgets nothing. Leaves out who wants an
engine awake: that is demand.
"""

from __future__ import annotations

from datetime import datetime

from clora_api.v1alpha1.conditions import EngineCondition, Reason
from clora_operator.decide_drain import never_started
from clora_operator.observe import ObservedEngine
from clora_operator.pod_trouble import NOT_RUNNING
from clora_operator.resources import Engine, find_condition, from_rfc3339
from clora_operator.status import Verdict


def idle(o: ObservedEngine) -> Verdict | None:
    """None: nothing is to be said, or what was said last still stands."""
    spec = o.engine.spec
    if spec is None:
        return None
    if spec.scale_down_after_seconds is None:
        before = find_condition(o.engine.status.conditions, EngineCondition.IDLE)
        message = "spec.scaleDownAfterSeconds is not set: it never sleeps"
        return Verdict("False", Reason.STAYS_AWAKE, message) if before else None
    if o.wanted is None:
        return None
    if o.wanted:
        return Verdict("False", Reason.WANTED, f"wanted by LoRAExperiment {o.wanted}")
    attached = _attached(o)
    if attached is None:
        return None
    if attached:
        return Verdict("False", Reason.IN_USE, f"{attached} attached")
    return Verdict("True", Reason.UNUSED, "no experiment is to run on it, and nothing is attached")


def falls_or_stays_asleep(o: ObservedEngine, said: Verdict | None, now: datetime) -> bool:
    """`said`: of condition Idle, now. To fall asleep it has to be known to be idle; one that sleeps tells nothing."""
    left = _seconds_left(o, now)
    if left is None or left > 0:
        return False
    if said is not None:
        return said.status == "True"
    replicas = ((o.workload or {}).get("spec") or {}).get("replicas")
    return asleep(o.engine) or replicas == 0


def seconds_until_sleep(o: ObservedEngine, said: Verdict | None, now: datetime) -> float | None:
    """None: it is not idle, or sleeps already."""
    spec = o.engine.spec
    if said is None or said.status != "True" or spec is None:
        return None
    left = _seconds_left(o, now)
    if left is None:
        return float(spec.scale_down_after_seconds or 0)
    return left if left > 0 else None


def asleep(engine: Engine) -> bool:
    """As its status says."""
    return _unready_reason(engine) == Reason.ASLEEP


def waking(engine: Engine) -> bool:
    """It sleeps, or has not answered since: as its status says. Nothing is attached to it."""
    return _unready_reason(engine) in (Reason.ASLEEP, Reason.WAKING, Reason.WAKING_HELD_BACK)


def wakes_on_demand(engine: Engine) -> bool:
    """It is not there, and will be for an experiment that waits for it."""
    if engine.spec is None or engine.spec.endpoint is not None or engine.spec.scale_down_after_seconds is None:
        return False
    return waking(engine) or _unready_reason(engine) in {Reason.STARTING, *NOT_RUNNING}


def _seconds_left(o: ObservedEngine, now: datetime) -> float | None:
    """Until it has been idle for long enough; None where its status does not say that it is idle."""
    spec, stored = o.engine.spec, find_condition(o.engine.status.conditions, EngineCondition.IDLE)
    if spec is None or spec.scale_down_after_seconds is None or stored is None or stored.status != "True":
        return None
    return spec.scale_down_after_seconds - (now - from_rfc3339(stored.last_transition_time)).total_seconds()


def _attached(o: ObservedEngine) -> int | None:
    """None while nobody knows. Nothing is attached to an engine that has not come up."""
    view = o.view
    if view is not None and view.reachable and view.info is not None:
        return max(len(view.occupants()), view.info.experiments)
    return 0 if never_started(o.pod) or (view is not None and view.starting) else None


def _unready_reason(engine: Engine) -> str:
    ready = find_condition(engine.status.conditions, EngineCondition.READY)
    return ready.reason if ready is not None and ready.status == "False" else ""
