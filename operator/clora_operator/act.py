"""Carries out a Plan: actions in order, then the status, then its events. Errors are joined: one action that fails does
not keep the status from being written.

Leaves out every decision. Kubernetes calls block and run in threads.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from clora_api import API_VERSION, FINALIZER
from clora_api.control import spec_digest
from clora_operator import metrics, workload
from clora_operator.cache import Cache
from clora_operator.desired import keys_digest, token_digest
from clora_operator.engine_client import EngineError, RefusedError
from clora_operator.kube import FIELD_MANAGER, PLURALS, Kube, KubeError
from clora_operator.links import Links
from clora_operator.observe import Answer, ServingAnswer
from clora_operator.plan import (
    Action,
    AddFinalizer,
    ApplyWorkload,
    Connect,
    CreateToken,
    DeleteExperiment,
    DeleteOnEngine,
    DeletePod,
    Disconnect,
    Event,
    Plan,
    PutOnEngine,
    RemoveFinalizer,
    ScaleToZero,
    ServeOnEngine,
)
from clora_operator.pod_template import MANAGED, labels
from clora_operator.resources import Engine, Experiment, to_rfc3339
from clora_operator.status import clip, merge_patch

log = logging.getLogger(__name__)

Clock = Callable[[], datetime]


@dataclass(slots=True)
class Outcome:
    """What became of a plan. answer: of a PUT; serving: of a call about the serving alone; released: the engine knows
    the experiment no longer; applied: digest of the manifests that the API server took, apply_error: why it refused
    them (None: there was nothing to apply); made_secret: a Secret is there, secret_problem: why the API server did not
    take one; conflict: somebody else wrote first."""

    answer: Answer | None = None
    serving: ServingAnswer | None = None
    released: bool = False
    applied: str | None = None
    apply_error: str | None = None
    written: bool = False
    made_secret: bool = False
    secret_problem: str = ""
    conflict: bool = False
    errors: list[Exception] = field(default_factory=list)


class Actor:
    def __init__(self, kube: Kube, cache: Cache, links: Links, clock: Clock) -> None:
        self._kube, self._cache, self._links, self._clock = kube, cache, links, clock

    async def carry_out(self, resource: Experiment | Engine, plan: Plan) -> Outcome:
        outcome = Outcome()
        for action in plan.actions:
            try:
                await self._do(resource, action, outcome)
            except (KubeError, EngineError, OSError) as error:
                _note(error, outcome)
        if plan.status is not None:
            try:
                await self._write_status(resource, plan.status)
                outcome.written = True
            except KubeError as error:
                _note(error, outcome)
        if not outcome.errors and not outcome.conflict:
            for event in plan.events:
                await self._tell(resource, event)
        return outcome

    async def _do(self, resource: Experiment | Engine, action: Action, outcome: Outcome) -> None:
        match action:
            case AddFinalizer():
                await self._set_finalizers(resource, (*resource.meta.finalizers, FINALIZER))
            case RemoveFinalizer():
                rest = tuple(name for name in resource.meta.finalizers if name != FINALIZER)
                await self._set_finalizers(resource, rest)
            case DeleteExperiment():
                await self._expire(resource)
            case PutOnEngine():
                outcome.answer = await self._put(action)
            case ServeOnEngine():
                outcome.serving = await self._serve(action)
            case DeleteOnEngine():
                link = self._links.get(action.engine)
                gone = link is not None and await link.delete(action.uid, action.files)
                outcome.released = gone and resource.meta.deleted is not None  # else it may come back
            case CreateToken():
                await self._make_secret(resource, action, outcome)
            case ApplyWorkload():
                await self._apply(action, outcome)
            case DeletePod():
                await asyncio.to_thread(self._kube.delete_pod, resource.meta.namespace, action.name, action.uid)
                log.info("%s: pod %s deleted: the engine is drained and its template is new", resource.key, action.name)
            case ScaleToZero():
                namespace, version = resource.meta.namespace, action.resource_version
                await asyncio.to_thread(self._kube.scale_workload_to_zero, action.kind, namespace, action.name, version)
                log.info("%s: %s %s scaled to 0", resource.key, action.kind, action.name)
            case Connect():
                await self._links.connect(resource.key, action.endpoint, action.token, action.pod)
            case Disconnect():
                await self._links.retire(resource.key)

    async def _put(self, action: PutOnEngine) -> Answer:
        digest, token = spec_digest(action.desired), token_digest(action.desired)
        link = self._links.get(action.engine)
        if link is None:
            return Answer(digest, self._clock(), token, error="the engine is not connected")
        epoch = link.view.info.epoch if link.view.info else None
        try:
            await link.put(action.desired)
        except RefusedError as refused:
            return Answer(digest, self._clock(), token, problem=refused.problem, epoch=epoch)
        except EngineError as error:
            return Answer(digest, self._clock(), token, error=str(error))
        return Answer(digest, self._clock(), token, keys=keys_digest(action.desired))

    async def _serve(self, action: ServeOnEngine) -> ServingAnswer:
        error, unknown, link = "", False, self._links.get(action.engine)
        try:
            if link is None:
                raise EngineError("the engine is not connected")
            await link.serve(action.uid, action.serving)
        except EngineError as problem:
            error = str(problem)
            unknown = isinstance(problem, RefusedError) and problem.problem.status in (404, 405)
        return ServingAnswer(token_digest(action.serving), self._clock(), action.serving.weight, error, unknown)

    async def _make_secret(self, resource: Experiment | Engine, action: CreateToken, outcome: Outcome) -> None:
        try:
            await asyncio.to_thread(self._kube.create_secret, resource.meta.namespace, _secret(resource, action))
        except KubeError as error:
            outcome.secret_problem = clip(error.reason, 1024)
            raise
        outcome.made_secret = True

    async def _apply(self, action: ApplyWorkload, outcome: Outcome) -> None:
        try:
            for manifest in action.manifests:
                await asyncio.to_thread(self._kube.apply, manifest)
        except KubeError as error:
            if error.status not in (400, 403, 409, 422):
                raise
            outcome.apply_error = clip(error.reason, 1024)  # the spec's or the cluster's fault: said in a condition
            return
        outcome.applied, outcome.apply_error = action.digest, ""

    async def _set_finalizers(self, resource: Experiment | Engine, names: tuple[str, ...]) -> None:
        metadata = {"resourceVersion": resource.meta.resource_version, "finalizers": list(names)}
        try:
            await self._patch(self._kube.patch, resource, {"metadata": metadata})
        except KubeError as error:
            if error.status != 404:  # gone already
                raise

    async def _expire(self, resource: Experiment | Engine) -> None:
        key, meta = resource.key, resource.meta
        await asyncio.to_thread(
            self._kube.delete, PLURALS[key.kind], key.namespace, key.name, meta.uid, meta.resource_version
        )
        log.info("%s: deleted, ttlSecondsAfterFinished have passed", key)

    async def _write_status(self, resource: Experiment | Engine, status: Mapping[str, Any]) -> None:
        body = {
            "metadata": {"resourceVersion": resource.meta.resource_version},
            "status": merge_patch(resource.raw_status, status),
        }
        await self._patch(self._kube.patch_status, resource, body)
        metrics.STATUS_WRITES.labels(resource.key.kind).inc()

    async def _patch(
        self, call: Callable[..., dict[str, Any]], resource: Experiment | Engine, body: Mapping[str, Any]
    ) -> None:
        key = resource.key
        answer = await asyncio.to_thread(call, PLURALS[key.kind], key.namespace, key.name, body)
        self._cache.put_answer(key.kind, answer)

    async def _tell(self, resource: Experiment | Engine, event: Event) -> None:
        """An Event that cannot be made (a namespace that is being deleted takes none) is no error."""
        log.info("%s: %s: %s", resource.key, event.reason, event.message)
        body = _event_body(resource, event, self._clock())
        try:
            await asyncio.to_thread(self._kube.create_event, resource.meta.namespace, body)
        except (KubeError, OSError) as error:
            log.info("%s: the event %s was not taken: %s", resource.key, event.reason, error)


def _note(error: Exception, outcome: Outcome) -> None:
    """A lost race is no error: the newer version is looked at again."""
    if isinstance(error, KubeError) and error.status in (404, 409):
        outcome.conflict = True
    else:
        outcome.errors.append(error)


def _secret(resource: Experiment | Engine, action: CreateToken) -> dict[str, Any]:
    meta, of_engine = resource.meta, isinstance(resource, Engine)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": action.secret,
            "namespace": meta.namespace,
            "labels": labels(meta.name) if of_engine else MANAGED,
            "ownerReferences": [workload.owner(meta, "LoRAEngine" if of_engine else "LoRAExperiment")],
        },
        "stringData": {"token": secrets.token_urlsafe(32)},
    }


def _event_body(resource: Experiment | Engine, event: Event, now: datetime) -> dict[str, Any]:
    meta, moment = resource.meta, to_rfc3339(now)
    kind = "LoRAExperiment" if isinstance(resource, Experiment) else "LoRAEngine"
    return {
        "metadata": {"generateName": f"{meta.name[:200]}.", "namespace": meta.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": kind,
            "name": meta.name,
            "namespace": meta.namespace,
            "uid": meta.uid,
            "resourceVersion": meta.resource_version,
        },
        "type": event.type,
        "reason": event.reason,
        "message": clip(event.message, 1000),
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }
