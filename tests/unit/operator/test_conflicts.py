"""Somebody else writes first: the API server answers 409, and the newer version is looked at again at once."""

from __future__ import annotations

import asyncio
import copy
import threading
from contextlib import suppress
from typing import Any

from clora_api import API_VERSION, FINALIZER
from clora_operator.act import Actor
from clora_operator.cache import Cache
from clora_operator.decide import decide_experiment
from clora_operator.kube import EXPERIMENTS, KubeError
from clora_operator.links import Links
from clora_operator.reconciler import Reconciler
from clora_operator.resources import parse_experiment
from tests.unit.operator.factories import NOW, SETTINGS, UID, metadata, observed, spec

LABELS = {"written-by": "somebody"}


class OneExperiment:
    """An API server with one experiment, which somebody labels just before the operator's first write of its status:
    that write is late and refused, as any is whose resourceVersion is not the present one."""

    def __init__(self) -> None:
        meta = metadata("one", UID, finalizers=[FINALIZER])
        self.body: dict[str, Any] = {
            "apiVersion": API_VERSION,
            "kind": "LoRAExperiment",
            "metadata": meta,
            "spec": spec(),
        }
        self.writes: list[tuple[str, int]] = []  # of its status: the version that it was made from, and the answer
        self.events: list[str] = []
        self.told = threading.Event()

    def list_all(self, plural: str, namespaces: tuple[str, ...]) -> list[dict[str, Any]]:
        return [copy.deepcopy(self.body)] if plural == EXPERIMENTS else []

    def get(self, plural: str, namespace: str, name: str) -> dict[str, Any]:
        return copy.deepcopy(self.body)

    def patch_status(self, plural: str, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if not self.writes:
            self.body["metadata"] |= {"labels": LABELS, "resourceVersion": "101"}
        version, present = body["metadata"]["resourceVersion"], self.body["metadata"]["resourceVersion"]
        self.writes.append((version, 200 if version == present else 409))
        if version != present:
            raise KubeError(409, "the object has been modified; please apply your changes to the latest version")
        self.body["metadata"]["resourceVersion"] = str(int(present) + 1)
        self.body["status"] = body["status"]
        return copy.deepcopy(self.body)

    def create_event(self, namespace: str, body: dict[str, Any]) -> None:
        self.events.append(body["reason"])
        self.told.set()

    def priority_class(self, name: str) -> None:
        return None

    def namespace(self, name: str) -> None:
        return None


async def test_a_status_write_that_comes_too_late_is_a_conflict_and_no_error() -> None:
    server, cache = OneExperiment(), Cache()
    links = Links(SETTINGS.poll_seconds, lambda: NOW, lambda _: None)
    actor = Actor(server, cache, links, lambda: NOW)  # type: ignore[arg-type]
    known = parse_experiment(server.get(EXPERIMENTS, "team", "one"))
    plan = decide_experiment(
        observed(known, data_missing="spec.data.configMap: there is no ConfigMap d"), NOW, SETTINGS
    )
    assert [event.reason for event in plan.events] == ["DataNotFound"]

    outcome = await actor.carry_out(known, plan)
    assert (outcome.conflict, outcome.written, outcome.errors) == (True, False, [])
    assert server.events == [], "nobody is told of what was not written"

    outcome = await actor.carry_out(parse_experiment(server.body), plan)
    assert (outcome.conflict, outcome.written, outcome.errors) == (False, True, [])
    assert server.events == ["DataNotFound"]


async def test_the_newest_version_is_looked_at_again_at_once() -> None:
    """Without a watch, which would bring it, and long before the resync or a back-off."""
    server = OneExperiment()
    reconciler = Reconciler(server, SETTINGS, lambda: NOW)  # type: ignore[arg-type]
    running = asyncio.create_task(reconciler.run())
    try:
        assert await asyncio.to_thread(server.told.wait, SETTINGS.resync_seconds / 4)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await reconciler.close()
    assert server.writes == [("100", 409), ("101", 200)]
    assert server.events == ["EngineNotFound"], "told once"
    (known,) = reconciler.cache.experiments()
    assert known.meta.resource_version == "102"
    assert server.body["metadata"]["labels"] == LABELS, "what the other has written stays"
