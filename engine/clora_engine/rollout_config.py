"""What rollouts are given: how an experiment's episodes are played, the prompts, and what they need of a sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

from clora_engine.environments.protocol import Example
from clora_engine.types import Sample, SamplingParams, Version


class LeaseLike(Protocol):
    """A version, held from __enter__ to __exit__."""

    version: Version

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None: ...


L = TypeVar("L", bound=LeaseLike)


class SamplerLike(Protocol[L]):
    """What rollouts need of a sampler."""

    def lease(self, experiment: str) -> L:
        """Holds the experiment's latest version."""
        ...

    async def sample(self, lease: L, prompt_ids: Sequence[int], n: int, params: SamplingParams) -> list[Sample]:
        """n independent samples that follow `prompt_ids`. Raises TransientError when trying again may help."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How the episodes of one experiment are played.

    max_tokens   tokens that the model may write in one turn
    max_turns    turns of the model in an episode
    max_context  positions of prompt and episode together: the sampler's max_model_len
    concurrency  episodes in flight at once, over all groups
    """

    experiment: str
    group_size: int
    temperature: float
    max_tokens: int
    max_turns: int
    max_context: int
    concurrency: int = 64
    environment_timeout_seconds: float = 60.0
    retries: int = 3
    retry_seconds: float = 1.0  # before the first retry of a group; doubled for each further one


@dataclass(frozen=True, slots=True)
class Prompt:
    """One group to be drawn: its place in the step, the data position of its example, and the example."""

    index: int
    position: int
    example: Example


def concurrency(config: RolloutConfig) -> asyncio.Semaphore:
    """The limit on episodes in flight. A group is admitted whole; one that is larger than the limit is played in parts,
    one after another."""
    return asyncio.Semaphore(max(1, config.concurrency // played_at_once(config)))


def played_at_once(config: RolloutConfig) -> int:
    """Members of a group that are played at once."""
    return max(1, min(config.group_size, config.concurrency))
