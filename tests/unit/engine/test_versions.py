"""The bookkeeping of versions under any order of events, against a plain model of what must hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from clora_engine.errors import CapacityError, EngineError
from clora_engine.types import Version
from clora_engine.versions import FIRST_LORA_ID, Entry, State, VersionTable

EXPERIMENTS = st.sampled_from(["a", "b", "c"])


class Versions(RuleBasedStateMachine):
    """Publishes, leases, requests, drops and losses in any order. `current` is what a lease must give, by the events
    alone; `held` and `busy` count what the table must not let go."""

    waiting: Bundle[Entry] = Bundle("waiting")
    loading: Bundle[Entry] = Bundle("loading")
    leases: Bundle[Entry] = Bundle("leases")
    requests: Bundle[Entry] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.table = VersionTable(slots=3)
        self.step = 0
        self.current: dict[str, Entry] = {}
        self.held: list[Entry] = []
        self.busy: list[Entry] = []
        self.loaded: list[Entry] = []
        self.dropped: list[Entry] = []
        self.announced: list[Entry] = []
        self.unloading: list[Entry] = []
        self.ids: set[int] = set()

    def free(self, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            assert entry not in self.held
            assert entry not in self.busy
            assert entry not in self.current.values()
            assert entry not in self.unloading
        self.unloading += entries

    @rule(target=waiting, experiment=EXPERIMENTS)
    def announce(self, experiment: str) -> Entry:
        self.step += 1
        entry = self.table.announce(Version(experiment, self.step), Path(str(self.step)))
        assert entry.lora_id not in self.ids
        self.ids.add(entry.lora_id)
        self.announced.append(entry)
        return entry

    @rule(target=loading, entry=consumes(waiting))
    def reserve(self, entry: Entry) -> MultipleResults[Entry] | Entry:
        full = len(self.table.entries) == 3
        if entry in self.dropped:
            with pytest.raises(EngineError, match="was dropped"):
                self.table.reserve(entry)
        elif full and all(e in self.current.values() for e in self.table.entries):
            with pytest.raises(CapacityError):
                self.table.reserve(entry)
        elif self.table.reserve(entry):
            assert not full
            self.loaded.append(entry)
            return entry
        else:
            assert full
        assert self.table.abandon(entry) == ()  # it had no slot
        return multiple()

    @rule(entry=consumes(loading))
    def commit(self, entry: Entry) -> None:
        self.loaded.remove(entry)
        latest = self.current.get(entry.version.experiment)
        if entry in self.dropped:
            with pytest.raises(EngineError, match="was dropped"):
                self.table.commit(entry)
            self.free(self.table.abandon(entry))
        elif latest is not None and latest.lora_id > entry.lora_id:
            self.free(self.table.commit(entry))
            assert entry in self.unloading
        else:
            self.current[entry.version.experiment] = entry
            self.free(self.table.commit(entry))

    @rule(entry=consumes(loading))
    def load_fails(self, entry: Entry) -> None:
        self.loaded.remove(entry)
        self.free(self.table.abandon(entry))
        assert entry in self.unloading

    @rule(target=leases, experiment=EXPERIMENTS)
    def lease(self, experiment: str) -> MultipleResults[Entry] | Entry:
        if experiment not in self.current:
            with pytest.raises(EngineError, match="no version"):
                self.table.lease(experiment)
            return multiple()
        entry = self.table.lease(experiment)
        assert entry is self.current[experiment]
        self.held.append(entry)
        return entry

    @rule(entry=consumes(leases))
    def release(self, entry: Entry) -> None:
        self.held.remove(entry)
        self.free(self.table.release(entry))

    @rule(target=requests, entry=leases)
    def enter(self, entry: Entry) -> MultipleResults[Entry] | Entry:
        if entry.state is State.LOST:
            with pytest.raises(EngineError, match="could not be loaded"):
                self.table.enter(entry)
            return multiple()
        self.table.enter(entry)
        self.busy.append(entry)
        return entry

    @rule(entry=consumes(requests))
    def leave(self, entry: Entry) -> None:
        self.busy.remove(entry)
        self.free(self.table.leave(entry))

    @rule(experiment=EXPERIMENTS)
    def drop(self, experiment: str) -> None:
        self.current.pop(experiment, None)
        self.dropped += [entry for entry in self.announced if entry.version.experiment == experiment]
        self.free(self.table.drop(experiment))

    @precondition(lambda self: self.table.to_load())
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.table.to_load()))
        if self.current.get(entry.version.experiment) is entry:
            del self.current[entry.version.experiment]
        self.free(self.table.abandon(entry))

    @precondition(lambda self: self.unloading)
    @rule()
    def removed(self) -> None:
        self.table.removed(self.unloading.pop(0))

    @invariant()
    def holds(self) -> None:
        entries = self.table.entries
        assert len(entries) + self.table.free == 3
        assert self.table.free >= 0
        assert set(map(id, self.held + self.busy)) <= set(map(id, entries))
        assert all(e.state is State.LIVE for e in self.current.values())
        assert {id(e) for e in entries if e.state is State.UNLOADING} == set(map(id, self.unloading))
        # nothing lingers: what no lease, request or experiment needs is on its way out
        needed = set(map(id, [*self.held, *self.busy, *self.current.values(), *self.unloading, *self.loaded]))
        assert all(id(e) in needed for e in entries)


Versions.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestVersions = Versions.TestCase


def published(table: VersionTable, experiment: str, step: int) -> Entry:
    entry = announced(table, experiment, step)
    assert table.reserve(entry)
    table.commit(entry)
    return entry


def announced(table: VersionTable, experiment: str, step: int) -> Entry:
    return table.announce(Version(experiment, step), Path(f"{experiment}{step}-{len(table.entries)}"))


def test_a_step_that_is_published_twice_has_two_names() -> None:
    """After a rollback the same step is trained again; vLLM's prefix cache must not mistake the new for the old."""
    table = VersionTable(slots=2)
    first, second = published(table, "e", 5), published(table, "e", 5)
    assert first.name != second.name
    assert table.lease("e") is second
    assert first.lora_id == FIRST_LORA_ID


def test_only_versions_that_can_be_asked_for_are_loaded_again() -> None:
    table = VersionTable(slots=4)
    old = published(table, "e", 0)
    table.lease("e")
    new = published(table, "e", 1)
    gone = published(table, "f", 0)
    table.drop("f")
    table.reserve(announced(table, "g", 0))
    assert gone.state is State.UNLOADING
    assert table.to_load() == (old, new)


def test_full_of_latest_versions_is_said_at_once_and_full_of_leased_ones_is_waited_for() -> None:
    table = VersionTable(slots=2)
    published(table, "e", 0)
    table.lease("e")
    published(table, "e", 1)
    assert not table.reserve(announced(table, "e", 2))
    table = VersionTable(slots=2)
    published(table, "e", 0)
    published(table, "f", 0)
    with pytest.raises(CapacityError, match="more slots"):
        table.reserve(announced(table, "e", 1))


def test_two_versions_never_share_a_directory() -> None:
    """The first to go would remove the other's files, and a core that is restarted would load the wrong ones."""
    table = VersionTable(slots=2)
    table.announce(Version("e", 0), Path("x"))
    with pytest.raises(EngineError, match="another version was published from x"):
        table.announce(Version("f", 0), Path("x"))
