"""One training step of one experiment: the way of the data, in a straight line.

    prompts -> rollouts (logged group by group) -> advantages -> forward_backward -> optim_step -> publish
            -> evaluate, when due -> metrics -> commit, when due

What a step needs comes in, what it did goes out. Kept between steps are the position in the data, the step counts, and
with maxOffPolicySteps the groups that are drawn ahead (drawing.py). Who may run when is not decided here: the trainer's
queue and the sampler's gate take what all experiments ask for in turn, so that one experiment trains while another
samples. What a step waited for either is in its metrics: wait_trainer_seconds, and wait_sampler_seconds,
in which it had samples to draw and none was being drawn.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clora_api.v1alpha1.base import number
from clora_api.v1alpha1.experiment import Estimator
from clora_engine import advantages
from clora_engine.advantages import Batch
from clora_engine.best import Best, Rewards, better, evaluated
from clora_engine.config import EngineConfig
from clora_engine.demonstrations import demonstrations
from clora_engine.drawing import Ahead, Drawer, Drawn, policy_lag
from clora_engine.journal import Commit, Journal
from clora_engine.model_folder import BaseModel
from clora_engine.patience import Patience
from clora_engine.peft_files import CONFIG_FILE, WEIGHTS_FILE
from clora_engine.plan import Plan, max_context
from clora_engine.rollout import Rollouts
from clora_engine.rollout_config import RolloutConfig, concurrency
from clora_engine.rollout_metrics import step_metrics
from clora_engine.sampler import Lease, Sampler
from clora_engine.tensorboard import TensorBoard
from clora_engine.trainer_client import TrainerClient
from clora_engine.types import Version
from clora_engine.updates import Updates

OnActivity = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Services:
    """What all experiments of an engine share. base: the model that trainer and sampler have loaded; None where no
    commit is to be asked for it."""

    config: EngineConfig
    trainer: TrainerClient
    sampler: Sampler
    tokenizer: Any
    base: BaseModel | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`values`: the step's line of metrics. `commit`: None when this step was not due to be committed."""

    step: int
    position: int
    values: dict[str, Any]
    commit: Commit | None


class Training:
    """The steps of one experiment, one after the other. Its adapter must be in the trainer under `uid`."""

    def __init__(
        self, services: Services, journal: Journal, uid: str, on_activity: OnActivity, patience: Patience
    ) -> None:
        self._services = services
        self._journal = journal
        self._uid = uid
        self._activity = on_activity
        self._patience = patience
        self._tensorboard = TensorBoard(journal.folder / "tensorboard", journal.epoch)
        self._ahead = Ahead(Drawer(journal, self._rollouts, patience))
        self._updates = Updates(services.trainer, journal, uid)
        self._published = 0  # the version's step
        self._slots, self._slots_for = asyncio.Semaphore(1), (0, 0)  # of all episodes, drawn ahead or to evaluate
        self.best: Best | None = None
        self._rewards = Rewards()  # of versions that may still be drawn with, or were not committed since
        self._commit_seconds: float | None = None  # of the last commit: its own line of metrics is part of it

    async def rest(self) -> None:
        """No step follows for now: ends what is being drawn ahead."""
        await self._ahead.close()

    async def close(self) -> None:
        """Leaves the trainer what it had before `begin` or the first step, but for the adapter itself."""
        await self._ahead.close()
        await asyncio.to_thread(self._tensorboard.close)
        await self._updates.close()

    # ---------------------------------------------------------------- start

    async def resume(self, plan: Plan, commit: Commit) -> None:
        """Goes on after a commit: publishes its weights, and knows again how its versions were measured so far."""
        self.best = commit.manifest.best
        self._rewards.clear()
        step = commit.manifest.step
        if not plan.supervised and not plan.data.held_out:
            for earlier in range(max(1, step - plan.spec.algorithm.max_off_policy_steps + 1), step + 1):
                self._rewards.add((await asyncio.to_thread(self._journal.read_groups, earlier)).values())
        await self.publish(step)

    async def begin(self, plan: Plan) -> StepOutcome:
        """Step 0: publishes the adapter as it starts, measures it, and commits it."""
        await self.publish(0)
        values: dict[str, Any] = {"step": 0, "time": _now()}
        waited = self._seconds_waited()
        values |= await self._evaluate(plan, 0, last=False)
        values["wait_sampler_seconds"] = self._seconds_waited() - waited
        await self._append_metrics(values)
        return StepOutcome(0, 0, values, await self.commit(plan, 0, 0, values))

    async def publish(self, step: int) -> None:
        """Makes the trainer's weights the version that the sampler serves for this experiment."""
        directory = await self._patience.keep(self._export)
        await self._services.sampler.publish(Version(self._uid, step), directory)
        self._published = step

    async def _export(self) -> Path:
        directory = self._services.sampler.new_directory()
        try:
            await self._services.trainer.export(self._uid, directory)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise
        return directory

    async def publish_commit(self, commit: Commit) -> None:
        """Makes a commit's weights the version that the sampler serves; the trainer need not know the adapter."""
        directory = self._services.sampler.new_directory()
        try:
            await asyncio.to_thread(_copy_adapter, commit.folder, directory)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise
        await self._services.sampler.publish(Version(self._uid, commit.manifest.step), directory)

    # ---------------------------------------------------------------- one step

    async def step(
        self, plan: Plan, step: int, position: int, is_last: Callable[[Mapping[str, Any]], bool]
    ) -> StepOutcome:
        """Makes step `step` (from 1) with examples from `position` on. `is_last`: whether a step with these metrics is
        the last one, although maxSteps is not reached.

        Raises what the parts raise; the adapter in the trainer may then hold half a step and must be loaded again.
        """
        clock = _Clock()
        waited = self._seconds_waited()
        prompts, cached = self._prompt_tokens()
        if plan.supervised:
            position, batch, values = await self._demonstrations(plan, position)
            temperature = 1.0
        else:
            self._activity("Rollout")
            drawn = await self._ahead.take(plan, step, position)
            position, temperature = drawn.position, plan.temperature
            self._rewards.add(drawn.groups)
            batch = await asyncio.to_thread(_advantages, plan, drawn)
            values = _drawn_metrics(plan, drawn) | policy_lag(drawn.groups, self._published)
        clock.lap("wait_rollout_seconds")
        self._activity("Train")
        values |= await self._updates.apply(plan, step, batch, temperature)
        clock.lap("train_seconds")
        if values["updates"]:
            self._activity("Publish")
            await self.publish(step)
        clock.lap("publish_seconds")
        values |= await self._evaluate(plan, step, last=step >= plan.spec.max_steps or is_last(values))
        clock.lap("evaluate_seconds")
        values["wait_sampler_seconds"] = self._seconds_waited() - waited
        if plan.samples:
            now = self._prompt_tokens()
            values |= {"prompt_tokens": float(now[0] - prompts), "prompt_tokens_cached": float(now[1] - cached)}
        if self._commit_seconds is not None:
            values["last_commit_seconds"] = self._commit_seconds
        values |= clock.laps | {"step_seconds": clock.total()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        return await self._finish(plan, step, position, {"step": step, "time": _now()} | finite)

    def _prompt_tokens(self) -> tuple[int, int]:
        return self._services.sampler.prompt_tokens(self._uid)

    def _seconds_waited(self) -> float:
        return self._services.sampler.seconds_waited(self._uid)

    async def _finish(self, plan: Plan, step: int, position: int, line: dict[str, Any]) -> StepOutcome:
        self._activity("Commit")
        await self._append_metrics(line)
        commit = None
        if step % plan.spec.checkpoint.every == 0 or step >= plan.spec.max_steps:
            commit = await self.commit(plan, step, position, line)
            best = self.best.step if self.best else None
            # a version that is drawn with is not measured yet, and may become the best
            keep = max(plan.spec.checkpoint.keep, plan.spec.algorithm.max_off_policy_steps)
            await asyncio.to_thread(self._journal.prune, keep, best)
        return StepOutcome(step, position, line, commit)

    async def commit(self, plan: Plan, step: int, position: int, values: Mapping[str, Any]) -> Commit:
        """Commits what the trainer holds as `step`, and all metrics so far; `values` are the step's. Waits while the
        storage is full."""
        started = time.monotonic()
        commit = await self._patience.keep(lambda: self._commit(plan, step, position, values))
        self._commit_seconds = time.monotonic() - started
        return commit

    async def _append_metrics(self, line: dict[str, Any]) -> None:
        await self._patience.keep(lambda: asyncio.to_thread(self._journal.append_metrics, line))
        await asyncio.to_thread(self._tensorboard.add, line)

    async def _commit(self, plan: Plan, step: int, position: int, values: Mapping[str, Any]) -> Commit:
        folder = await asyncio.to_thread(self._journal.step_folder, step)
        await self._services.trainer.save(self._uid, folder, optimizer=True)
        commits = {*await asyncio.to_thread(self._journal.commits), step}
        self.best = better(self.best, self._measured(plan, step, values), commits)
        return await asyncio.to_thread(self._journal.commit, step, position, time.time(), self.best)

    def _measured(self, plan: Plan, step: int, values: Mapping[str, Any]) -> list[Best]:
        ended = step >= plan.spec.max_steps
        rewards = self._rewards.take(step - 1 - (0 if ended else plan.spec.algorithm.max_off_policy_steps))
        return evaluated(values) if plan.data.held_out else rewards

    # ---------------------------------------------------------------- its parts

    def _rollouts(self, plan: Plan) -> Rollouts[Lease]:
        spec = plan.spec
        config = RolloutConfig(
            experiment=self._uid,
            group_size=spec.algorithm.group_size,
            temperature=plan.temperature,
            max_tokens=spec.sampling.max_tokens,
            max_turns=spec.environment.max_turns,
            max_context=max_context(spec, self._services.config),
            concurrency=spec.environment.concurrency,
            environment_timeout_seconds=float(spec.environment.timeout_seconds),
        )
        if (config.group_size, config.concurrency) != self._slots_for:
            self._slots_for, self._slots = (config.group_size, config.concurrency), concurrency(config)
        return Rollouts(self._services.sampler, plan.renderer, plan.factory, config, self._slots)

    async def _demonstrations(self, plan: Plan, position: int) -> tuple[int, Batch, dict[str, Any]]:
        """The position after the step's demonstrations, their batch, and its metrics."""
        end = position + plan.spec.algorithm.prompts_per_step
        shown = await demonstrations(plan, range(position, end), self._uid, self._services.config.max_context)
        batch = await asyncio.to_thread(advantages.sft, shown, shape=plan.shape)
        return end, batch, {"demonstration_tokens": float(sum(sum(d.mask) for d in shown))}

    async def _evaluate(self, plan: Plan, step: int, *, last: bool) -> dict[str, float]:
        """Accuracy on the held-out examples, when due: at both ends, and every so many steps."""
        asked = plan.spec.evaluation
        every = asked.every_steps
        due = step == 0 or last or (every > 0 and step % every == 0)
        if not plan.data.held_out or not due:
            return {}
        self._activity("Evaluate")
        return await self._rollouts(plan).evaluate(
            plan.data.held_out, samples=asked.samples, temperature=number(asked.temperature)
        )


def _copy_adapter(commit: Path, directory: Path) -> None:
    directory.mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        shutil.copyfile(commit / name, directory / name)


def _advantages(plan: Plan, drawn: Drawn) -> Batch:
    groups = drawn.trained(plan.scoring.has_spread)
    algorithm = plan.spec.algorithm
    if algorithm.estimator is Estimator.REINFORCE:
        return advantages.reinforce(groups, scoring=plan.scoring, shape=plan.shape)
    return advantages.grpo(groups, normalize_by_std=algorithm.normalize_by_std, scoring=plan.scoring, shape=plan.shape)


def _drawn_metrics(plan: Plan, drawn: Drawn) -> dict[str, Any]:
    """Tokens that came from the log after a restart were not sampled in this time."""
    values: dict[str, Any] = step_metrics(drawn.groups, plan.scoring)
    if drawn.seconds > 0:
        values["tokens_per_second"] = values["sampled_tokens"] * drawn.drawn / len(drawn.groups) / drawn.seconds
    if len(drawn.groups) > drawn.wanted:
        values["groups_refilled"] = float(len(drawn.groups) - drawn.wanted)
    return values | {"rollout_seconds": drawn.seconds, "environment_seconds": drawn.environment_seconds}


class _Clock:
    """Wall-clock laps of a step, in seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now

    def total(self) -> float:
        return time.monotonic() - self._start


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
