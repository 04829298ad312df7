"""What the watch has told: every LoRAEngine and LoRAExperiment, newest version by name.

Fed by events, by the answers to our own writes, and replaced by a full list at each resync, so that a missed event is
missed for one resync at most. Leaves out children (Secrets, StatefulSets, …), which are read when needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from clora_operator.resources import Engine, Experiment, Key, Kind, parse_engine, parse_experiment

log = logging.getLogger(__name__)


class Cache:
    """Not thread-safe: for the event loop only."""

    def __init__(self) -> None:
        self._experiments: dict[Key, Experiment] = {}
        self._engines: dict[Key, Engine] = {}

    def experiment(self, key: Key) -> Experiment | None:
        return self._experiments.get(key)

    def engine(self, key: Key) -> Engine | None:
        return self._engines.get(key)

    def experiments(self) -> list[Experiment]:
        return list(self._experiments.values())

    def engines(self) -> list[Engine]:
        return list(self._engines.values())

    def put(self, kind: Kind, body: Mapping[str, Any]) -> Key:
        """An event that says that an object is there. An older version than the known one is ignored."""
        key = _key(kind, body)
        if kind == "experiment":
            _put(self._experiments, key, parse_experiment(body))
        else:
            _put(self._engines, key, parse_engine(body))
        return key

    def put_answer(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """The answer to a write of ours; it does not bring back what has been deleted meanwhile."""
        key = _key(kind, body)
        known = self.experiment(key) if kind == "experiment" else self.engine(key)
        if known is not None and known.meta.uid == body["metadata"]["uid"]:
            self.put(kind, body)

    def remove(self, kind: Kind, body: Mapping[str, Any]) -> Key:
        """An event that says that an object is gone."""
        key = _key(kind, body)
        known: dict[Key, Any] = self._experiments if kind == "experiment" else self._engines
        if key in known and known[key].meta.uid == body["metadata"]["uid"]:
            del known[key]
        return key

    def replace(self, kind: Kind, bodies: Iterable[Mapping[str, Any]]) -> set[Key]:
        """A full list; returns the keys that are there now or were there before.

        One that cannot be read (the status of a later release) stays as it was known: it must not hide the others.
        """
        known: dict[Key, Any] = self._experiments if kind == "experiment" else self._engines
        before, now = set(known), set()
        for body in bodies:
            now.add(_key(kind, body))
            try:
                self.put(kind, body)
            except ValidationError as error:
                log.warning("%s cannot be read: %s", _key(kind, body), error)
        for key in before - now:
            del known[key]
        return before | now


def _key(kind: Kind, body: Mapping[str, Any]) -> Key:
    return Key(kind, body["metadata"]["namespace"], body["metadata"]["name"])


def _put(known: dict[Key, Any], key: Key, new: Experiment | Engine) -> None:
    old = known.get(key)
    # resourceVersions of one object grow: etcd's revision
    if old is None or old.meta.uid != new.meta.uid or _version(new) >= _version(old):
        known[key] = new


def _version(item: Experiment | Engine) -> int:
    return int(item.meta.resource_version)
