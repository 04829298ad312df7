"""The work that clora and its peers do alike: one LoRAExperiment's prompts, environment and numbers.

A peer runs in an environment of its own, which has no vLLM, with clora's packages on its path: it takes the spec
through the engine's own checks (clora_engine.plan) and plays the episodes by the engine's own renderer, environments
and bookkeeping. What it does not share is who samples and who trains. Unlike clora's rollouts, which wait for nobody,
the episodes of a step go turn by turn, so that a peer can sample a turn of all of them in one batch, as it is best at.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec

from clora_api.control import DesiredExperiment
from clora_engine import plan as planning
from clora_engine.chat import load_tokenizer
from clora_engine.config import EngineConfig
from clora_engine.episode import Episode
from clora_engine.plan import Plan
from clora_engine.types import Group

T = TypeVar("T")


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer is told, as a JSON file. `adapter` is the PEFT folder that the experiment starts from; `settings` are
    the peer's own (see its script); `out` is where it writes a line of JSON per event."""

    spec: dict[str, Any]
    model: str
    adapter: str
    max_context: int
    settings: dict[str, Any]
    out: str

    def plan(self) -> Plan:
        """The spec as an engine with this model would run it."""
        desired = DesiredExperiment(uid="peer", namespace="team", name="peer", spec=self.spec)
        nowhere = Path("/nonexistent")
        config = EngineConfig(model=self.model, storage=nowhere, token_file=nowhere, max_model_len=self.max_context)
        return planning.build(desired, config, load_tokenizer(Path(self.model)))


class Events:
    """Lines of JSON, each with the time at which it was written."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, event: str, **values: Any) -> None:
        self._file.write(msgspec.json.encode({"event": event, "time": time.time(), **values}).decode() + "\n")
        self._file.flush()


def read_work(path: Path) -> Work:
    return msgspec.json.decode(path.read_bytes(), type=Work)


def read_events(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line, type=dict[str, Any]) for line in path.read_text().splitlines()]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A step's counts. sampled: tokens that the model wrote. rows: tokens of all prompts and completions, each
    trajectory by itself. padded: the same as a batch of equal rows, prompts padded on their left and completions on
    their right."""

    sampled: int
    rows: int
    padded: int
    reward_mean: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


class Episodes:
    """The episodes of one step, group by group, from data position `position` on."""

    def __init__(self, plan: Plan, position: int, max_context: int) -> None:
        self._plan = plan
        self._max_context = max_context
        algorithm = plan.spec.algorithm
        positions = range(position, position + algorithm.prompts_per_step)
        self.groups = [[Episode(plan.factory.new()) for _ in range(algorithm.group_size)] for _ in positions]
        self._positions = positions
        for place, group in zip(positions, self.groups, strict=True):
            example = plan.data.train.example(place)
            for episode in group:
                episode.prompt = plan.renderer.prompt(_now(episode.environment.reset(example)))

    @property
    def all(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group]

    @property
    def open(self) -> list[Episode]:
        """Those that the model has another turn in."""
        return [episode for episode in self.all if episode.open]

    def answer(self, episode: Episode, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Adds a turn of the model and what the environment answers: as clora_engine.rollout does, without its limits
        on time and on what a foreign environment may do."""
        spec, renderer = self._plan.spec, self._plan.renderer
        episode.add_turn(ids, logprobs)
        if not ids or ids[-1] not in renderer.stop_token_ids:
            return episode.truncate()
        message = renderer.parse(ids)
        result = _now(episode.environment.step(message))
        episode.tool_calls += len(message.tool_calls)
        episode.tool_errors += bool(message.parse_error) + result.tool_errors
        episode.add_reward(result.reward)
        if result.done or episode.turns >= spec.environment.max_turns:
            episode.open = False
            return
        observation = renderer.observation(result.messages)
        if len(episode.history) + len(observation) >= self._max_context:
            return episode.truncate()
        episode.add_observation(observation)

    def finished(self) -> list[Group]:
        return [
            Group(
                index=index,
                example=place,
                prompt=group[0].prompt,
                version_step=0,
                trajectories=[episode.finished() for episode in group],
            )
            for index, (place, group) in enumerate(zip(self._positions, self.groups, strict=True))
        ]


def step_tokens(groups: Sequence[Group]) -> StepTokens:
    pairs = [(len(group.prompt), trajectory) for group in groups for trajectory in group.trajectories]
    return StepTokens(
        sampled=sum(sum(trajectory.mask) for _, trajectory in pairs),
        rows=sum(prompt + len(trajectory.ids) for prompt, trajectory in pairs),
        padded=len(pairs) * (max(prompt for prompt, _ in pairs) + max(len(t.ids) for _, t in pairs)),
        reward_mean=statistics.fmean(trajectory.reward for _, trajectory in pairs),
    )


def _now(answer: Coroutine[Any, Any, T]) -> T:
    """A built-in environment's answer, which waits for nothing."""
    return asyncio.run(answer)
