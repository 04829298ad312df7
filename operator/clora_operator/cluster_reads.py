"""Cluster-scoped objects that the operator looks up by name: read once, kept, read anew at each resync.

An account that may not read them gets an answer of its own, for the conditions to tell; what it has read before it
lost the right stands until the operator starts anew. Leaves out watching: these objects hardly ever change, and `get`
is all the right that is needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from clora_operator.kube import KubeError

log = logging.getLogger(__name__)
T = TypeVar("T")


class ClusterReads(Generic[T]):
    """For the event loop only.

    get        the object of a name, or None; blocks
    found      what an object, or its absence, comes to
    forbidden  what it comes to where the account may not read it
    """

    def __init__(
        self,
        get: Callable[[str], Mapping[str, Any] | None],
        found: Callable[[str, Mapping[str, Any] | None], T],
        forbidden: T,
    ) -> None:
        self._get, self._found, self._forbidden = get, found, forbidden
        self._known: dict[str, T] = {}

    def known(self, name: str) -> T | None:
        """None: not read yet."""
        return self._known.get(name)

    async def read(self, name: str) -> T:
        """Raises KubeError when the API server does not answer."""
        known = self._known.get(name)
        return await self._load(name) if known is None else known

    async def refresh(self, names: Iterable[str]) -> None:
        """Reads those anew, and forgets the others."""
        wanted = set(names)
        self._known = {name: known for name, known in self._known.items() if name in wanted}
        for name in sorted(wanted):
            try:
                await self._load(name)
            except KubeError as error:
                log.warning("%s cannot be read now: %s", name, error)

    async def _load(self, name: str) -> T:
        try:
            found = self._found(name, await asyncio.to_thread(self._get, name))
        except KubeError as error:
            if error.status != 403:
                raise
            found = self._known.get(name, self._forbidden)  # what was read before the right was lost still counts
        self._known[name] = found
        return found
