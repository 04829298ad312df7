"""N experiments on one simulated node of 4 + 4 GPUs, to their end, in virtual time.

Real: the rollouts (clora_engine.rollout) and what draws them ahead (clora_engine.drawing), the gate, the trainer's
client with its queue, and the order in which an experiment calls them. Simulated: what takes time on a GPU
(node_sampler.py, node_trainer.py), the environment (it answers at once), and files, which take none. One simulated
episode stands for EPISODES_EACH real ones, and one seat for as many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import SimpleNamespace
from typing import cast

from benchmarks import virtual_time
from benchmarks.node_sampler import Decoding, SimulatedLease, SimulatedSampler
from benchmarks.node_trainer import ClientTrainer, StepTrainer
from clora_api.v1alpha1.engine import Scheduling
from clora_engine.chat import Renderer
from clora_engine.drawing import Ahead, Drawn
from clora_engine.environments.protocol import EnvironmentFactory, Example, Message, StepResult
from clora_engine.plan import Plan
from clora_engine.rollout import Rollouts
from clora_engine.rollout_config import Prompt, RolloutConfig

STEPS = 10
GROUPS, GROUP_SIZE, TURNS = 8, 4, 2
"""A simulated step: 32 episodes of two turns, a call of the calculator and the answer."""
EPISODES_EACH = 64
"""Real episodes for each simulated one: 128 groups of 16 a step, as in the loop that the reference's authors document
for this service (https://github.com/thinking-machines-lab/tinker-cookbook, recipes/rl_loop.py)."""
TURN_TOKENS, MAX_TURN_TOKENS = 128.0, 256
"""Mean and limit; the limit is that loop's, the mean an assumption. Only their product with decode_base matters."""
WEIGHT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The three parameters of the model, in seconds.

    decode_base     for one token of all sequences on a GPU, however many
    decode_load     more of it for each real sequence that runs there
    train           for one step's episodes, on all four GPUs
    """

    decode_base: float
    decode_load: float
    train: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the node is shared. seats: real sequences that may run on one GPU. overlap: without it nobody trains while
    anybody samples. by_step: the trainer is StepTrainer, not the engine's client. slots: steps that one pass of it can
    join; fixed: the part of a pass that does not grow with them. ahead: maxOffPolicySteps."""

    name: str
    scheduling: Scheduling = Scheduling.FAIR_SHARE
    seats: int = 1024
    overlap: bool = True
    by_step: bool = False
    slots: int = 1
    fixed: float = 0.0
    ahead: int = 0


@dataclass(slots=True)
class Job:
    """One experiment, and what became of it, in seconds."""

    name: str
    steps: int
    end: float = 0.0
    rollout: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds; means over all steps of all jobs. ends: ascending. sampler_busy, trainer_busy: parts of the whole."""

    ends: tuple[float, ...]
    rollout: float
    train: float
    sampler_busy: float
    trainer_busy: float

    @property
    def last(self) -> float:
        return self.ends[-1]


def simulate(costs: Costs, policy: Policy, jobs: int, steps: int = STEPS) -> Outcome:
    """Runs so many experiments of the same kind, begun at once, each with draws of its own."""
    return virtual_time.run(_run(costs, policy, [Job(f"job-{i}", steps) for i in range(jobs)]))


async def _run(costs: Costs, policy: Policy, jobs: Sequence[Job]) -> Outcome:
    loop = asyncio.get_running_loop()
    sampler = SimulatedSampler(
        Decoding(base=costs.decode_base, load=costs.decode_load * EPISODES_EACH),
        policy.seats // EPISODES_EACH,
        policy.scheduling,
        TURN_TOKENS,
    )
    trainer: ClientTrainer | StepTrainer = (
        StepTrainer(costs.train, policy.slots, policy.fixed)
        if policy.by_step
        else ClientTrainer(costs.train, policy.slots, policy.fixed, policy.scheduling)
    )
    together = None if policy.overlap else asyncio.Barrier(len(jobs))
    experiments = [_Experiment(job, sampler, trainer, policy, together) for job in jobs]
    for experiment in experiments:
        experiment.tell_work_left(0)
    async with asyncio.TaskGroup() as tasks:
        for experiment in experiments:
            tasks.create_task(experiment.run())
    await trainer.close()
    return Outcome(
        ends=tuple(sorted(job.end for job in jobs)),
        rollout=fmean(seconds for job in jobs for seconds in job.rollout),
        train=fmean(seconds for job in jobs for seconds in job.train),
        sampler_busy=sampler.busy_seconds / loop.time(),
        trainer_busy=trainer.busy_seconds / loop.time(),
    )


class _Experiment:
    """The loop of clora_engine.experiment and clora_engine.training, without files. It draws its own groups."""

    def __init__(
        self,
        job: Job,
        sampler: SimulatedSampler,
        trainer: ClientTrainer | StepTrainer,
        policy: Policy,
        together: asyncio.Barrier | None,
    ) -> None:
        self._job, self._sampler, self._trainer, self._together = job, sampler, trainer, together
        self._loop = asyncio.get_running_loop()
        config = RolloutConfig(
            experiment=job.name,
            group_size=GROUP_SIZE,
            temperature=1.0,
            max_tokens=MAX_TURN_TOKENS,
            max_turns=TURNS,
            max_context=1 << 20,
            concurrency=GROUPS * GROUP_SIZE,
        )
        # What is drawn needs a renderer, a factory and a plan only for what they are asked here.
        renderer, factory = cast(Renderer, _Renderer()), cast(EnvironmentFactory, _Factory())
        algorithm = SimpleNamespace(max_off_policy_steps=policy.ahead)
        spec = SimpleNamespace(max_steps=job.steps, algorithm=algorithm)
        self._plan = cast(Plan, SimpleNamespace(spec=spec, drawing=()))
        self._rollouts: Rollouts[SimulatedLease] = Rollouts(sampler, renderer, factory, config)
        self._ahead = Ahead(self)

    async def run(self) -> None:
        position = 0
        for step in range(1, self._job.steps + 1):
            drawn = await self._ahead.take(self._plan, step, position)
            position = drawn.position
            await self._meet()
            await self._train(step)
            await self._meet()
            self.tell_work_left(step)
        self._job.end = self._loop.time()
        await self._ahead.close()
        self._sampler.gate.remove(self._job.name)
        self._trainer.remove(self._job.name)

    async def draw(self, plan: Plan, step: int, position: int) -> Drawn:
        start = self._loop.time()
        prompts = [Prompt(i, position + i, {"number": position + i}) for i in range(GROUPS)]
        groups = await self._rollouts.step(prompts)
        self._job.rollout.append(self._loop.time() - start)
        return Drawn(step, groups, position + GROUPS, GROUPS, GROUPS, self._job.rollout[-1], 0.0)

    def tell_work_left(self, step: int) -> None:
        """Tokens that are left, as clora_engine.plan counts them: the most that is possible while nothing is known."""
        each = self._sampler.tokens[self._job.name] / step if step else GROUPS * GROUP_SIZE * TURNS * MAX_TURN_TOKENS
        left = round((self._job.steps - step) * each)
        self._sampler.gate.register(self._job.name, WEIGHT, left)
        self._trainer.register(self._job.name, WEIGHT, left)

    async def _train(self, step: int) -> None:
        start = self._loop.time()
        await self._trainer.step(self._job.name, self._sampler.tokens[self._job.name] // step)
        self._sampler.publish(self._job.name, step)
        self._job.train.append(self._loop.time() - start)
        await self._trainer.commit(self._job.name)

    async def _meet(self) -> None:
        if self._together is not None:
            await self._together.wait()


class _Renderer:
    stop_token_ids = ()
    longest_token = 1

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return [int(messages[0].content)]

    def parse(self, ids: Sequence[int]) -> Message:
        return Message("assistant", "")

    def observation(self, messages: Sequence[Message]) -> list[int]:
        return [0]


class _Factory:
    def new(self) -> _Environment:
        return _Environment()


class _Environment:
    async def reset(self, example: Example) -> Sequence[Message]:
        return [Message("user", str(example["number"]))]

    async def step(self, message: Message) -> StepResult:
        return StepResult()  # until max_turns

    async def close(self) -> None:
        pass
