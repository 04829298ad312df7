"""What priorityClassName comes to: the value and the policy of a Kubernetes PriorityClass, read once and kept.

A class is immutable; it can be deleted and made anew, which the next resync finds. No name is priority 0. Leaves out
globalDefault, which is meant for pods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clora_api.v1alpha1.conditions import Reason
from clora_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Priority:
    """reason, problem: why there is no such priority; it counts as 0 then."""

    value: int = 0
    preempts: bool = True
    reason: Reason | None = None
    problem: str = ""


NO_CLASS = Priority()


class PriorityClasses:
    """For the event loop only."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._known: dict[str, Priority] = {}

    def known(self, name: str | None) -> Priority | None:
        """None: not read yet."""
        return NO_CLASS if name is None else self._known.get(name)

    async def read(self, name: str | None) -> Priority:
        """Raises KubeError when the API server does not answer."""
        known = self.known(name)
        if name is None or known is not None:
            return known or NO_CLASS
        return await self._load(name)

    async def refresh(self, names: Iterable[str]) -> None:
        """Reads those classes anew, and forgets the others."""
        wanted = set(names)
        self._known = {name: known for name, known in self._known.items() if name in wanted}
        for name in sorted(wanted):
            try:
                await self._load(name)
            except KubeError as error:
                log.warning("PriorityClass %s cannot be read now: %s", name, error)

    async def _load(self, name: str) -> Priority:
        try:
            found = priority_of(name, await asyncio.to_thread(self._kube.priority_class, name))
        except KubeError as error:
            if error.status != 403:
                raise
            found = Priority(reason=Reason.PRIORITY_CLASS_UNREADABLE, problem=_UNREADABLE)
        self._known[name] = found
        return found


def priority_of(name: str, body: Mapping[str, Any] | None) -> Priority:
    """Of the PriorityClass `name`, whose object is `body`."""
    if body is None:
        problem = f"spec.priorityClassName: there is no PriorityClass {name}: create it, or name one that there is"
        return Priority(reason=Reason.PRIORITY_CLASS_NOT_FOUND, problem=problem)
    return Priority(int(body.get("value", 0)), body.get("preemptionPolicy") != "Never")


_UNREADABLE = (
    "spec.priorityClassName: clora's operator may not read PriorityClasses, which belong to the whole cluster: have its"
    " account granted the verb get on priorityclasses.scheduling.k8s.io, or leave the field out"
)
