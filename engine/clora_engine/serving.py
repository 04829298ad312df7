"""Who may ask which adapter: tokens of experiments, and what their holders get of the sampler.

A token leads to one experiment, whose uid alone goes on to the sampler: no name that a tenant sends chooses an adapter.
Tokens are kept as digests, and all are compared, each in constant time. While an experiment trains, a request gets its
latest version and keeps it to its end; requests may so hold at most two versions of it (EngineConfig.served_versions,
for which the sampler has slots) and wait beyond that, so that nobody's publishes wait for tenants. All bounds are the
experiment's, whatever token its requests came with: a new token gives nobody anything new.

Left out: HTTP (server/tenants.py), and when an adapter is on the sampler (experiment.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from clora_engine.errors import CapacityError
from clora_engine.sampler import Lease, Sampler
from clora_engine.types import Sample, SamplingParams, Version

MAX_SEQUENCES = 64
"""Of one experiment's tenants, waiting and being sampled."""
MAX_REQUESTS = MAX_SEQUENCES
"""Of one experiment's tenants, from their first byte of a body to their answer: so many texts wait to become tokens."""


@dataclass(frozen=True, slots=True)
class Served:
    """n samples of one prompt, all by one version."""

    version: Version
    samples: list[Sample]


class ServedAdapter:
    """What one experiment's token reaches; `digest` is the present token's. `name` is the experiment's."""

    def __init__(self, uid: str, name: str, digest: bytes, versions: int) -> None:
        self.uid, self.name, self.digest = uid, name, digest
        self._versions = versions
        self._held: Counter[str] = Counter()  # requests by the version that they have begun with
        self._ended = asyncio.Event()
        self._sequences = 0
        self._requests = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """To be entered before anything is done for a request, its body read included. Raises CapacityError
        (TooManyRequests) when this experiment has MAX_REQUESTS under way."""
        if self._requests >= MAX_REQUESTS:
            raise CapacityError(
                f"{MAX_REQUESTS} requests for this model are under way: try again when some have ended",
                reason="TooManyRequests",
            )
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def sample(self, sampler: Sampler, prompt_ids: Sequence[int], n: int, params: SamplingParams) -> Served:
        """As Sampler.sample, under the latest version. Raises EngineError (NoVersion) while the adapter is not on the
        sampler, CapacityError (TooManyRequests) when this experiment has MAX_SEQUENCES under way."""
        if self._sequences + n > MAX_SEQUENCES:
            raise CapacityError(
                f"{self._sequences} sequences of this model are under way, of {MAX_SEQUENCES} at most: try again"
                " when some have ended",
                reason="TooManyRequests",
            )
        self._sequences += n
        try:
            async with self._lease(sampler) as lease:
                return Served(lease.version, await sampler.sample(lease, prompt_ids, n, params))
        finally:
            self._sequences -= n

    @asynccontextmanager
    async def _lease(self, sampler: Sampler) -> AsyncIterator[Lease]:
        while True:
            lease = sampler.lease(self.uid, serving=True)
            name = lease.held().name
            if name in self._held or len(self._held) < self._versions:
                break
            lease.release()
            await self._ended.wait()
        self._held[name] += 1
        try:
            with lease:
                yield lease
        finally:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]
                self._ended.set()
                self._ended = asyncio.Event()


class ServedAdapters:
    """All tokens of one engine."""

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self._adapters: dict[str, ServedAdapter] = {}
        # Those that are withdrawn too, while anything of theirs is under way and counts.
        self._known: WeakValueDictionary[str, ServedAdapter] = WeakValueDictionary()

    def admit(self, uid: str, name: str, token: str) -> bool:
        """From now on this token, and no earlier one of it, reaches experiment `uid`. False, and none does, when it is
        another experiment's."""
        digest = _digest(token)
        known = self._adapters.get(uid)
        if known is not None and hmac.compare_digest(known.digest, digest):
            return True
        self.withdraw(uid)
        if self.find(token) is not None:
            return False
        adapter = self._known.get(uid)
        if adapter is None:
            adapter = self._known[uid] = ServedAdapter(uid, name, digest, self._versions)
        adapter.name, adapter.digest = name, digest
        self._adapters[uid] = adapter
        return True

    def withdraw(self, uid: str) -> None:
        """No token reaches it any more; what is under way is finished."""
        self._adapters.pop(uid, None)

    def find(self, token: str) -> ServedAdapter | None:
        """What a token reaches."""
        digest, found = _digest(token), None
        for adapter in self._adapters.values():
            if hmac.compare_digest(adapter.digest, digest):
                found = adapter
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
