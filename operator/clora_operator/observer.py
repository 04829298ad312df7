"""Gathers what observe describes: from the cache, from the links, and, for children, from the API server."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from clora_api.control import MAX_TOKEN_LENGTH, MIN_TOKEN_LENGTH, Phase
from clora_api.v1alpha1.conditions import EngineCondition, ExperimentCondition, Reason
from clora_api.v1alpha1.experiment import Condition
from clora_operator import workload
from clora_operator.cache import Cache
from clora_operator.children import Children, read_children
from clora_operator.claims import Assignment, Claim, Room
from clora_operator.decide_serving import cannot_be_served, secret_name
from clora_operator.decide_sleep import wakes_on_demand
from clora_operator.desired import offers_serving
from clora_operator.fit import limits, needs
from clora_operator.kube import Kube
from clora_operator.links import EngineView, Links
from clora_operator.observe import (
    Memory,
    ObservedEngine,
    ObservedExperiment,
    ServingSecret,
    lacks_commits,
    resolve_init,
)
from clora_operator.pod_trouble import told_trouble
from clora_operator.priorities import NO_CLASS, PriorityClasses
from clora_operator.resources import Engine, Experiment, Key, find_condition
from clora_operator.tenancy import Namespaces
from clora_operator.tracking_keys import TrackingKeys, needs_keys, read_keys
from clora_operator.workload import wanted_kind

SECRET_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """As Memory, of one engine."""

    applied: str = ""
    apply_error: str = ""
    last_write: datetime | None = None


_NO_CHILDREN = Children()


class Observer:
    def __init__(
        self, kube: Kube, cache: Cache, links: Links, priorities: PriorityClasses, clock: Callable[[], datetime]
    ) -> None:
        self._kube, self._cache, self._links, self._clock = kube, cache, links, clock
        self._priorities = priorities

    async def experiment(
        self, experiment: Experiment, assignment: Assignment | None, memory: Memory
    ) -> ObservedExperiment:
        """The memory that it returns has the times in it at which things were first seen."""
        told = experiment.status.engine
        name = told.name if told else assignment.engine if assignment else None
        engine_key = experiment.engine_key(name or "")
        view = self._links.view(engine_key)
        report = view.report(experiment.meta.uid) if view else None
        failed = memory.failed
        if report is not None and report.phase is Phase.FAILED and (failed is None or failed[0] != report.attempt):
            failed = (report.attempt, self._clock())
        silent_since = None if view is not None else memory.silent_since or self._clock()
        text, missing = await self._data(experiment, memory)
        named = experiment.spec.priority_class_name if experiment.spec else None
        priority = await self._priorities.read(named) if named else NO_CLASS
        secret = await self._serving_secret(experiment, memory)
        keys = await self._tracking_keys(experiment, memory)
        return ObservedExperiment(
            experiment=experiment,
            assignment=assignment,
            engine=self._cache.engine(engine_key),
            view=view,
            data_text=text,
            data_missing=missing,
            init=resolve_init(experiment, self._init_source(experiment)),
            priority=priority,
            memory=replace(
                memory,
                data_text=text,
                failed=failed,
                silent_since=silent_since,
                serving_secret=secret,
                tracking_keys=keys,
            ),
            serving_secret=secret,
            tracking_keys=keys,
        )

    async def _serving_secret(self, experiment: Experiment, memory: Memory) -> ServingSecret | None:
        """Read again after SECRET_SECONDS, for no event tells of a Secret."""
        if not experiment.asks_to_be_served:
            return None
        known, now = memory.serving_secret, self._clock()
        if known is not None and (now - known.at).total_seconds() < SECRET_SECONDS:
            return known
        name = secret_name(experiment)
        found = await asyncio.to_thread(self._kube.secret, experiment.meta.namespace, name)
        owners = ((found or {}).get("metadata") or {}).get("ownerReferences") or ()
        ours = any(owner.get("uid") == experiment.meta.uid for owner in owners)
        token = decode_token(found, "token") if ours else None
        fit = token is not None and MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH
        return ServingSecret(name, token if fit else None, foreign=found is not None and not (ours and fit), at=now)

    async def _tracking_keys(self, experiment: Experiment, memory: Memory) -> TrackingKeys | None:
        """Read again after SECRET_SECONDS, as above, and for other trackers."""
        trackers = needs_keys(experiment)
        if not trackers:
            return None
        known, now = memory.tracking_keys, self._clock()
        if known is not None and known.trackers == trackers and (now - known.at).total_seconds() < SECRET_SECONDS:
            return known
        return await asyncio.to_thread(
            read_keys, trackers, lambda name: self._kube.secret(experiment.meta.namespace, name), now
        )

    def _init_source(self, experiment: Experiment) -> Experiment | None:
        source = starts_from(experiment)
        return self._cache.experiment(source) if source else None

    async def _data(self, experiment: Experiment, memory: Memory) -> tuple[str | None, str]:
        """Contents of data.configMap, and why they are missing. Read once: data cannot change after creation. An engine
        that refused them is a reason to read them again."""
        spec, namespace = experiment.spec, experiment.meta.namespace
        if spec is None or spec.data.config_map is None or experiment.meta.deleted is not None:
            return None, ""
        refused = memory.answer is not None and memory.answer.invalid
        if memory.data_text is not None and not refused:
            return memory.data_text, ""
        source = spec.data.config_map
        found = await asyncio.to_thread(self._kube.config_map, namespace, source.name)
        if found is None:
            return None, f"spec.data.configMap: there is no ConfigMap {source.name} in namespace {namespace}"
        text = (found.get("data") or {}).get(source.key)
        if text is None:
            return None, f"spec.data.configMap: ConfigMap {source.name} has no key {source.key}"
        return str(text), ""

    async def engine(self, engine: Engine, memory: EngineMemory, wanted: str | None) -> ObservedEngine:
        name, key = workload.token_secret(engine)
        namespace = engine.meta.namespace
        secret = await asyncio.to_thread(self._kube.secret, namespace, name)
        children = _NO_CHILDREN
        if engine.spec is not None and engine.spec.endpoint is None:
            children = await asyncio.to_thread(read_children, self._kube, engine.meta, wanted_kind(engine.spec))
        return ObservedEngine(
            engine=engine,
            rival=rival(engine, self._cache.engines()),
            token=decode_token(secret, key),
            token_secret=(name, key),
            view=self._links.view(engine.key),
            stateful_set=children.stateful_set,
            leader_worker_set=children.leader_worker_set,
            pods=children.pods,
            served=children.served,
            service=children.service,
            wanted=wanted,
            applied=memory.applied,
            apply_error=memory.apply_error,
            last_write=memory.last_write,
        )


def rival(engine: Engine, others: list[Engine]) -> str | None:
    """The oldest other LoRAEngine with the same endpoint, if it is older."""
    endpoint = _endpoint(engine)
    if endpoint is None:
        return None
    same = [other for other in others if _endpoint(other) == endpoint]
    oldest = min(same, key=lambda other: (*other.meta.age_order, other.meta.uid), default=engine)
    if oldest.meta.uid == engine.meta.uid:
        return None
    return (
        f"{oldest.meta.namespace}/{oldest.meta.name}"
        if oldest.meta.namespace != engine.meta.namespace
        else (oldest.meta.name)
    )


def _endpoint(engine: Engine) -> str | None:
    endpoint = engine.spec.endpoint if engine.spec else None
    return endpoint.lower() if endpoint else None


def rooms(cache: Cache, links: Links, now: datetime) -> list[Room]:
    """What placement has to know of the engines."""
    ours = {experiment.meta.uid for experiment in cache.experiments()}
    found = []
    for engine in cache.engines():
        view = links.view(engine.key)
        info = view.info if view else None
        accepted = find_condition(engine.status.conditions, EngineCondition.ACCEPTED)
        refused = accepted is not None and accepted.status == "False"
        wakes = wakes_on_demand(engine) and not (view is not None and view.ready)
        capacity = engine.spec.capacity.max_experiments if engine.spec else 0
        allowed = engine.spec.allowed_namespaces if engine.spec else None
        found.append(
            Room(
                namespace=engine.meta.namespace,
                name=engine.meta.name,
                labels=engine.meta.labels,
                ready=view is not None and view.ready and not refused,
                capacity=info.max_experiments if info else capacity if wakes else 0,
                **limits(engine, info),
                strangers=len(view.occupants() - ours) if view else 0,
                wakes=wakes and not refused,
                trouble=told_trouble(engine),
                draining=engine.spec is not None and engine.spec.drain,
                max_per_namespace=engine.spec.capacity.max_per_namespace if engine.spec else None,
                allowed_from=allowed.from_ if allowed else "Same",
                allowed_labels=allowed.selector.match_labels if allowed and allowed.selector else {},
                full=view is not None and view.full_until is not None and view.full_until > now,
            )
        )
    return found


def claims(
    cache: Cache, links: Links, memories: Mapping[str, Memory], priorities: PriorityClasses, namespaces: Namespaces
) -> list[Claim]:
    """What placement has to know of the experiments. One that is being deleted or has ended keeps its slot until the
    engine says otherwise, and wants none, unless it is to be served."""
    found = []
    for experiment in cache.experiments():
        meta, spec, told = experiment.meta, experiment.spec, experiment.status.engine
        view = links.view(experiment.engine_key(told.name)) if told else None
        holds = view is not None and meta.uid in view.occupants()
        over = experiment.finished or meta.deleted is not None
        serves = over and experiment.asks_to_be_served and _offers_serving(experiment, cache)
        if over and not holds and not serves:
            continue
        memory = memories.get(meta.uid)
        kind = ExperimentCondition.SERVED if serves else ExperimentCondition.ATTACHED
        attached = find_condition(experiment.status.conditions, kind)
        named = spec.priority_class_name if spec else None
        priority = priorities.known(named) if named else NO_CLASS
        found.append(
            Claim(
                uid=meta.uid,
                namespace=meta.namespace,
                name=meta.name,
                created=meta.created,
                engine_namespace=experiment.engine_namespace,
                namespace_labels=namespaces.known(meta.namespace),
                **needs(spec, over=over),
                engine=spec.engine_ref.name if spec and spec.engine_ref else None,
                selector=spec.engine_selector.match_labels if spec and spec.engine_selector else None,
                pinned=_pinned(experiment, view, memory, cache),
                holds=holds,
                leaving=not serves and (over or (spec is not None and spec.suspend)),
                attached=attached is not None and attached.status != "False",
                served=serves,
                needs=(serves and _can_be_served(experiment, memory, view))
                or (not over and spec is not None and not spec.suspend and not _unaccepted(experiment)),
                wants=(serves or not over) and memory is not None and memory.wants_slot,
                priority=priority.value if priority else 0,
                preempts=not serves and priority is not None and priority.preempts and _can_start(experiment, memory),
                preemptible=priority is not None,
            )
        )
    return found


def _offers_serving(experiment: Experiment, cache: Cache) -> bool:
    told = experiment.status.engine
    return told is not None and offers_serving(cache.engine(experiment.engine_key(told.name)))


def _can_be_served(experiment: Experiment, memory: Memory | None, view: EngineView | None) -> bool:
    """As far as is known: nothing keeps an engine awake for one whose Secret or commits are not there."""
    secret, problem = (memory.serving_secret, memory.secret_problem) if memory else (None, "")
    return not cannot_be_served(secret, problem, view) and not lacks_commits(experiment, memory)


def _can_start(experiment: Experiment, memory: Memory | None) -> bool:
    """Nobody makes room for what the engine has refused, this very spec or for want of its commits, also after a
    restart that has forgotten why. Such a one may have a slot that is free."""
    accepted = _unaccepted(experiment)
    refused = accepted is not None and accepted.reason == Reason.INVALID_SPEC
    return not refused and not lacks_commits(experiment, memory)


def _unaccepted(experiment: Experiment) -> Condition | None:
    """The condition that says why this very spec cannot run, if there is one."""
    accepted = find_condition(experiment.status.conditions, ExperimentCondition.ACCEPTED)
    if accepted is None or accepted.status != "False":
        return None
    return accepted if accepted.observed_generation == experiment.meta.generation else None


def _pinned(experiment: Experiment, view: EngineView | None, memory: Memory | None, cache: Cache) -> str | None:
    """The one engine that it can be on: that which was told of it, unless that has plainly refused it and holds none of
    its steps; for a new one, that which holds the steps it starts from."""
    told = experiment.status.engine
    if told is None:
        source = starts_from(experiment)
        found = cache.experiment(source) if source else None
        if found is None or found.status.engine is None or found.engine_namespace != experiment.engine_namespace:
            return None
        return found.status.engine.name
    refused = memory is not None and memory.answer is not None and memory.answer.problem is not None
    unknown_there = view is not None and view.reachable and view.report(experiment.meta.uid) is None
    if refused and unknown_there and experiment.status.checkpoint is None:
        return None
    return told.name


def starts_from(experiment: Experiment) -> Key | None:
    """The experiment that initFrom.experiment names."""
    init = experiment.spec.init_from if experiment.spec else None
    if init is None or init.experiment is None:
        return None
    return Key("experiment", experiment.meta.namespace, init.experiment.name)


def decode_token(secret: Mapping[str, Any] | None, key: str) -> str | None:
    """The token, without the line end that files tend to have; None where there is none."""
    encoded = ((secret or {}).get("data") or {}).get(key)
    if not encoded:
        return None
    try:
        text = base64.b64decode(encoded).decode("ascii").strip()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return text or None
