"""All experiments of one engine: desired state in, reports out. Decides who holds a slot; knows nothing of HTTP.

An experiment holds one of `max_experiments` slots from its PUT until it has succeeded, failed, been suspended or
deleted; one that is served to tenants goes on holding it after it has succeeded. Reports carry a revision that grows
with every change, so that a reader can wait for news.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from clora_api.control import (
    CheckpointList,
    DesiredExperiment,
    DesiredServing,
    EngineInfo,
    ExperimentList,
    ExperimentReport,
    Phase,
    RunMode,
    spec_digest,
)
from clora_api.v1alpha1.engine import offered_environments
from clora_engine.admissions import Admissions
from clora_engine.config import EngineConfig
from clora_engine.errors import CapacityError
from clora_engine.experiment import Experiment
from clora_engine.journal import Journal
from clora_engine.reported import reported_checkpoint
from clora_engine.sampler import Sampler, SamplerStats
from clora_engine.serving import ServedAdapters
from clora_engine.training import Services
from clora_engine.types import Version

log = logging.getLogger(__name__)

CANCEL_SECONDS = 10.0  # for what was cancelled to end


class UnknownExperimentError(KeyError):
    """The engine has no experiment of that uid."""


class _Checked(NamedTuple):
    """`needs_slot`: unless its result was found in the storage."""

    experiment: Experiment
    needs_slot: bool


class Supervisor:
    """The experiments of the engine of one epoch."""

    def __init__(self, config: EngineConfig, epoch: int, version: str) -> None:
        self._config = config
        self._opened: Services | None = None
        self.epoch = epoch
        self._version = version
        self._experiments: dict[str, Experiment] = {}
        self._admissions = Admissions[_Checked]()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._revisions: dict[str, int] = {}
        self._revision = 0
        self._news = asyncio.Event()
        self._closing = False
        self.served = ServedAdapters(config.served_versions)
        self.waits_for: Callable[[], str] = str  # other than for its model, as a phrase

    def open(self, services: Services) -> None:
        """The model is loaded: experiments are welcome."""
        self._opened = services

    @property
    def ready(self) -> bool:
        return self._opened is not None and not self._closing

    @property
    def starting(self) -> str:
        """Why it is not ready yet."""
        return f"the engine {self.waits_for() or 'is loading its model'}"

    @property
    def _services(self) -> Services:
        assert self._opened is not None, "asked before it was ready"
        return self._opened

    @property
    def sampler(self) -> Sampler:
        return self._services.sampler

    @property
    def tokenizer(self) -> Any:
        """Shared, never changed."""
        return self._services.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self._config.max_model_len

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, special ones included."""
        text: str = self._services.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def sampler_stats(self) -> SamplerStats | None:
        return self._opened.sampler.stats() if self._opened else None

    def trainer_busy_seconds(self) -> float:
        """Seconds of this epoch in which the trainer ran a command."""
        return self._opened.trainer.busy.seconds if self._opened else 0.0

    # ---------------------------------------------------------------- desired state

    async def put(self, desired: DesiredExperiment) -> ExperimentReport:
        """Brings an experiment to its desired state; the same call again changes nothing.

        Raises UserError for a spec that cannot run here, CapacityError when no slot is free, CheckpointError when the
        storage lacks its commits, TransientError while an earlier spec of it is being checked. Who may ask an
        experiment that is known is settled first: a refusal keeps no revoked token valid.
        """
        known = self._experiments.get(desired.uid)
        if known is None:
            asked = f"{desired.mode}/{spec_digest(desired)}"
            checked = await self._admissions.ask(desired.uid, asked, lambda: self._checked(desired))
            known = await self._added(checked, desired)
        elif known.phase is not Phase.DELETING:
            await self._update(known, desired)
        self._let_in(known)
        self._start_if_due(known)
        self._serve_if_due(known)
        return self.report(desired.uid)

    def serve(self, uid: str, serving: DesiredServing) -> ExperimentReport:
        """Settles who may ask an experiment that is known, and its weight, and nothing else: it starts nothing and
        takes no slot. Raises UnknownExperimentError."""
        known = self._experiments.get(uid)
        if known is not None and known.phase is not Phase.DELETING:
            known.update(_with_serving(known.desired, serving))
            self._let_in(known)
        return self.report(uid)

    async def _checked(self, desired: DesiredExperiment) -> _Checked:
        """An experiment whose spec can run here, or whose result is known."""
        made = Experiment(desired, self._services, self.epoch, self._changed_by(desired.uid))
        if desired.mode is RunMode.SERVE:
            await asyncio.to_thread(made.restore_end)
        elif await asyncio.to_thread(made.restore_result):
            return _Checked(made, needs_slot=False)
        else:
            await made.validate()
            await asyncio.to_thread(made.require_commits)
        return _Checked(made, needs_slot=True)

    async def _added(self, checked: _Checked, desired: DesiredExperiment) -> Experiment:
        """It takes its slot. Several may have asked for it at once: the first adds it."""
        known = self._experiments.get(desired.uid)
        if known is None:
            known = checked.experiment
            if checked.needs_slot:
                self._require_slot(desired)
            self._experiments[desired.uid] = known
            self._changed(desired.uid)
        if known.desired != desired and known.phase is not Phase.DELETING:
            await self._update(known, desired)
        return known

    async def _update(self, known: Experiment, desired: DesiredExperiment) -> None:
        known.take_token(desired.serving_token)
        self._let_in(known)
        over = known.phase is Phase.SUCCEEDED and desired.mode is RunMode.SERVE  # of its spec the weight alone counts
        if not over and spec_digest(desired) != known.spec_digest:
            known.check_update(desired)
        wants_slot = desired.mode is RunMode.RUN and (
            known.phase is Phase.SUSPENDED or (known.phase is Phase.FAILED and desired.attempt > known.desired.attempt)
        )
        if wants_slot or (desired.mode is RunMode.SERVE and not known.occupying):
            self._require_slot(desired)
        known.update(desired)

    def _require_slot(self, desired: DesiredExperiment) -> None:
        if desired.mode is RunMode.SUSPEND:
            return
        holders = [e for uid, e in self._experiments.items() if uid != desired.uid and e.occupying]
        if len(holders) >= self._config.max_experiments:
            raise CapacityError(f"all {self._config.max_experiments} slots of the engine are in use")

    def _let_in(self, experiment: Experiment) -> None:
        """Those who have its serving token, and nobody else."""
        uid, token = experiment.desired.uid, experiment.desired.serving_token
        if self._config.tenant_port is None or token is None or experiment.phase is Phase.DELETING:
            self.served.withdraw(uid)
            return
        taken = not self.served.admit(uid, experiment.desired.name, token)
        if taken is not experiment.token_taken:
            experiment.token_taken = taken
            self._changed(uid)

    def _serve_if_due(self, experiment: Experiment) -> None:
        uid = experiment.desired.uid
        task = self._tasks.get(uid)
        if (task is None or task.done()) and experiment.serving_due():
            experiment.serving_starts()
            self._tasks[uid] = asyncio.create_task(experiment.serve(), name=f"serve-{uid}")

    def version_lost(self, version: Version) -> None:
        """One that trains publishes its next, or fails by the loss; one that is only served gives its slot back, and
        gets it again, with its commit, by the operator's next PUT."""
        experiment = self._experiments.get(version.experiment)
        if experiment is not None:
            experiment.lost(version.step)

    def _start_if_due(self, experiment: Experiment) -> None:
        uid = experiment.desired.uid
        task = self._tasks.get(uid)
        if (task is None or task.done()) and experiment.due():
            experiment.starting()
            task = asyncio.create_task(experiment.run(), name=f"experiment-{uid}")
            task.add_done_callback(lambda _: self._start_again(experiment))
            self._tasks[uid] = task

    def _start_again(self, experiment: Experiment) -> None:
        """A run that ended may have been asked to go on while it was ending; without a free slot, the operator's next
        PUT is told so."""
        if experiment.phase not in (Phase.SUSPENDED, Phase.FAILED) or not experiment.due():
            return
        try:
            self._require_slot(experiment.desired)
        except CapacityError:
            return
        self._start_if_due(experiment)

    # ---------------------------------------------------------------- deletion

    async def delete(self, uid: str, *, files: bool) -> ExperimentReport | None:
        """Starts, or goes on with, taking an experiment off: its step is finished and committed first, unless it has
        not begun. None once it is gone. With `files`, its folder goes too."""
        experiment = self._experiments.get(uid)
        if experiment is None:
            if files:
                journal = Journal(self._config.storage, uid, self.epoch)
                if (owner := journal.owner()) is not None:
                    journal.claim(owner.namespace, owner.name)
                    await asyncio.to_thread(journal.delete)
            return None
        if experiment.phase is not Phase.DELETING:
            self.served.withdraw(uid)
            experiment.stop_for_deletion(files=files)
            task = asyncio.create_task(self._delete_when_stopped(uid), name=f"delete-{uid}")
            self._tasks[f"delete-{uid}"] = task
        return self.report(uid)

    async def _delete_when_stopped(self, uid: str) -> None:
        experiment = self._experiments[uid]
        task = self._tasks.pop(uid, None)
        if task is not None:
            await asyncio.wait([task])
        try:
            await experiment.discard()
        finally:
            del self._experiments[uid]
            self._revisions.pop(uid, None)
            self._tasks.pop(f"delete-{uid}", None)
            self._wake()

    # ---------------------------------------------------------------- reports

    def info(self) -> EngineInfo:
        stats = self._services.sampler.stats()
        return EngineInfo(
            epoch=self.epoch,
            ready=self.ready,
            model=self._config.served_name,
            version=self._version,
            max_experiments=self._config.max_experiments,
            max_rank=self._config.max_rank,
            max_off_policy_steps=self._config.max_off_policy_steps,
            max_context=self._config.max_context,
            environments=list(
                offered_environments(self._config.environments, http=bool(self._config.environment_hosts))
            ),
            experiments=sum(e.occupying for e in self._experiments.values()),
            data_volumes=sorted(self._config.data_volumes),
            sampler_generation=stats.generation,
            versions=[str(v.version) for v in stats.versions],
            serves=self._config.tenant_port is not None,
        )

    def report(self, uid: str) -> ExperimentReport:
        """Raises UnknownExperimentError."""
        experiment = self._experiments.get(uid)
        if experiment is None:
            raise UnknownExperimentError(uid)
        return experiment.report(self._revisions.get(uid, 0))

    async def list(self, since: int | None = None, wait_seconds: float = 0.0) -> ExperimentList:
        """All experiments; with `since`, waits up to `wait_seconds` for a revision beyond it. A `since` of an
        earlier epoch (beyond the present revision) answers at once."""
        if since is not None and since == self._revision and wait_seconds > 0:
            try:
                async with asyncio.timeout(wait_seconds):
                    while self._revision == since:
                        await self._news.wait()
            except TimeoutError:
                pass
        items = [self.report(uid) for uid in self._experiments]
        return ExperimentList(epoch=self.epoch, revision=self._revision, items=items)

    def checkpoints(self, uid: str) -> CheckpointList:
        """Commits of an experiment, attached or not. Raises UnknownExperimentError."""
        journal = self.journal(uid)
        commits = [commit for step in journal.commits() if (commit := journal.read_commit(step)) is not None]
        marked = commits[-1].manifest.best if commits else None
        best = marked.step if marked else None
        return CheckpointList(items=[reported_checkpoint(commit, self._config.storage, best) for commit in commits])

    def journal(self, uid: str) -> Journal:
        """The folder of a uid, to read from. Raises UnknownExperimentError."""
        journal = Journal(self._config.storage, uid, self.epoch)
        if journal.owner() is None:
            raise UnknownExperimentError(uid)
        return journal

    def phases(self) -> dict[Phase, int]:
        counts = dict.fromkeys(Phase, 0)
        for experiment in self._experiments.values():
            counts[experiment.phase] += 1
        return counts

    def _changed_by(self, uid: str) -> Callable[[], None]:
        return lambda: self._changed(uid)

    def _changed(self, uid: str) -> None:
        self._wake()
        self._revisions[uid] = self._revision

    def _wake(self) -> None:
        self._revision += 1
        self._news.set()
        self._news = asyncio.Event()

    # ---------------------------------------------------------------- end

    async def stop(self, wait_seconds: float) -> None:
        """Lets every running step come to its commit, for at most `wait_seconds`, then cancels what is left."""
        self._closing = True
        for experiment in self._experiments.values():
            experiment.stop_for_shutdown()
        tasks = [t for t in self._tasks.values() if not t.done()]
        if not tasks:
            return
        _, pending = await asyncio.wait(tasks, timeout=wait_seconds)
        for task in pending:
            task.cancel()
        if pending:
            _, left = await asyncio.wait(pending, timeout=CANCEL_SECONDS)
            for task in left:
                log.warning("%s does not end: left behind", task.get_name())


def _with_serving(desired: DesiredExperiment, serving: DesiredServing) -> DesiredExperiment:
    weight = desired.spec.weight if serving.weight is None else serving.weight
    spec = desired.spec.model_copy(update={"weight": weight})
    return desired.model_copy(update={"spec": spec, "serving_token": serving.serving_token})
