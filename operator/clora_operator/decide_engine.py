"""decide_engine: all policy about one LoRAEngine. Pure: what was observed and the time go in, a Plan comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from clora_api.v1alpha1.conditions import EngineCondition, Reason
from clora_api.v1alpha1.engine import EngineStatus
from clora_operator import workload
from clora_operator.decide_drain import NO_LEADER_WORKER_SETS, drained, lacks_kind, workload_current
from clora_operator.decide_sleep import falls_or_stays_asleep, idle, seconds_until_sleep, waking
from clora_operator.decide_workload import LOOK_AGAIN_SECONDS, look_again, workload_actions
from clora_operator.observe import ObservedEngine, replicas
from clora_operator.plan import Action, Connect, CreateToken, Disconnect, Event, Plan, soonest
from clora_operator.pod_template import PORT
from clora_operator.pod_trouble import trouble_of
from clora_operator.resources import find_condition
from clora_operator.settings import ServiceAddressing, Settings
from clora_operator.status import Verdict, clip, delay_of_write, event_of, set_conditions, transitions, weigh


def decide_engine(o: ObservedEngine, now: datetime, settings: Settings) -> Plan:
    if o.engine.meta.deleted is not None:
        return Plan()
    accepted = _accepted(o)
    endpoint = _endpoint(o, settings) if accepted.status == "True" else ""
    unused = idle(o)
    # the pod of an engine that is to have several, and cannot, goes on: no other would come
    asleep = not (lacks_kind(o) and replicas(o.workload)) and falls_or_stays_asleep(o, unused, now)
    verdicts = {
        EngineCondition.ACCEPTED: accepted,
        EngineCondition.READY: _ready(o, accepted, asleep, now, settings),
        EngineCondition.WORKLOAD_CURRENT: workload_current(o, asleep),
        EngineCondition.DRAINED: drained(o, asleep),
        EngineCondition.IDLE: unused,
    }
    said = {kind: verdict for kind, verdict in verdicts.items() if verdict is not None}
    status = _status(o, said, endpoint, now)
    raw_old, raw_new = o.engine.raw_status, status.to_api()
    weight = weigh(raw_old, raw_new)
    delay = delay_of_write(weight, o.last_write, now, settings)
    write = weight != "none" and delay == 0
    changed = transitions(o.engine.status.conditions, status.conditions)
    events = tuple(_event(c.type, c.status, event_of(c, warning=c.status != "True")) for c in changed)
    waits = [
        _requeue(o, said, now, settings),
        look_again(o, said, asleep),
        seconds_until_sleep(o, unused, now),
        delay or None,
    ]
    return Plan(
        actions=_actions(o, said, asleep, endpoint, settings),
        status=raw_new if write else None,
        events=tuple(e for e in events if e is not None) if write else (),
        requeue_after=soonest(*waits),
    )


def _accepted(o: ObservedEngine) -> Verdict:
    spec = o.engine.spec
    if spec is None:
        return Verdict("False", Reason.INVALID_SPEC, o.engine.invalid)
    if o.rival is not None:
        message = f"spec.endpoint: LoRAEngine {o.rival} is older and has the same endpoint; an engine has one operator"
        return Verdict("False", Reason.ENDPOINT_IN_USE, message)
    if spec.endpoint is None and (problem := workload.name_problem(o.engine)):
        return Verdict("False", Reason.INVALID_SPEC, problem)
    if spec.endpoint is None and lacks_kind(o) and o.workload is None:
        return Verdict("False", Reason.LEADER_WORKER_SET_MISSING, NO_LEADER_WORKER_SETS)
    if o.apply_error and o.workload is None:
        return Verdict("False", Reason.INVALID_SPEC, o.apply_error)
    if o.token is None and (spec.endpoint is not None or spec.token_secret_ref is not None):
        name, key = o.token_secret
        return Verdict("False", Reason.TOKEN_NOT_FOUND, f"spec.tokenSecretRef: Secret {name} with key {key} is missing")
    return Verdict("True", Reason.SPEC_VALID, "the spec makes sense and what it refers to exists")


def _ready(o: ObservedEngine, accepted: Verdict, asleep: bool, now: datetime, settings: Settings) -> Verdict | None:
    """None: within the grace of a silent engine, what was said last still stands."""
    if accepted.status != "True":
        return Verdict("False", accepted.reason, accepted.message)
    if asleep:
        message = "it was idle for spec.scaleDownAfterSeconds and has no pod: an experiment that may run on it wakes it"
        return Verdict("False", Reason.ASLEEP, message)
    view = o.view
    trouble = trouble_of(o.pod, o.workers, o.engine.meta.labels) or _kept_from_pods(o)
    if view is not None and view.unauthorized:
        return Verdict("False", Reason.UNAUTHORIZED, f"the engine refuses the token in Secret {o.token_secret[0]}")
    if view is not None and view.starting:
        # a trainer's other pod that does not come up is what the engine waits for
        return trouble or Verdict("False", Reason.STARTING, f"the engine is starting: {view.error}")
    if view is not None and view.down_since is None and view.info is not None:
        if view.info.ready:
            return Verdict("True", Reason.SERVING, f"serves {view.info.model}")
        return trouble or Verdict("False", Reason.STARTING, "the engine answers and is not ready yet")
    if waking(o.engine):  # stays so: it says that nothing is attached
        if trouble is not None:
            return Verdict("False", Reason.WAKING_HELD_BACK, trouble.message)
        return Verdict("False", Reason.WAKING, "it was asleep, is wanted, and has not answered yet")
    if trouble is not None:
        return trouble
    before = find_condition(o.engine.status.conditions, EngineCondition.READY)
    was_ready = before is not None and before.status == "True"
    if view is None or view.down_since is None or not view.error:
        return None if was_ready else Verdict("False", Reason.STARTING, "the engine has not answered yet")
    if was_ready and (now - view.down_since).total_seconds() < settings.unreachable_grace_seconds:
        return None
    ours = o.engine.spec is not None and o.engine.spec.endpoint is None
    if ours and o.engine.status.epoch == 0:
        return Verdict("False", Reason.STARTING, "the engine has not answered yet")
    return Verdict("False", Reason.UNREACHABLE, f"the engine does not answer: {view.error or 'no answer yet'}")


def _kept_from_pods(o: ObservedEngine) -> Verdict | None:
    """A change of its workload was refused, and it has no pod: an engine that sleeps cannot wake so."""
    return Verdict("False", Reason.UPDATE_REFUSED, o.apply_error) if o.apply_error and not o.pods else None


def _endpoint(o: ObservedEngine, settings: Settings) -> str:
    """Empty while it is not known."""
    spec, meta = o.engine.spec, o.engine.meta
    assert spec is not None
    if spec.endpoint is not None:
        return spec.endpoint
    if settings.service_addressing is ServiceAddressing.DNS:
        return f"http://{meta.name}.{meta.namespace}.svc:{PORT}"
    address = ((o.service or {}).get("spec") or {}).get("clusterIP", "")
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{PORT}" if host and host != "None" else ""


def _actions(
    o: ObservedEngine, said: Mapping[EngineCondition, Verdict], asleep: bool, endpoint: str, settings: Settings
) -> tuple[Action, ...]:
    spec, accepted = o.engine.spec, said[EngineCondition.ACCEPTED]
    actions: list[Action] = []
    if spec is not None and spec.endpoint is None and (accepted.status == "True" or o.apply_error):
        if o.token is None and spec.token_secret_ref is None:
            actions.append(CreateToken(o.token_secret[0]))
        actions += workload_actions(o, said, asleep, settings)
    if asleep:
        actions.append(Disconnect())
    elif endpoint and o.token is not None:
        actions.append(Connect(endpoint, o.token, o.pod["metadata"]["uid"] if o.pod else ""))
    elif accepted.status == "False" and accepted.reason in (Reason.ENDPOINT_IN_USE, Reason.INVALID_SPEC):
        actions.append(Disconnect())
    return tuple(actions)


def _status(o: ObservedEngine, verdicts: dict[EngineCondition, Verdict], endpoint: str, now: datetime) -> EngineStatus:
    old, generation = o.engine.status, o.engine.meta.generation
    info = o.view.info if o.view else None
    said = {str(kind): verdict for kind, verdict in verdicts.items()}
    return EngineStatus(
        conditions=set_conditions(old.conditions, said, generation, now),
        observed_generation=generation,
        epoch=info.epoch if info else old.epoch,
        model=clip(info.model, 253) if info else old.model,
        experiments=info.experiments if info else old.experiments,
        capacity=info.max_experiments if info else old.capacity,
        max_rank=info.max_rank if info else old.max_rank,
        endpoint=endpoint or old.endpoint,
    )


def _requeue(
    o: ObservedEngine, verdicts: dict[EngineCondition, Verdict], now: datetime, settings: Settings
) -> float | None:
    ready = verdicts.get(EngineCondition.READY)
    if o.apply_error:
        return LOOK_AGAIN_SECONDS
    if ready is None:
        since = o.view.down_since if o.view else None
        if since is None:
            return 1.0
        return max(0.1, settings.unreachable_grace_seconds - (now - since).total_seconds())
    return None if ready.status == "True" or ready.reason == Reason.ASLEEP else LOOK_AGAIN_SECONDS


def _event(kind: str, status: str, event: Event) -> Event | None:
    """Accepted and WorkloadCurrent are told when they become False; Ready and Drained always; Idle by what follows."""
    if kind == EngineCondition.IDLE:
        return None
    if kind == EngineCondition.DRAINED or event.reason in _NORMAL:
        return replace(event, type="Normal")
    return event if kind == EngineCondition.READY or status == "False" else None


_NORMAL = {Reason.ASLEEP, Reason.WAKING, Reason.WAKING_HELD_BACK, Reason.QUEUED}
