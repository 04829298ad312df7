"""The level-based loop: a key is due -> observe -> decide -> act. Everything that can happen only makes keys due.

Three tasks beside the workers: placement (one writer of who goes where), the resync (a full list against missed events,
and adapters whose resource is gone), and the links to the engines. Leaves out watching (handlers) and all policy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from clora_operator import metrics
from clora_operator.act import Actor, Outcome
from clora_operator.cache import Cache
from clora_operator.claims import Assignment, Seat
from clora_operator.decide import decide_experiment
from clora_operator.decide_engine import decide_engine
from clora_operator.demand import releases, wanted
from clora_operator.engine_client import EngineError
from clora_operator.kube import ENGINES, EXPERIMENTS, Kube, KubeError
from clora_operator.links import Change, Links
from clora_operator.observe import Memory
from clora_operator.observer import EngineMemory, Observer, claims, rooms, starts_from
from clora_operator.placement import place
from clora_operator.priorities import priority_classes
from clora_operator.resources import Engine, Experiment, Key
from clora_operator.settings import Settings
from clora_operator.tenancy import namespaces, needs_labels
from clora_operator.work_queue import WorkQueue

log = logging.getLogger(__name__)

PLACEMENT_DELAY_SECONDS = 0.05  # what happens together is placed together
START_RETRY_SECONDS = 5.0


class Reconciler:
    """`run` ends only by cancellation or by a bug in one of its tasks, which then ends the process."""

    def __init__(self, kube: Kube, settings: Settings, clock: Callable[[], datetime]) -> None:
        self._kube, self._settings, self._clock = kube, settings, clock
        self._paced = settings
        self.cache = Cache()
        self.links = Links(settings.poll_seconds, clock, self._on_change)
        self._actor = Actor(kube, self.cache, self.links, clock)
        self._priorities = priority_classes(kube)
        self._namespaces = namespaces(kube)
        self._observer = Observer(kube, self.cache, self.links, self._priorities, clock)
        self._queue: WorkQueue[Key] = WorkQueue()
        self._assignments: dict[str, Assignment] = {}
        self._wanted: dict[Seat, str] | None = None  # who is to be awake, and for whom; None before the first placement
        self._memories: dict[str, Memory] = {}  # of experiments, by uid
        self._engines: dict[Key, EngineMemory] = {}
        self._placement_due = asyncio.Event()
        self._woken: set[Key] = set()  # experiments to look at after the next placement
        self.synced = asyncio.Event()

    # ------------------------------------------------------------------ what wakes

    def wake(self, key: Key) -> None:
        """Something about `key` may have changed."""
        if key.kind == "experiment":
            self._woken.add(key)
            self._woken.update(e.key for e in self.cache.experiments() if starts_from(e) == key)
        else:
            self._queue.add(key)
            # whom an engine lets in may have changed, and namespaces' labels are read for those alone
            self._woken.update(e.key for e in self._guests(key))
            for other in self.cache.engines():  # two engines may want one endpoint
                if other.key != key and self.cache.engine(key) is None:
                    self._queue.add(other.key)
        self._placement_due.set()

    def _on_change(self, change: Change) -> None:
        if change.engine_changed:
            self._queue.add(change.engine)
        for experiment in self.cache.experiments():
            meta = experiment.meta
            told = experiment.status.engine
            ours = experiment.engine_namespace == change.engine.namespace
            concerned = told is not None and told.name == change.engine.name and change.engine_changed
            if ours and (meta.uid in change.uids or concerned):
                self._woken.add(experiment.key)
        self._placement_due.set()

    # ------------------------------------------------------------------ the tasks

    async def run(self) -> None:
        await self._first_sync()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._place_for_ever(), name="placement")
            group.create_task(self._resync_for_ever(), name="resync")
            for number in range(self._settings.workers):
                group.create_task(self._work(), name=f"worker {number}")

    async def close(self) -> None:
        await self.links.close()

    async def _first_sync(self) -> None:
        """Nothing is decided before everything has been seen once."""
        while True:
            try:
                await self._list_everything()
            except Exception as error:
                log.warning("cannot list clora's resources yet: %s", error)
                await asyncio.sleep(START_RETRY_SECONDS)
                continue
            self.synced.set()
            return

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            metrics.QUEUE_DEPTH.set(len(self._queue))
            started = time.perf_counter()
            try:
                again = await self._reconcile(key)
            except Exception as error:
                delay = self._queue.retry(key)
                metrics.RECONCILES.labels(key.kind, "error").inc()
                log.warning("%s: %s; again in %.1f s", key, error, delay, exc_info=not isinstance(error, _EXPECTED))
            else:
                self._queue.done(key)
                metrics.RECONCILES.labels(key.kind, "ok").inc()
                if again is not None:
                    self._queue.add(key, again)
            metrics.RECONCILE_SECONDS.labels(key.kind).observe(time.perf_counter() - started)

    async def _reconcile(self, key: Key) -> float | None:
        """Seconds until it is due again; None: with the next event."""
        if key.kind == "engine":
            return await self._reconcile_engine(key)
        experiment = self.cache.experiment(key)
        return None if experiment is None else await self._reconcile_experiment(experiment)

    async def _reconcile_experiment(self, experiment: Experiment) -> float | None:
        uid, key = experiment.meta.uid, experiment.key
        await self._learn(experiment)
        memory = self._memories.get(uid, Memory())
        observed = await self._observer.experiment(experiment, self._assignments.get(uid), memory)
        plan = decide_experiment(observed, self._clock(), self._paced)
        outcome = await self._actor.carry_out(experiment, plan)
        wants_changed = plan.wants_slot != observed.memory.wants_slot
        self._memories[uid] = replace(
            observed.memory,
            answer=outcome.answer or observed.memory.answer,
            serving=outcome.serving or observed.memory.serving,
            released=outcome.released or observed.memory.released,
            last_write=self._clock() if outcome.written else observed.memory.last_write,
            wants_slot=plan.wants_slot,
            serving_secret=None if outcome.made_secret else observed.memory.serving_secret,
            secret_problem="" if outcome.made_secret else outcome.secret_problem or observed.memory.secret_problem,
        )
        if wants_changed:
            self._placement_due.set()
        if outcome.released:
            self._queue.add(key)
        return await self._settle(key, outcome, plan.requeue_after)

    async def _learn(self, experiment: Experiment) -> None:
        """Reads, once, what placement has to know of the cluster: the priority class, the namespace's labels."""
        namespace, named = experiment.meta.namespace, experiment.spec.priority_class_name if experiment.spec else None
        if named and self._priorities.known(named) is None:
            await self._priorities.read(named)
            self._placement_due.set()
        if self._namespaces.known(namespace) is None and needs_labels(experiment, self._referred(experiment)):
            await self._namespaces.read(namespace)
            self._placement_due.set()

    def _referred(self, experiment: Experiment) -> Engine | None:
        reference = experiment.spec.engine_ref if experiment.spec else None
        return self.cache.engine(experiment.engine_key(reference.name)) if reference else None

    def _guests(self, key: Key) -> list[Experiment]:
        """Experiments of other namespaces that refer to an engine of this one."""
        here = (e for e in self.cache.experiments() if e.engine_namespace == key.namespace)
        return [experiment for experiment in here if experiment.meta.namespace != key.namespace]

    async def _reconcile_engine(self, key: Key) -> float | None:
        engine = self.cache.engine(key)
        if engine is None:
            self._engines.pop(key, None)
            await self._retire_unless_needed(key)
            return None
        memory = self._engines.get(key, EngineMemory())
        wanted_by = None if self._wanted is None else self._wanted.get((key.namespace, key.name), "")
        observed = await self._observer.engine(engine, memory, wanted_by)
        plan = decide_engine(observed, self._clock(), self._settings)
        outcome = await self._actor.carry_out(engine, plan)
        self._engines[key] = EngineMemory(
            applied=memory.applied if outcome.applied is None else outcome.applied,
            apply_error=memory.apply_error if outcome.apply_error is None else outcome.apply_error,
            last_write=self._clock() if outcome.written else memory.last_write,
        )
        changed = outcome.applied is not None or self._engines[key].apply_error != memory.apply_error
        return await self._settle(key, outcome, 0.0 if changed else plan.requeue_after)

    async def _settle(self, key: Key, outcome: Outcome, requeue_after: float | None) -> float | None:
        if outcome.errors:
            raise ReconcileError("; ".join(str(error) for error in outcome.errors))
        if not outcome.conflict:
            return requeue_after
        # somebody else wrote first: take the newest version rather than wait for its event
        plural = EXPERIMENTS if key.kind == "experiment" else ENGINES
        body = await asyncio.to_thread(self._kube.get, plural, key.namespace, key.name)
        if body is not None:
            self.cache.put_answer(key.kind, body)
        return 0.0 if body is not None else None

    # ------------------------------------------------------------------ placement

    async def _place_for_ever(self) -> None:
        while True:
            await self._placement_due.wait()
            await asyncio.sleep(PLACEMENT_DELAY_SECONDS)
            self._placement_due.clear()
            with metrics.PLACEMENT_SECONDS.time():
                self._place()

    def _place(self) -> None:
        now = self._clock()
        seats = rooms(self.cache, self.links, now)
        asked = claims(self.cache, self.links, self._memories, self._priorities, self._namespaces)
        found = place(seats, asked)
        self._want(wanted(seats, asked, found, releases(self.cache.experiments(), self._memories)))
        old, self._assignments = self._assignments, found
        self._paced = self._settings.paced(len(asked))
        for experiment in self.cache.experiments():
            uid = experiment.meta.uid
            if experiment.key in self._woken or old.get(uid) != found.get(uid):
                self._queue.add(experiment.key)
        self._woken.clear()
        metrics.ENGINES_REACHABLE.set(sum(link.view.reachable for link in self.links))
        ends = [link.view.full_until for link in self.links if link.view.full_until and link.view.full_until > now]
        if ends:
            wait = (min(ends) - now).total_seconds()
            asyncio.get_running_loop().call_later(wait, self._placement_due.set)

    def _want(self, found: dict[Seat, str]) -> None:
        """Engines that are wanted now and were not, or the reverse, are looked at."""
        old, self._wanted = self._wanted, found
        for engine in self.cache.engines():
            seat = (engine.meta.namespace, engine.meta.name)
            if old is None or (seat in old) != (seat in found):
                self._queue.add(engine.key)

    # ------------------------------------------------------------------ resync

    async def _resync_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_seconds)
            try:
                await self._resync()
            except Exception as error:
                log.warning("resync: %s", error, exc_info=not isinstance(error, _EXPECTED))

    async def _resync(self) -> None:
        before = {link.key: dict(link.view.reports) for link in self.links if link.view.reachable}
        await self._list_everything()
        alive = {experiment.meta.uid for experiment in self.cache.experiments()}
        self._memories = {uid: memory for uid, memory in self._memories.items() if uid in alive}
        for key, memory in self._engines.items():
            self._engines[key] = replace(memory, applied="")  # so that drift is put right
        # what an engine held before the list was taken, and the list does not know, belongs to nobody
        for key, reports in before.items():
            link = self.links.get(key)
            for uid, report in reports.items():
                ours = self._may_be_ours(key, report.namespace)
                if link is not None and ours and uid not in alive:
                    log.info("%s: experiment %s/%s is gone, detaching", key, report.namespace, report.name)
                    try:
                        await link.delete(uid, "Retain")
                    except EngineError as error:
                        log.warning("%s: cannot detach %s: %s", key, uid, error)
        for link in self.links:
            if self.cache.engine(link.key) is None:
                await self._retire_unless_needed(link.key)

    def _may_be_ours(self, key: Key, namespace: str) -> bool:
        """Whether an experiment of that namespace, unknown here, can be one of this operator's that is gone."""
        engine = self.cache.engine(key)
        shared = engine is not None and engine.spec is not None and engine.spec.allowed_namespaces.from_ != "Same"
        return self._settings.watches(namespace) and (namespace == key.namespace or shared)

    async def _list_everything(self) -> None:
        engines = await asyncio.to_thread(self._kube.list_all, ENGINES, self._settings.namespaces)
        experiments = await asyncio.to_thread(self._kube.list_all, EXPERIMENTS, self._settings.namespaces)
        keys = self.cache.replace("engine", engines) | self.cache.replace("experiment", experiments)
        guests = [e for e in self.cache.experiments() if needs_labels(e, self._referred(e))]
        await self._namespaces.refresh(guest.meta.namespace for guest in guests)
        specs = [experiment.spec for experiment in self.cache.experiments() if experiment.spec]
        await self._priorities.refresh(spec.priority_class_name for spec in specs if spec.priority_class_name)
        for key in keys:
            self.wake(key)

    async def _retire_unless_needed(self, key: Key) -> None:
        """The link of a deleted engine stays while experiments have to be released through it."""
        for experiment in self.cache.experiments():
            told = experiment.status.engine
            if told is not None and experiment.engine_key(told.name) == key:
                return
        await self.links.retire(key)


class ReconcileError(Exception):
    """Some actions of a plan failed; the message joins their messages."""


_EXPECTED = (ReconcileError, KubeError, EngineError, OSError)
