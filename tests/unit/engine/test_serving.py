"""Tokens and what they reach; versions that tenants' requests hold; served experiments in the supervisor's slots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry

from clora_api.control import DesiredExperiment, DesiredServing, ExperimentReport, Phase, RunMode, spec_digest
from clora_engine.config import EngineConfig
from clora_engine.errors import CapacityError, CheckpointError, EngineError, UserError
from clora_engine.sampler import Sampler
from clora_engine.server.app import create_app
from clora_engine.server.auth import TokenFile
from clora_engine.serving import MAX_REQUESTS, MAX_SEQUENCES, ServedAdapter, ServedAdapters
from clora_engine.supervisor import Supervisor
from clora_engine.training import Services
from clora_engine.types import Sample, SamplingParams, Version
from tests.unit.engine.loop import LocalTrainer, WrittenSampler, desired, tokenizer

TOKEN, OTHER = "token-of-the-first-experiment", "token-of-another-experiment"
PARAMS = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(0,))


# ------------------------------------------------------------------------------------------------ tokens


def test_a_token_reaches_its_experiment_and_nothing_else_does() -> None:
    served = ServedAdapters(versions=2)
    assert served.admit("a", "one", TOKEN)
    assert served.admit("b", "two", OTHER)
    found = served.find(TOKEN)
    assert found is not None
    assert (found.uid, found.name) == ("a", "one")
    for wrong in ("", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "a", "one", "é"):
        assert served.find(wrong) is None
    served.withdraw("a")
    served.withdraw("a")
    assert served.find(TOKEN) is None
    assert served.find(OTHER) is not None


def test_a_new_token_ends_the_old_one_and_the_same_changes_nothing() -> None:
    served = ServedAdapters(versions=2)
    served.admit("a", "one", TOKEN)
    before = served.find(TOKEN)
    assert served.admit("a", "one", TOKEN)
    assert served.find(TOKEN) is before
    assert served.admit("a", "one", OTHER)
    assert served.find(TOKEN) is None
    assert served.find(OTHER) is not None


async def test_a_new_token_gives_nobody_anything_new() -> None:
    """Whoever has the token can have it rotated, and a tenant may turn its serving off and on."""
    sampler, served = SlowSampler(), ServedAdapters(versions=1)

    def under(token: str, n: int = MAX_SEQUENCES) -> asyncio.Task[Any]:
        found = served.find(token)
        assert found is not None
        return asyncio.create_task(found.sample(cast(Sampler, sampler), [1], n, PARAMS))

    served.admit("a", "one", TOKEN)
    first = under(TOKEN)
    await asyncio.sleep(0)
    served.admit("a", "one", OTHER)
    with pytest.raises(CapacityError, match="sequences"):
        await under(OTHER)
    served.withdraw("a")
    assert served.find(OTHER) is None
    served.admit("a", "one", TOKEN)
    with pytest.raises(CapacityError, match="sequences"):
        await under(TOKEN)
    sampler.running[0][1].set()
    await first
    # Its one version is held by the former token's requests: no token makes room for another.
    sampler.step = 1
    older = under(TOKEN, 1)
    await asyncio.sleep(0)
    served.admit("a", "one", OTHER)
    sampler.step = 2
    newer = under(OTHER, 1)
    await asyncio.sleep(0)
    assert sampler.steps == [0, 1]
    sampler.running[1][1].set()
    await older
    while len(sampler.running) < 3:  # noqa: ASYNC110 - nothing tells that a request has begun
        await asyncio.sleep(0)
    sampler.running[2][1].set()
    assert (await newer).version.step == 2


def test_requests_are_bounded_whatever_token_they_came_with() -> None:
    served = ServedAdapters(versions=2)
    served.admit("a", "one", TOKEN)
    served.admit("b", "two", "token-of-a-third")
    with ExitStack() as under_way:
        for token in (TOKEN, OTHER) * (MAX_REQUESTS // 2):
            served.admit("a", "one", token)
            found = served.find(token)
            assert found is not None
            under_way.enter_context(found.request())
        for token in (TOKEN, OTHER):
            served.admit("a", "one", token)
            found = served.find(token)
            assert found is not None
            with pytest.raises(CapacityError) as refused, found.request():
                pass
            assert refused.value.reason == "TooManyRequests"
        other = served.find("token-of-a-third")
        assert other is not None
        with other.request():
            pass
    last = served.find(OTHER)
    assert last is not None
    with last.request():
        pass


def test_another_experiments_token_reaches_that_one_still() -> None:
    served = ServedAdapters(versions=2)
    served.admit("a", "one", TOKEN)
    served.admit("b", "two", OTHER)
    assert not served.admit("b", "two", TOKEN)
    found = served.find(TOKEN)
    assert found is not None
    assert found.uid == "a"
    assert served.find(OTHER) is None  # its former token is not its token any more


def test_no_token_is_kept_printed_or_part_of_a_digest() -> None:
    given = desired().model_copy(update={"serving_token": TOKEN})
    assert TOKEN not in repr(given)
    assert spec_digest(given) == spec_digest(desired())
    served = ServedAdapters(versions=2)
    served.admit("a", "one", TOKEN)
    adapter = served.find(TOKEN)
    assert adapter is not None
    assert TOKEN not in str(vars(adapter))
    assert TOKEN not in str(vars(served))


# ------------------------------------------------------------------------------------------------ versions


@dataclass
class SlowSampler:
    """Of whose requests each ends when it is told to; `step` is the latest version's."""

    step: int = 0
    running: list[tuple[int, asyncio.Event]] = field(default_factory=list)

    def lease(self, experiment: str, *, serving: bool) -> Any:
        assert serving, "a tenant's request is no sampling of the experiment's own"
        sampler, step = self, self.step

        class Lease:
            version = Version(experiment, step)

            def held(self) -> Any:
                return SimpleNamespace(name=f"{self.version}#{step}")

            def release(self) -> None:
                return None

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                return None

        assert sampler is self
        return Lease()

    async def sample(self, lease: Any, prompt_ids: Sequence[int], n: int, params: SamplingParams) -> list[Sample]:
        end = asyncio.Event()
        self.running.append((lease.version.step, end))
        await end.wait()
        return [Sample(ids=(1,), logprobs=(0.0,), truncated=False)] * n

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.running]


async def test_requests_hold_two_versions_at_most_and_never_an_older_one_than_need_be() -> None:
    sampler, adapter = SlowSampler(), ServedAdapter("a", "one", b"", versions=2)
    tasks = []
    for step in (0, 0, 1, 2, 2):
        sampler.step = step
        tasks.append(asyncio.create_task(adapter.sample(cast(Sampler, sampler), [1], 1, PARAMS)))
        await asyncio.sleep(0)
    assert sampler.steps == [0, 0, 1]  # the last two wait
    sampler.running[0][1].set()
    await tasks[0]
    await asyncio.sleep(0)
    assert sampler.steps == [0, 0, 1]  # step 0 is held still
    sampler.step = 3
    sampler.running[1][1].set()
    await tasks[1]
    while len(sampler.running) < 5:  # noqa: ASYNC110 - nothing tells that a request has begun
        await asyncio.sleep(0)
    assert sampler.steps == [0, 0, 1, 3, 3]
    for _, end in sampler.running:
        end.set()
    versions = [(await task).version.step for task in tasks]
    assert versions == [0, 0, 1, 3, 3]


async def test_sequences_of_one_token_are_bounded_and_come_free() -> None:
    sampler, adapter = SlowSampler(), ServedAdapter("a", "one", b"", versions=2)
    first = asyncio.create_task(adapter.sample(cast(Sampler, sampler), [1], MAX_SEQUENCES - 1, PARAMS))
    await asyncio.sleep(0)
    with pytest.raises(CapacityError) as refused:
        await adapter.sample(cast(Sampler, sampler), [1], 2, PARAMS)
    assert refused.value.reason == "TooManyRequests"
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    whole = asyncio.create_task(adapter.sample(cast(Sampler, sampler), [1], MAX_SEQUENCES, PARAMS))
    await asyncio.sleep(0)
    sampler.running[-1][1].set()
    assert len((await whole).samples) == MAX_SEQUENCES


# ------------------------------------------------------------------------------------------------ slots


class ServingSampler(WrittenSampler):
    """Keeps of each experiment the latest version's step, and what the gate is told."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.latest: dict[str, int] = {}
        self.told: list[tuple[str, int, int | None]] = []

    async def publish(self, version: Version, directory: Path) -> None:
        await super().publish(version, directory)
        self.latest[version.experiment] = version.step

    def register(self, experiment: str, weight: int, remaining_tokens: int | None) -> None:
        self.told.append((experiment, weight, remaining_tokens))

    def drop(self, experiment: str) -> None:
        self.latest.pop(experiment, None)

    def stats(self) -> Any:
        return SimpleNamespace(generation=1, versions=())


class Engine:
    """One life of an engine with one slot, without HTTP."""

    def __init__(self, storage: Path, epoch: int = 1, *, tenant_port: int | None = 9) -> None:
        config = EngineConfig(
            model="tiny",
            storage=storage,
            token_file=storage / "token",
            tenant_port=tenant_port,
            max_experiments=1,
            max_rank=8,
            max_model_len=512,
        )
        self.trainer, self.sampler = LocalTrainer(), ServingSampler(storage / f"versions-{epoch}")
        self.sampler.folder.mkdir(parents=True)
        self.supervisor = Supervisor(config, epoch, "0")
        self.supervisor.open(Services(config, cast(Any, self.trainer), cast(Any, self.sampler), tokenizer()))

    async def put(self, of: DesiredExperiment, **changes: Any) -> ExperimentReport:
        return await self.supervisor.put(of.model_copy(update=changes))

    async def until(self, uid: str, wanted: Any) -> ExperimentReport:
        async with asyncio.timeout(60):
            page = await self.supervisor.list()
            while not (found := [r for r in page.items if r.uid == uid and wanted(r)]):
                page = await self.supervisor.list(page.revision, 10)
        return found[0]


def one(uid: str = "0b6f2f6e-5d0c-4c58-9a36-3f0a51c1a001", **changes: Any) -> DesiredExperiment:
    return desired(maxSteps=1).model_copy(update={"uid": uid, "serving_token": TOKEN} | changes)


def has_ended(report: ExperimentReport) -> bool:
    return report.phase is Phase.SUCCEEDED and not report.adapter_loaded


async def test_what_is_served_after_its_end_holds_its_slot_and_no_trainer(tmp_path: Path) -> None:
    engine, wanted = Engine(tmp_path), one()
    await engine.put(wanted)
    running = await engine.until(wanted.uid, lambda r: r.adapter_loaded)
    assert running.serving is not None
    assert running.serving.version == "e@0"
    ended = await engine.until(wanted.uid, has_ended)
    assert ended.keeps_slot
    assert ended.serving is not None
    assert ended.serving.version == "e@1"
    assert TOKEN not in ended.model_dump_json()
    assert engine.supervisor.info().experiments == 1
    while engine.trainer.adapters:  # noqa: ASYNC110 - left in the run's last moments, untold
        await asyncio.sleep(0)
    assert engine.sampler.latest == {wanted.uid: 1}
    assert engine.sampler.told[-1] == (wanted.uid, 100, None)
    with pytest.raises(CapacityError, match="slots"):
        await engine.put(one("another", serving_token=OTHER))
    off = await engine.put(wanted, serving_token=None)
    assert (off.keeps_slot, off.serving, engine.sampler.latest) == (False, None, {})
    assert engine.supervisor.served.find(TOKEN) is None
    await engine.put(one("another", serving_token=OTHER))


async def test_a_later_epoch_serves_it_from_its_commit_and_never_trains_it(tmp_path: Path) -> None:
    first, wanted = Engine(tmp_path), one()
    await first.put(wanted)
    await first.until(wanted.uid, has_ended)
    (tmp_path / "experiments" / wanted.uid / "result.json").unlink()  # as of one that failed, or ended by a deadline
    second = Engine(tmp_path, 2)
    told = await second.put(wanted, mode=RunMode.SERVE, committed_step=1)
    assert told.phase is Phase.SUCCEEDED
    assert told.keeps_slot
    served = await second.until(wanted.uid, lambda r: r.serving is not None and r.serving.version)
    assert served.serving is not None
    assert served.serving.version == "e@1"
    assert second.sampler.latest == {wanted.uid: 1}
    assert second.trainer.calls == []
    light = wanted.spec.model_copy(update={"weight": 7, "max_steps": 9})  # of which nothing but the weight counts
    told = await second.put(wanted, spec=light, mode=RunMode.SERVE, committed_step=1)
    assert told.serving is not None
    assert (told.serving.weight, second.sampler.told[-1]) == (7, (wanted.uid, 7, None))
    served = await second.put(wanted, mode=RunMode.SERVE, committed_step=1)
    again = await second.put(wanted, mode=RunMode.SERVE, committed_step=1)
    assert again.revision == served.revision
    await second.supervisor.delete(wanted.uid, files=False)
    assert second.supervisor.served.find(TOKEN) is None
    assert second.sampler.latest == {}


@pytest.mark.parametrize("stop", ["delete", "withdraw"])
async def test_stopped_while_it_loads_it_leaves_no_version(tmp_path: Path, stop: str) -> None:
    first, wanted = Engine(tmp_path), one()
    await first.put(wanted)
    await first.until(wanted.uid, has_ended)
    second = Engine(tmp_path, 2)
    begun, go_on, publish = asyncio.Event(), asyncio.Event(), second.sampler.publish

    async def slowly(version: Version, directory: Path) -> None:
        begun.set()
        await go_on.wait()
        await publish(version, directory)

    second.sampler.publish = slowly  # type: ignore[method-assign]
    await second.put(wanted, mode=RunMode.SERVE, committed_step=1)
    (task,) = second.supervisor._tasks.values()
    await begun.wait()
    if stop == "delete":
        await second.supervisor.delete(wanted.uid, files=False)
    else:
        await second.put(wanted, mode=RunMode.SERVE, serving_token=None)
    go_on.set()
    await task
    assert second.sampler.published == [1]
    assert second.sampler.latest == {}


async def test_a_version_that_is_lost_is_said_and_loaded_again(tmp_path: Path) -> None:
    engine, wanted = Engine(tmp_path), one()
    await engine.put(wanted)
    before = await engine.until(wanted.uid, has_ended)
    engine.supervisor.version_lost(Version(wanted.uid, 0))  # no longer of interest
    engine.supervisor.version_lost(Version("somebody", 1))
    assert engine.supervisor.report(wanted.uid).revision == before.revision
    engine.supervisor.version_lost(Version(wanted.uid, 1))
    after = engine.supervisor.report(wanted.uid)
    assert after.revision > before.revision
    assert not after.keeps_slot
    assert after.serving is not None
    assert (after.serving.version, after.serving.problem != "") == ("", True)
    await engine.put(wanted, mode=RunMode.SERVE, committed_step=1)
    again = await engine.until(wanted.uid, lambda r: r.serving is not None and r.serving.version)
    assert again.keeps_slot
    assert again.serving is not None
    assert (again.serving.version, again.serving.problem) == ("e@1", "")


async def test_what_has_no_commits_here_is_refused(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    with pytest.raises(CheckpointError, match="step 3 was committed"):
        await engine.put(one(), mode=RunMode.SERVE, committed_step=3)
    with pytest.raises(CheckpointError, match="no commits"):
        await engine.put(one(), mode=RunMode.SERVE)
    assert engine.supervisor.info().experiments == 0
    assert engine.supervisor.served.find(TOKEN) is None


async def test_a_damaged_commit_gives_the_slot_back_and_says_why(tmp_path: Path) -> None:
    first, wanted = Engine(tmp_path), one()
    await first.put(wanted)
    await first.until(wanted.uid, has_ended)
    second = Engine(tmp_path, 2)
    (tmp_path / "experiments" / wanted.uid / "steps" / "00001" / "adapter_model.safetensors").write_bytes(b"torn")
    second_report = second.put(wanted, mode=RunMode.SERVE)
    with pytest.raises(EngineError, match="does not match its manifest"):
        await second_report
    assert second.supervisor.info().experiments == 0


async def test_without_a_port_for_tenants_nothing_is_kept(tmp_path: Path) -> None:
    engine, wanted = Engine(tmp_path, tenant_port=None), one()
    await engine.put(wanted)
    ended = await engine.until(wanted.uid, has_ended)
    assert (ended.keeps_slot, ended.serving) == (False, None)
    assert not engine.supervisor.info().serves
    assert engine.supervisor.served.find(TOKEN) is None


async def test_a_token_of_another_experiment_is_said(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.supervisor.served.admit("somebody", "else", TOKEN)
    report = await engine.put(one())
    assert report.serving is not None
    assert "another experiment's" in report.serving.problem
    mended = await engine.put(one(), serving_token=OTHER)
    assert mended.serving is not None
    assert mended.serving.problem == ""
    await engine.until(report.uid, has_ended)


async def test_a_refused_spec_keeps_no_revoked_token_valid(tmp_path: Path) -> None:
    engine, wanted = Engine(tmp_path), one()
    await engine.put(wanted)
    wrong = wanted.spec.model_copy(update={"lora": wanted.spec.lora.model_copy(update={"rank": 2})})
    with pytest.raises(UserError):
        await engine.put(wanted, spec=wrong, serving_token=OTHER)
    assert engine.supervisor.served.find(TOKEN) is None
    assert engine.supervisor.served.find(OTHER) is not None
    with pytest.raises(UserError):
        await engine.put(wanted, spec=wrong, serving_token=None)
    assert engine.supervisor.served.find(OTHER) is None
    ended = await engine.until(wanted.uid, has_ended)
    assert (ended.keeps_slot, ended.serving) == (False, None)


async def test_who_may_ask_is_told_apart_from_the_spec(tmp_path: Path) -> None:
    """Over HTTP: revoked, rotated, with another weight; and again, which changes nothing."""
    engine, wanted = Engine(tmp_path), one(spec=desired(maxSteps=1000).spec)
    (tmp_path / "token").write_text("of-the-operator")
    app = create_app(engine.supervisor, TokenFile(tmp_path / "token"), CollectorRegistry())
    headers = {"Authorization": "Bearer of-the-operator"}
    await engine.put(wanted)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://e", headers=headers) as http:

        async def tell(uid: str = wanted.uid, **serving: Any) -> httpx.Response:
            return await http.put(f"/v1/experiments/{uid}/serving", json=serving)

        rotated = ExperimentReport.model_validate((await tell(servingToken=OTHER, weight=7)).json())
        assert rotated.serving is not None
        assert rotated.serving.weight == 7
        assert engine.supervisor.served.find(TOKEN) is None
        assert engine.supervisor.served.find(OTHER) is not None
        report = engine.supervisor.report(wanted.uid)
        assert report.spec_digest == spec_digest(
            wanted.model_copy(update={"spec": desired(maxSteps=1000, weight=7).spec})
        )
        await engine.until(wanted.uid, lambda r: r.phase is Phase.RUNNING)
        assert (wanted.uid, 7) in [told[:2] for told in engine.sampler.told]
        off = ExperimentReport.model_validate((await tell()).json())
        assert (off.phase, off.serving) == (Phase.RUNNING, None)
        assert engine.supervisor.served.find(OTHER) is None
        assert OTHER not in str(off)
        assert (await tell(servingToken="short")).status_code == 422
        assert (await tell("nobody", servingToken=OTHER)).status_code == 404
        assert engine.supervisor.served.find(OTHER) is None
    await engine.supervisor.stop(60)


async def test_serving_turned_on_by_itself_takes_no_slot(tmp_path: Path) -> None:
    """That needs a PUT, which is refused on a full engine."""
    engine, wanted = Engine(tmp_path), one(serving_token=None)
    await engine.put(wanted)
    await engine.until(wanted.uid, has_ended)
    report = engine.supervisor.serve(wanted.uid, DesiredServing(serving_token=TOKEN))
    assert not report.keeps_slot
    before = report.revision
    assert engine.supervisor.serve(wanted.uid, DesiredServing(serving_token=TOKEN)).revision == before
    assert engine.supervisor.info().experiments == 0
    on = await engine.put(wanted, mode=RunMode.SERVE, serving_token=TOKEN, committed_step=1)
    assert on.keeps_slot
    await engine.until(wanted.uid, lambda r: r.serving is not None and r.serving.version)
    off = engine.supervisor.serve(wanted.uid, DesiredServing())
    assert (off.keeps_slot, engine.sampler.latest) == (False, {})


def test_an_engine_says_what_fits_it(tmp_path: Path) -> None:
    info = Engine(tmp_path).supervisor.info()
    assert (info.max_experiments, info.max_rank, info.max_off_policy_steps, info.max_context) == (1, 8, 2, 512)
    assert info.environments == ["GSM8K", "WordProblems"]


def test_the_sampler_has_slots_for_what_tenants_hold() -> None:
    config = EngineConfig(model="m", storage=Path("s"), token_file=Path("t"), max_experiments=3)
    assert (config.served_versions, config.sampler_slots) == (0, 12)
    with_tenants = EngineConfig(model="m", storage=Path("s"), token_file=Path("t"), max_experiments=3, tenant_port=9)
    assert (with_tenants.served_versions, with_tenants.sampler_slots) == (2, 18)
