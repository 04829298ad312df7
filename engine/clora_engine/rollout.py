"""Rolls out the groups of a step: environment × sampler, many episodes at once.

A group is one prompt played `group_size` times under one version, which it leases until its last turn. Members whose
histories are still the same are sampled by one request for as many samples as there are members; members that wrote
different things go on without each other. That changes no distribution: the samples of a request are independent.
Tokens are only ever appended; nothing is re-tokenized.

What goes wrong, and whom it strikes: an environment's failure or time-out, a prompt that does not fit, messages that
the model's chat template refuses: that trajectory (`Trajectory.error`). The sampler's TransientError: the group is
drawn again, a bounded number of times. A UserError, or a bug: the whole call. Left out: what to do with the groups
(journal.py, advantages.py), who samples when (the gate).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from clora_engine.chat import MessagesError, Renderer
from clora_engine.closing import begin_closing
from clora_engine.environments.protocol import EnvironmentFactory, Example, Message
from clora_engine.episode import Episode
from clora_engine.errors import TransientError, UserError
from clora_engine.rendering import Rendering, TooLongError
from clora_engine.rollout_config import L, Prompt, RolloutConfig, SamplerLike, concurrency, played_at_once
from clora_engine.rollout_metrics import Outcome, evaluation_metrics
from clora_engine.types import Group, Sample, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnGroup = Callable[[Group], Awaitable[None]]


class Rollouts(Generic[L]):
    """Plays episodes of one experiment. Stateless between calls, but for the limit on concurrency that they share, with
    those of other Rollouts too that were made with the same `slots`, and for `environment_seconds`: wall-clock seconds
    in which an environment was asked, by one episode or several."""

    def __init__(
        self,
        sampler: SamplerLike[L],
        renderer: Renderer,
        factory: EnvironmentFactory,
        config: RolloutConfig,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._rendering = Rendering(renderer, config.max_context, config.experiment)
        self._factory = factory
        self._config = config
        self._part = played_at_once(config)
        self._slots = slots or concurrency(config)
        self._asking = 0  # calls of environments under way
        self._asked_since = 0.0
        self.environment_seconds = 0.0

    async def step(self, prompts: Sequence[Prompt], on_group: OnGroup | None = None) -> list[Group]:
        """Draws a group for every prompt; `on_group` is awaited for each as it is finished, for one at a time.

        Returns:
            The groups in the order of `prompts`.

        Raises:
            UserError, TransientError (after the last retry), or whatever `on_group` raises; the other groups are then
            cancelled.
        """

        turn = asyncio.Lock()

        async def one(prompt: Prompt) -> Group:
            group = await self._with_retries(lambda: self._group(prompt))
            if on_group is not None:
                async with turn:
                    await on_group(group)
            return group

        return await _all([one(prompt) for prompt in prompts])

    async def evaluate(
        self, examples: Sequence[Example], *, samples: int = 0, temperature: float = 1.0
    ) -> dict[str, float]:
        """Plays every example once greedily and `samples` times at a temperature, all under one version.

        Returns:
            `eval_accuracy`, the share of greedy episodes with a reward of at least 1; `eval_reward`, their mean;
            `eval_examples`, the number of episodes both are taken over. With samples: `eval_pass_at_k`, the share of
            examples of which at least one of k = `samples` episodes was right (with as many episodes as k, that is the
            unbiased estimate of Chen et al., 2021, arXiv:2107.03374), `eval_mean_at_k`, the share of episodes.
            `eval_errors`, the number of episodes that failed and are not counted. Without any that can be counted,
            shares and mean are left out.
        """

        async def play(lease: L, part: Sequence[Example], temperature: float) -> list[Outcome]:
            async with self._slots:
                episodes = await self._play(lease, part, temperature=temperature)
            return [Outcome(episode.reward, episode.error) for episode in episodes]

        async def all_of(lease: L, wanted: Sequence[Example], temperature: float) -> list[Outcome]:
            starts = iter(range(0, len(wanted), self._part))
            played: dict[int, list[Outcome]] = {}

            async def some() -> None:
                for start in starts:  # shared: no more tasks than can play
                    played[start] = await play(lease, wanted[start : start + self._part], temperature)

            await _all([some() for _ in range(max(1, self._config.concurrency // self._part))])
            return [outcome for start in sorted(played) for outcome in played[start]]

        async def everything() -> tuple[list[Outcome], list[Outcome]]:
            repeated = [example for example in examples for _ in range(samples)]
            with self._sampler.lease(self._config.experiment) as lease:
                greedy, drawn = await _all([all_of(lease, examples, 0.0), all_of(lease, repeated, temperature)])
            return greedy, drawn

        greedy, drawn = await self._with_retries(everything)
        each = [drawn[start : start + samples] for start in range(0, len(drawn), samples)] if samples else []
        return evaluation_metrics(greedy, each)

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for retry in range(self._config.retries):
            try:
                return await attempt()
            except TransientError as error:
                logger.warning("experiment %s: drawing again: %s", self._config.experiment, error)
                await asyncio.sleep(self._config.retry_seconds * 2**retry)
        return await attempt()

    async def _group(self, prompt: Prompt) -> Group:
        config = self._config
        episodes: list[Episode] = []
        async with self._slots:
            with self._sampler.lease(config.experiment) as lease:
                while len(episodes) < config.group_size:
                    size = min(self._part, config.group_size - len(episodes))
                    episodes += await self._play(lease, [prompt.example] * size, temperature=config.temperature)
                version = lease.version
        common = next((episode.prompt for episode in episodes if episode.prompt), [])
        for episode in episodes:
            if not episode.error and episode.prompt != common:
                episode.fail("PromptDiffers: the environment began episodes of one example differently")
        return Group(
            index=prompt.index,
            example=prompt.position,
            version_step=version.step,
            prompt=common,
            trajectories=[episode.finished() for episode in episodes],
            temperature=config.temperature,
        )

    async def _play(self, lease: L, examples: Sequence[Example], *, temperature: float) -> list[Episode]:
        """Plays an episode of each example to its end."""
        episodes = [Episode(self._factory.new()) for _ in examples]
        try:
            await self._reset(episodes, examples)
            await self._advance(lease, episodes, temperature)
        finally:
            closing = begin_closing(
                (episode.environment for episode in episodes),
                experiment=self._config.experiment,
                seconds=self._config.environment_timeout_seconds,
            )
        await asyncio.wait(closing)  # they are still among the episodes at once; not reached after a failure
        return episodes

    async def _advance(self, lease: L, episodes: Sequence[Episode], temperature: float) -> None:
        """Samples the next turn of all open episodes, one request for each distinct history, and so on to the end."""
        alike = defaultdict(list)
        for episode in episodes:
            if episode.open:
                alike[episode.history].append(episode)
        await _all([self._turn(lease, history, members, temperature) for history, members in alike.items()])

    async def _turn(self, lease: L, history: Sequence[int], members: Sequence[Episode], temperature: float) -> None:
        params = SamplingParams(
            temperature=temperature,
            max_tokens=min(self._config.max_tokens, self._config.max_context - len(history)),
            stop_token_ids=self._renderer.stop_token_ids,
        )
        samples = await self._sampler.sample(lease, history, len(members), params)
        alike = defaultdict(list)
        for member, sample in zip(members, samples, strict=True):
            alike[sample.ids].append((member, sample))

        async def respond(branch: Sequence[tuple[Episode, Sample]]) -> None:
            await _all([self._respond(member, sample) for member, sample in branch])
            await self._advance(lease, [member for member, _ in branch], temperature)

        await _all([respond(branch) for branch in alike.values()])

    async def _reset(self, episodes: Sequence[Episode], examples: Sequence[Example]) -> None:
        """Begins all episodes. First messages that are the same as the neighbour's become tokens once."""
        pairs = zip(episodes, examples, strict=True)
        asked = await _all([self._ask(episode, episode.environment.reset(example)) for episode, example in pairs])
        latest: Sequence[Message] | None = None
        prompt: list[int] | MessagesError = []
        for episode, messages in zip(episodes, asked, strict=True):
            if messages is None:
                continue
            if latest is None or list(messages) != list(latest):
                latest, prompt = messages, await self._prompt(messages)
            if isinstance(prompt, MessagesError):
                episode.fail(str(prompt))
            else:
                episode.prompt = prompt

    async def _prompt(self, messages: Sequence[Message]) -> list[int] | MessagesError:
        try:
            return await self._rendering.prompt(messages)
        except MessagesError as error:
            return error

    async def _respond(self, episode: Episode, sample: Sample) -> None:
        """Adds the model's turn and the environment's answer to it."""
        episode.add_turn(sample.ids, sample.logprobs)
        if sample.truncated:
            return episode.truncate()
        message = await self._rendering.parse(sample.ids)
        episode.tool_calls += len(message.tool_calls)
        episode.tool_errors += bool(message.parse_error)
        result = await self._ask(episode, episode.environment.step(message))
        if result is None:
            return
        episode.tool_errors += result.tool_errors
        episode.add_reward(result.reward)
        if result.done or episode.turns >= self._config.max_turns or not episode.open:
            episode.open = False
            return
        try:
            episode.add_observation(await self._rendering.observation(result.messages, len(episode.history)))
        except TooLongError:
            episode.truncate()
        except MessagesError as error:
            episode.fail(str(error))

    async def _ask(self, episode: Episode, answer: Awaitable[T]) -> T | None:
        """The environment's answer; None if it failed, which ends this episode alone."""
        seconds = self._config.environment_timeout_seconds
        self._asking += 1
        if self._asking == 1:
            self._asked_since = time.monotonic()
        try:
            async with asyncio.timeout(seconds) as limit:
                return await answer
        except UserError:
            raise
        except Exception as error:  # whatever an environment raises must not stop the others
            if limit.expired():
                episode.fail(f"Timeout: no answer within {seconds:g} s")
            else:
                logger.warning("experiment %s: environment failed", self._config.experiment, exc_info=True)
                episode.fail(f"{type(error).__name__}: {error}")
        finally:
            self._asking -= 1
            if self._asking == 0:
                self.environment_seconds += time.monotonic() - self._asked_since
        return None


async def _all(jobs: Sequence[Awaitable[T]]) -> list[T]:
    """Runs jobs at once; the first failure cancels the others, waits for them, and is raised as it is."""

    async def run(job: Awaitable[T]) -> T:
        return await job

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(job)) for job in jobs]
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return [task.result() for task in running]
