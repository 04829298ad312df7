"""One experiment on this engine: from its desired state to a report, through preparing, steps, and its end.

    Preparing -> Running -> Succeeded
        \\           |  \\-> Failed     (again from its last commit, when a higher `attempt` is desired)
         \\          \\----> Suspended  (again when mode Run is desired)
          \\-> Failed            any -> Deleting

One that has succeeded and is served keeps its last version on the sampler, and its slot, without the trainer; in a
later epoch it gets them back from its last commit.

Whatever an experiment's own code, data or adapter does wrong ends this experiment, never the engine. The trainer's
death alone is the engine's end (see engine.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clora_api.control import (
    OCCUPYING,
    DesiredExperiment,
    ExperimentReport,
    Phase,
    ReportedServing,
    RunMode,
    spec_digest,
)
from clora_engine import plan as planning
from clora_engine import stop_when
from clora_engine.after_end import AfterEnd
from clora_engine.errors import CheckpointError, EngineError, StorageFullError, TrainerDied, UserError
from clora_engine.first_weights import load_first_weights
from clora_engine.journal import Commit, Journal
from clora_engine.patience import Patience
from clora_engine.plan import Plan
from clora_engine.progress import Progress
from clora_engine.reported import TOKEN_TAKEN, reported_best, reported_checkpoint, reported_serving, reported_version
from clora_engine.result import read_result, write_result
from clora_engine.tracking import Tracking
from clora_engine.training import Services, StepOutcome, Training
from clora_engine.work_left import WorkLeft

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outcome:
    """What the report says besides the steps."""

    reason: str = ""
    message: str = ""
    field: str | None = None
    retryable: bool = False


class Experiment:
    """See the module. `changed` is called whenever the report differs from before."""

    def __init__(self, desired: DesiredExperiment, services: Services, epoch: int, changed: Callable[[], None]) -> None:
        self.desired = desired
        self.phase = Phase.SUSPENDED if desired.mode is RunMode.SUSPEND else Phase.PREPARING
        self.spec_digest = spec_digest(desired)
        self._services = services
        self._epoch = epoch
        self._changed = changed
        self._journal = Journal(services.config.storage, desired.uid, epoch, services.base)
        self._patience = Patience(self._storage_full, lambda: self._stopping)
        self._tracking = Tracking(services.config, self._journal.folder, changed)
        self._training = Training(services, self._journal, desired.uid, self._set_activity, self._patience)
        self._plan: Plan | None = None
        self._plan_digest = ""
        self._outcome = _Outcome()
        self._full = ""  # why it waits for room in the storage
        self._attempt_of_failure = 0
        self._progress = Progress()
        self._commit: Commit | None = None
        self._work_left = WorkLeft(services, desired.uid)
        self._activity = ""
        self._loaded = False
        self._stopping = False  # leave the slot at the end of the present step
        self._after = AfterEnd(services.sampler, desired.uid)
        self.token_taken = False  # its serving token is another experiment's
        self._delete_files = False

    # ---------------------------------------------------------------- desired state

    async def validate(self) -> None:
        """Checks the spec against this engine. Raises UserError."""
        await self._plan_now()

    def require_commits(self) -> None:
        """Raises CheckpointError when it has come further than this storage knows (another volume is mounted, or its
        files were removed), or on another base model. It must not begin anew as if nothing had been."""
        wanted, found = self.desired.committed_step, self._journal.commits()
        if wanted is not None and (not found or found[-1] < wanted):
            has = f"ends at step {found[-1]}" if found else "has no step of it"
            raise CheckpointError(
                f"step {wanted} was committed, but this engine's storage {has}: attach the volume that holds it"
                f" (experiments/{self.desired.uid}), or delete the experiment and create it again to begin anew"
            )
        self._journal.require_base()

    async def _plan_now(self) -> Plan:
        if self._plan is None or self._plan_digest != self.spec_digest:
            services = self._services
            self._plan = await planning.built(self.desired, services.config, services.tokenizer)
            self._plan_digest = self.spec_digest
        return self._plan

    def check_update(self, desired: DesiredExperiment) -> None:
        """Raises UserError when `desired` changes what cannot change, or asks for what this engine does not take; it
        then goes on as it was."""
        planning.check(desired.spec, self._services.config)
        planning.check_change(self.desired.spec, desired.spec)

    def take_token(self, token: str | None) -> None:
        """Who may ask it is no matter of the spec, and takes effect whatever becomes of that."""
        if token == self.desired.serving_token:
            return
        self.desired = self.desired.model_copy(update={"serving_token": token})
        if not self._wants_serving:
            self._after.stop()
        self._changed()

    def update(self, desired: DesiredExperiment) -> None:
        """Takes a new desired state over: a new weight at once, the rest from the next step on."""
        before = self.desired
        self.desired = desired
        self.spec_digest = spec_digest(desired)
        if desired.spec.weight != before.spec.weight:
            self._work_left.reweigh(desired.spec.weight)
            self._after.reweigh(desired.spec.weight)
        if not self._wants_serving:
            self._after.stop()
        self._tracking.update(desired)
        if desired != before:
            self._changed()

    def due(self) -> bool:
        """Whether it should be running and is not: `starting` and `run` come next."""
        if self.desired.mode is not RunMode.RUN:
            return False
        if self.phase is Phase.FAILED:
            return self.desired.attempt > self._attempt_of_failure
        return self.phase in (Phase.PREPARING, Phase.SUSPENDED)

    @property
    def occupying(self) -> bool:
        """It holds one of the engine's slots."""
        return self.phase in OCCUPYING or self.keeps_slot

    @property
    def keeps_slot(self) -> bool:
        """It has ended, and is served."""
        return self._after.keeps_slot

    @property
    def _wants_serving(self) -> bool:
        asked = self._services.config.tenant_port is not None and self.desired.serving_token is not None
        return asked and self.desired.mode is not RunMode.SUSPEND

    def serving_due(self) -> bool:
        """Whether it has ended and should be served, and is not: `serving_starts` and `serve` come next."""
        return self._wants_serving and self.desired.mode is RunMode.SERVE and not self.occupying

    def serving_starts(self) -> None:
        self._after.begin()
        self._changed()

    def lost(self, step: int) -> None:
        """The sampler has lost the version of `step`."""
        if self._after.lost(step):
            self._changed()

    def starting(self) -> None:
        self.phase, self._outcome, self._stopping = Phase.PREPARING, _Outcome(), False
        self._changed()

    def stop_for_deletion(self, *, files: bool) -> None:
        self.phase, self._delete_files, self._stopping = Phase.DELETING, files, True
        self._after.stop()
        self._changed()

    def stop_for_shutdown(self) -> None:
        self._stopping = True

    async def discard(self) -> None:
        """The end of a deletion: removes the files if that was asked for."""
        if self._delete_files and self._journal.owner() is not None:
            await self._tracking.kill()
            self._journal.claim(self.desired.namespace, self.desired.name)
            await asyncio.to_thread(self._journal.delete)

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        """Runs it until it has succeeded, failed, or has to leave its slot. Raises nothing but CancelledError."""
        try:
            plan = await self._prepare()
            while self._wanted(plan):
                outcome = await self._training.step(
                    plan, self._progress.step + 1, self._progress.position, self._ends(plan)
                )
                self._take(outcome)
                plan = await self._plan_now()
                self._tell_work_left(plan)
            await self._leave(plan)
        except Exception as error:
            self._fail(error)
        finally:
            await self._release()
            self._changed()

    def _wanted(self, plan: Plan) -> bool:
        return not self._stopping and self.desired.mode is RunMode.RUN and not self._complete(plan)

    def _complete(self, plan: Plan) -> bool:
        return self._progress.step >= plan.spec.max_steps or self._good_enough(plan)

    def _good_enough(self, plan: Plan) -> bool:
        """A rule that was given or loosened after the last step counts with the next one where accuracy is measured:
        the last step is always evaluated."""
        rule, progress = plan.spec.stop_when, self._progress
        measured = not plan.data.held_out or "eval_accuracy" in progress.values
        return rule is not None and measured and stop_when.is_met(rule, list(progress.recent))

    def _ends(self, plan: Plan) -> Callable[[Mapping[str, Any]], bool]:
        """Whether a step with the given metrics, after those that were made, is good enough."""
        rule = plan.spec.stop_when
        return lambda values: rule is not None and stop_when.is_met(rule, [*self._progress.recent, values])

    async def _prepare(self) -> Plan:
        plan = await self._plan_now()
        self._tell_work_left(plan)
        await asyncio.to_thread(self._journal.claim, self.desired.namespace, self.desired.name)
        commit = await asyncio.to_thread(self._journal.resume)
        self._tracking.begin(self.desired, commit.manifest.metrics_bytes if commit else 0)
        await asyncio.to_thread(self._forget_what_failed, (commit.manifest.step if commit else 0) + 1)
        trainer, uid = self._services.trainer, self.desired.uid
        if commit is None:
            await load_first_weights(plan, self.desired, self._services, self._epoch)
            self._take(await self._training.begin(plan))
        else:
            await trainer.load(uid, commit.folder, optimizer=True, config=plan.lora)
            self._commit = commit
            self._progress.resume(commit, await asyncio.to_thread(self._journal.read_metrics))
            self._tell_work_left(plan)
            await self._training.resume(plan, commit)
        self._progress.published_step, self._loaded = self._progress.step, True
        if self.phase is Phase.PREPARING:
            self.phase = Phase.RUNNING
        self._changed()
        return plan

    def _forget_what_failed(self, step: int) -> None:
        """A failure may lie in what was drawn: a new attempt draws it anew, from `step` on; its later lives do not."""
        if self.desired.attempt > int(self._journal.read_json("attempt.json") or 0):
            self._journal.drop_groups(step)
            self._journal.write_json("attempt.json", str(self.desired.attempt).encode())

    def _tell_work_left(self, plan: Plan) -> None:
        self._work_left.tell(plan, self._progress, self.desired.spec.weight)

    async def _leave(self, plan: Plan) -> None:
        """Everything made is committed before the slot is left, and before anything is waited for: an environment that
        does not end must not cost a step."""
        if self._commit is None or self._commit.manifest.step < self._progress.step:
            progress = self._progress
            self._commit = await self._training.commit(plan, progress.step, progress.position, progress.values)
            self._tracking.committed(self._commit.manifest.metrics_bytes)
        await self._training.rest()
        if self._deleting():
            return
        if self._complete(plan):
            self._activity = ""
            if self._progress.step < plan.spec.max_steps:
                assert plan.spec.stop_when is not None
                self._outcome.message = stop_when.reason(plan.spec.stop_when)
            await self._patience.keep(self._write_result)
            if not self._deleting():  # asked for meanwhile
                self.phase = Phase.SUCCEEDED
                if self._wants_serving:  # at once: nobody may take its slot in between
                    self._after.keep(self._progress.published_step)
        elif self.desired.mode is not RunMode.RUN:
            self.phase = Phase.SUSPENDED

    def _deleting(self) -> bool:
        return self.phase is Phase.DELETING

    def _take(self, outcome: StepOutcome) -> None:
        self._progress.take(outcome.step, outcome.position, outcome.values)
        self._commit = outcome.commit or self._commit
        if outcome.commit is not None:
            self._tracking.committed(outcome.commit.manifest.metrics_bytes)
        self._changed()

    def _fail(self, error: Exception) -> None:
        self._after.stop()
        if self.phase is Phase.DELETING:
            log.warning("%s: %s while it was being deleted", self.desired.uid, error)
            return
        if isinstance(error, TrainerDied):
            # the epoch ends; the next one resumes from the last commit: no failure of the experiment
            log.info("%s: %s", self.desired.uid, error)
            return
        self.phase, self._attempt_of_failure, self._full = Phase.FAILED, self.desired.attempt, ""
        if isinstance(error, EngineError):
            retryable = not isinstance(error, UserError)
            self._outcome = _Outcome(error.reason, str(error), error.field, retryable)
            log.warning("%s failed: %s: %s", self.desired.uid, error.reason, error)
        else:
            self._outcome = _Outcome("ExperimentError", f"{type(error).__name__}: {error}"[:1024], None, True)
            log.error("%s failed", self.desired.uid, exc_info=error)

    async def _release(self) -> None:
        """Leaves the trainer, and the sampler unless it is served; the files stay."""
        self._tracking.end({Phase.SUCCEEDED: True, Phase.FAILED: False}.get(self.phase))
        self._loaded = False
        self._work_left.leave_trainer()
        try:
            await self._training.close()
        except EngineError as error:
            log.debug("%s: %s", self.desired.uid, error)
        self._after.leave_trainer(self.desired.spec.weight)
        try:
            await self._services.trainer.delete(self.desired.uid)
        except EngineError as error:
            log.debug("%s: %s", self.desired.uid, error)

    def _storage_full(self, message: str) -> None:
        """It pauses, or goes on when `message` is empty."""
        self._full = message
        self._changed()

    async def serve(self) -> None:
        """Brings the last commit back to the sampler, for one that has ended. Raises nothing but CancelledError."""
        await self._after.load(self.desired.spec.weight, self._publish_last_commit)
        self._changed()

    async def _publish_last_commit(self) -> int:
        await asyncio.to_thread(self._journal.require_base)
        commit = await asyncio.to_thread(self._journal.read_commit)
        if commit is None:
            raise CheckpointError(f"{self.desired.uid} has no commits to serve")
        self._commit = commit
        await self._training.publish_commit(commit)
        return commit.manifest.step

    def _set_activity(self, activity: str) -> None:
        self._activity = activity
        self._changed()

    # ---------------------------------------------------------------- reports and results

    def report(self, revision: int) -> ExperimentReport:
        commit, published = self._commit, self._progress.published_step
        return ExperimentReport(
            uid=self.desired.uid,
            namespace=self.desired.namespace,
            name=self.desired.name,
            epoch=self._epoch,
            revision=revision,
            phase=self.phase,
            mode=self.desired.mode,
            attempt=self.desired.attempt,
            spec_digest=self.spec_digest,
            reason=StorageFullError.reason if self._full else self._outcome.reason,
            message=self._full or self._outcome.message,
            field=self._outcome.field,
            retryable=self._outcome.retryable,
            adapter_loaded=self._loaded,
            adapter_version=reported_version(self.desired, published),
            adapter_digest=commit.digest if commit else "",
            progress=self._progress.report(
                self.desired.spec.max_steps, self._activity if self.phase is Phase.RUNNING else ""
            ),
            checkpoint=reported_checkpoint(commit, self._services.config.storage) if commit else None,
            best=reported_best(commit),
            serving=self._report_serving(),
            keeps_slot=self.keeps_slot,
            tracking=self._tracking.report(),
        )

    def _report_serving(self) -> ReportedServing | None:
        if self._services.config.tenant_port is None or self.desired.serving_token is None:
            return None
        if self.token_taken:
            return ReportedServing(problem=TOKEN_TAKEN)
        step = self._progress.published_step if self._loaded else self._after.step
        return reported_serving(self.desired, step, self._after.problem)

    async def _write_result(self) -> None:
        report = self.report(0).model_copy(update={"phase": Phase.SUCCEEDED})
        await asyncio.to_thread(write_result, self._journal, report)

    def restore_end(self) -> None:
        """It has ended in an earlier life, as the operator knows, whatever its files say. Raises CheckpointError when
        this storage has no commit of it to serve."""
        self.require_commits()
        owner = self._journal.owner()
        if owner is None or owner.namespace != self.desired.namespace or not self._journal.commits():
            raise CheckpointError(f"this engine's storage has no commits of {self.desired.uid} to serve")
        if not self.restore_result():
            self.phase, self._commit = Phase.SUCCEEDED, self._journal.read_commit()

    def restore_result(self) -> bool:
        """Whether it has succeeded in an earlier life; it is then shown as it ended, and never run again."""
        last = read_result(self._journal, self.desired.namespace)
        if last is None:
            return False
        self.phase = Phase.SUCCEEDED
        self._commit = self._journal.read_commit()
        self._progress.end(last.progress)
        return True
