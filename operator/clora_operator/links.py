"""Staying in touch with engines: one task per engine that holds a long poll and keeps what the engine last said.

What was heard is an immutable EngineView; whoever decides reads it and never asks the engine itself. A view is rebuilt
from a full list whenever the connection or the engine's epoch is new. Leaves out every decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Literal

from clora_api.control import DesiredExperiment, DesiredServing, EngineInfo, ExperimentList, ExperimentReport
from clora_operator import metrics
from clora_operator.engine_client import EngineClient, EngineError, RefusedError, StartingError, UnauthorizedError
from clora_operator.resources import Key

log = logging.getLogger(__name__)

FULL_SECONDS = 5.0  # an engine that said "full" is not asked again for so long, unless something changes
RECONNECT_SECONDS = (0.5, 1.0, 2.0, 5.0)
SETTLE_SECONDS = 0.25  # news that come close together are told once

Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What is known of one engine. down_since: when it fell silent (or when we began to ask), None while it answers."""

    endpoint: str
    down_since: datetime | None
    info: EngineInfo | None = None
    error: str = ""
    unauthorized: bool = False
    starting: bool = False  # it answers that it loads its model
    full_until: datetime | None = None
    reports: Mapping[str, ExperimentReport] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def reachable(self) -> bool:
        return self.down_since is None and self.info is not None

    @property
    def ready(self) -> bool:
        return self.down_since is None and self.info is not None and self.info.ready

    def report(self, uid: str) -> ExperimentReport | None:
        """Of the engine's current epoch only."""
        found = self.reports.get(uid)
        return found if found and self.info and found.epoch == self.info.epoch else None

    def occupants(self) -> set[str]:
        """Uids that hold one of the engine's slots."""
        return {uid for uid in self.reports if (r := self.report(uid)) and r.occupying}


@dataclass(frozen=True, slots=True)
class Change:
    """What a link tells: uids whose report changed, and whether the engine itself did."""

    engine: Key
    uids: frozenset[str]
    engine_changed: bool


class EngineLink:
    """One engine. `view` is replaced, never changed; `on_change` is called on the event loop after each replacement.
    pod: the uid of the one that it is in, empty while that is not known."""

    def __init__(
        self,
        key: Key,
        endpoint: str,
        token: str,
        poll_seconds: float,
        clock: Clock,
        on_change: Callable[[Change], None],
        pod: str,
    ) -> None:
        self.key, self.endpoint, self.pod = key, endpoint, pod
        self._token, self._poll_seconds, self._clock, self._on_change = token, poll_seconds, clock, on_change
        self._client = EngineClient(endpoint, token)
        self.view = EngineView(endpoint=endpoint, down_since=clock())
        self._task = asyncio.create_task(self._run(), name=f"link {key}")

    def same(self, endpoint: str, token: str, pod: str) -> bool:
        """An unknown pod is no other."""
        same_pod = not pod or self.pod in ("", pod)
        return same_pod and (self.endpoint, self._token) == (endpoint, token)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._client.close()

    # ------------------------------------------------------------------ requests of the reconciler

    async def put(self, desired: DesiredExperiment) -> ExperimentReport:
        """Raises EngineError; a refusal for want of room is remembered for a while."""
        try:
            report = await self._client.put(desired)
        except EngineError as error:
            self._count("put", error)
            if isinstance(error, RefusedError) and error.kind == "capacity-exceeded":
                self._set(replace(self.view, full_until=self._clock() + timedelta(seconds=FULL_SECONDS)))
            raise
        self._merge(report)
        return report

    async def serve(self, uid: str, serving: DesiredServing) -> None:
        """Raises EngineError."""
        try:
            report = await self._client.serve(uid, serving)
        except EngineError as error:
            self._count("serve", error)
            raise
        self._merge(report)

    async def delete(self, uid: str, files: Literal["Retain", "Delete"]) -> bool:
        """True once the engine knows `uid` no longer. Raises EngineError."""
        try:
            report = await self._client.delete(uid, files)
        except EngineError as error:
            self._count("delete", error)
            raise
        if report is not None:
            self._merge(report)
            return False
        rest = {key: value for key, value in self.view.reports.items() if key != uid}
        self._set(replace(self.view, reports=MappingProxyType(rest)))
        return True

    # ------------------------------------------------------------------ the task

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._follow()
            except EngineError as error:
                self._count("poll", error)
                failures = 0 if self.view.down_since is None else failures + 1
                down_since = self.view.down_since or self._clock()
                self._set(
                    replace(
                        self.view,
                        down_since=down_since,
                        error=str(error),
                        unauthorized=isinstance(error, UnauthorizedError),
                        starting=isinstance(error, StartingError),
                    )
                )
            except Exception:  # a bug must not end the conversation with this engine unseen
                failures += 1
                log.exception("%s: the link failed", self.key)
            await asyncio.sleep(RECONNECT_SECONDS[min(failures, len(RECONNECT_SECONDS) - 1)])

    async def _follow(self) -> None:
        """From a full list on, one long poll after the other; returns when the epoch has changed."""
        info = await self._client.info()
        listed = await self._client.experiments()
        revision = listed.revision
        reports = {report.uid: report for report in listed.items}
        self._set(
            EngineView(endpoint=self.endpoint, down_since=None, info=info, reports=MappingProxyType(reports)),
        )
        while True:
            news = await self._client.experiments(revision, self._poll_seconds)
            info = await self._client.info()
            if info.epoch != listed.epoch or news.epoch != listed.epoch:
                return
            revision = news.revision
            self._take(news, info)
            await asyncio.sleep(SETTLE_SECONDS)

    def _take(self, news: ExperimentList, info: EngineInfo) -> None:
        """A list tells of all experiments; only an answer to a PUT of ours can be newer than it."""
        reports = {uid: known for uid, known in self.view.reports.items() if known.revision > news.revision}
        for report in news.items:
            known = reports.get(report.uid)
            if known is None or report.revision >= known.revision:
                reports[report.uid] = report
        self._set(replace(self.view, info=info, reports=MappingProxyType(reports)))

    def _merge(self, report: ExperimentReport) -> None:
        """An answer about one experiment; the newer report wins."""
        known = self.view.reports.get(report.uid)
        if known is None or (report.epoch, report.revision) >= (known.epoch, known.revision):
            self._set(replace(self.view, reports=MappingProxyType({**self.view.reports, report.uid: report})))

    def _set(self, view: EngineView) -> None:
        old, self.view = self.view, view
        changed = {uid for uid in old.reports.keys() | view.reports.keys() if old.report(uid) != view.report(uid)}
        freed = old.occupants() - view.occupants()
        if freed and view.full_until:
            self.view = replace(self.view, full_until=None)
        engine_changed = _essence(old) != _essence(self.view)
        if changed or engine_changed:
            self._on_change(Change(self.key, frozenset(changed), engine_changed))

    def _count(self, request: str, error: EngineError) -> None:
        metrics.ENGINE_ERRORS.labels(request, type(error).__name__).inc()
        log.debug("%s: %s failed: %s", self.key, request, error)


def _essence(view: EngineView) -> tuple[object, ...]:
    """What makes an engine's own reconcile and the placement worth a new look."""
    info = view.info
    summary = info and (info.epoch, info.ready, info.model, info.max_experiments, info.max_rank, info.experiments)
    return summary, view.down_since, view.unauthorized, view.starting, view.error, view.full_until, view.occupants()


class Links:
    """All links by engine. A link outlives its LoRAEngine until `retire`, so that experiments which are deleted at the
    same time can still be released."""

    def __init__(self, poll_seconds: float, clock: Clock, on_change: Callable[[Change], None]) -> None:
        self._poll_seconds, self._clock, self._on_change = poll_seconds, clock, on_change
        self._links: dict[Key, EngineLink] = {}

    def __iter__(self) -> Iterator[EngineLink]:
        return iter(list(self._links.values()))

    def get(self, key: Key) -> EngineLink | None:
        return self._links.get(key)

    def view(self, key: Key) -> EngineView | None:
        link = self._links.get(key)
        return link.view if link else None

    async def connect(self, key: Key, endpoint: str, token: str, pod: str = "") -> None:
        """A changed endpoint, token or pod makes a new link; what was heard over the old one counts no longer. pod:
        empty where it is not known."""
        link = self._links.get(key)
        known = pod or (link.pod if link is not None else "")
        if link is not None and link.same(endpoint, token, pod):
            link.pod = known
            return
        self._links[key] = EngineLink(key, endpoint, token, self._poll_seconds, self._clock, self._on_change, known)
        if link is not None:
            await link.close()

    async def retire(self, key: Key) -> None:
        link = self._links.pop(key, None)
        if link is not None:
            await link.close()

    async def close(self) -> None:
        for key in list(self._links):
            await self.retire(key)
