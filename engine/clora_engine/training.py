"""One training step of one experiment: the way of the data, in a straight line.

    prompts -> rollouts (logged group by group) -> advantages -> forward_backward -> optim_step -> publish
            -> evaluate, when due -> metrics -> commit, when due

What a step needs comes in, what it did goes out; nothing is kept between steps but the position in the data and the
step counts. Who may run when is not decided here: the trainer takes the calls of all experiments in turn, the sampler's
gate shares out its tokens, so that one experiment trains while another samples. What a step waited for either is in its
metrics: wait_trainer_seconds, and wait_sampler_seconds, in which it had samples to draw and none was being drawn.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from clora_api.v1alpha1.base import number
from clora_api.v1alpha1.experiment import Estimator
from clora_engine import advantages
from clora_engine.advantages import Batch
from clora_engine.config import EngineConfig
from clora_engine.data import demonstration
from clora_engine.errors import UserError
from clora_engine.journal import Commit, Journal
from clora_engine.plan import Plan
from clora_engine.rollout import Prompt, RolloutConfig, Rollouts
from clora_engine.rollout_metrics import step_metrics
from clora_engine.sampler import Lease, Sampler
from clora_engine.trainer_client import TrainerClient
from clora_engine.types import Group, Loss, Version

OnActivity = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Services:
    """What all experiments of an engine share."""

    config: EngineConfig
    trainer: TrainerClient
    sampler: Sampler
    tokenizer: Any


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`values`: the step's line of metrics. `commit`: None when this step was not due to be committed."""

    step: int
    position: int
    values: dict[str, Any]
    commit: Commit | None


class Training:
    """The steps of one experiment, one after the other. Its adapter must be in the trainer under `uid`."""

    def __init__(self, services: Services, journal: Journal, uid: str, on_activity: OnActivity) -> None:
        self._services = services
        self._journal = journal
        self._uid = uid
        self._activity = on_activity

    # ---------------------------------------------------------------- start

    async def begin(self, plan: Plan) -> StepOutcome:
        """Step 0: publishes the adapter as it starts, measures it, and commits it."""
        await self.publish(0)
        values: dict[str, Any] = {"step": 0, "time": _now()}
        waited = self._seconds_waited()
        values |= await self._evaluate(plan, 0, last=False)
        values["wait_sampler_seconds"] = self._seconds_waited() - waited
        await asyncio.to_thread(self._journal.append_metrics, values)
        return StepOutcome(0, 0, values, await self.commit(0, 0))

    async def publish(self, step: int) -> None:
        """Makes the trainer's weights the version that the sampler serves for this experiment."""
        directory = self._services.sampler.new_directory()
        try:
            await self._services.trainer.export(self._uid, directory)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise
        await self._services.sampler.publish(Version(self._uid, step), directory)

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
        count = plan.spec.algorithm.prompts_per_step
        if plan.supervised:
            batch, values = await asyncio.to_thread(self._demonstrations, plan, position, count)
            kept = 1.0
        else:
            groups, kept = await self._roll_out(plan, step, position, count)
            batch, values = _advantages(plan, groups), step_metrics(groups)
        clock.lap("rollout_seconds")
        values |= await self._train(plan, step, batch, clock)
        if values.pop("published"):
            self._activity("Publish")
            await self.publish(step)
        clock.lap("publish_seconds")
        values |= await self._evaluate(plan, step, last=step >= plan.spec.max_steps or is_last(values))
        clock.lap("evaluate_seconds")
        values["wait_sampler_seconds"] = self._seconds_waited() - waited
        values |= clock.laps | {"step_seconds": clock.total()}
        # tokens that came from the log after a restart were not sampled in this time
        sampled = values.get("sampled_tokens", 0.0) * kept
        if not plan.supervised and clock.laps["rollout_seconds"] > 0:
            values["tokens_per_second"] = sampled / clock.laps["rollout_seconds"]
        line = {"step": step, "time": _now()} | values
        return await self._finish(plan, step, position + count, line)

    def _seconds_waited(self) -> float:
        return self._services.sampler.seconds_waited(self._uid)

    async def _finish(self, plan: Plan, step: int, position: int, line: dict[str, Any]) -> StepOutcome:
        self._activity("Commit")
        await asyncio.to_thread(self._journal.append_metrics, line)
        commit = None
        if step % plan.spec.checkpoint.every == 0 or step >= plan.spec.max_steps:
            commit = await self.commit(step, position)
            await asyncio.to_thread(self._journal.prune, plan.spec.checkpoint.keep)
        return StepOutcome(step, position, line, commit)

    async def commit(self, step: int, position: int) -> Commit:
        """Commits what the trainer holds as `step`, and all metrics so far."""
        folder = await asyncio.to_thread(self._journal.step_folder, step)
        await self._services.trainer.save(self._uid, folder, optimizer=True)
        return await asyncio.to_thread(self._journal.commit, step, position, time.time())

    # ---------------------------------------------------------------- its parts

    async def _roll_out(self, plan: Plan, step: int, position: int, count: int) -> tuple[list[Group], float]:
        """The step's groups, and the share of them that was drawn now: groups which an earlier life has logged are
        not drawn again."""
        self._activity("Rollout")
        logged = await asyncio.to_thread(self._journal.read_groups, step)
        logged = {i: g for i, g in logged.items() if i < count and g.example == position + i}
        prompts = [
            Prompt(i, position + i, plan.data.train.example(position + i)) for i in range(count) if i not in logged
        ]

        async def log_group(group: Group) -> None:
            await asyncio.to_thread(self._journal.append_group, step, group)

        drawn = await self._rollouts(plan).step(prompts, log_group)
        groups = logged | {group.index: group for group in drawn}
        return [groups[i] for i in sorted(groups)], len(drawn) / count

    def _rollouts(self, plan: Plan) -> Rollouts[Lease]:
        spec = plan.spec
        config = RolloutConfig(
            experiment=self._uid,
            group_size=spec.algorithm.group_size,
            temperature=plan.temperature,
            max_tokens=spec.sampling.max_tokens,
            max_turns=spec.environment.max_turns,
            max_context=self._services.config.max_model_len,
            concurrency=spec.environment.concurrency,
            environment_timeout_seconds=float(spec.environment.timeout_seconds),
        )
        return Rollouts(self._services.sampler, plan.renderer, plan.factory, config)

    def _demonstrations(self, plan: Plan, position: int, count: int) -> tuple[Batch, dict[str, float]]:
        self._activity("Train")
        shown = []
        for place in range(position, position + count):
            try:
                messages = demonstration(plan.data.train.example(place), plan.factory)
            except ValueError as error:
                raise UserError(f"example {place} has no demonstration: {error}", field="data") from None
            shown.append(plan.renderer.demonstration(messages))
        limit = min(self._services.config.max_model_len, self._services.config.tokens_per_microbatch)
        too_long = [d for d in shown if len(d.prompt) + len(d.ids) > limit]
        if too_long:
            raise UserError(f"a demonstration is longer than {limit} tokens: shorten it or leave it out", field="data")
        batch = advantages.sft(shown)
        return batch, {"demonstration_tokens": batch.denominator}

    async def _train(self, plan: Plan, step: int, batch: Batch, clock: _Clock) -> dict[str, Any]:
        """forward_backward and optim_step. `published`: there is something new to serve."""
        adam = plan.adam(step)
        values: dict[str, Any] = {"learning_rate": adam.learning_rate, "published": False}
        if not batch.rows:
            clock.lap("train_seconds")
            return values | {"trained_tokens": 0.0}
        self._activity("Train")
        algorithm = plan.spec.algorithm
        loss = Loss(
            name=algorithm.loss.value,
            denominator=batch.denominator,
            temperature=1.0 if plan.supervised else plan.temperature,
            clip_low=number(algorithm.clip_low),
            clip_high=number(algorithm.clip_high),
        )
        result = await self._services.trainer.forward_backward(self._uid, batch.rows, loss)
        done = await self._services.trainer.optim_step(self._uid, adam)
        clock.lap("train_seconds")
        busy = result.seconds + done.seconds
        return values | {
            "loss": result.loss,
            **result.metrics,
            "trained_tokens": float(result.tokens),
            "grad_norm": done.grad_norm if not done.skipped else 0.0,
            "update_skipped": float(done.skipped),
            "wait_trainer_seconds": max(0.0, clock.laps["train_seconds"] - busy),
            "published": not done.skipped,
        }

    async def _evaluate(self, plan: Plan, step: int, *, last: bool) -> dict[str, float]:
        """Greedy accuracy on the held-out examples, when due: at both ends, and every so many steps."""
        every = plan.spec.evaluation.every_steps
        due = step == 0 or last or (every > 0 and step % every == 0)
        if not plan.data.held_out or not due:
            return {}
        self._activity("Evaluate")
        return await self._rollouts(plan).evaluate(plan.data.held_out)


def _advantages(plan: Plan, groups: Sequence[Group]) -> Batch:
    algorithm = plan.spec.algorithm
    if algorithm.estimator is Estimator.REINFORCE:
        return advantages.reinforce(groups)
    return advantages.grpo(groups, normalize_by_std=algorithm.normalize_by_std)


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
