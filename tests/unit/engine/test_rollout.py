"""Roll-outs against a sampler whose tokens are written down; vLLM itself is met in the integration tests."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import pytest

from clora_engine.chat import Renderer
from clora_engine.environments import EnvironmentFactory, Example, Message, StepResult, create
from clora_engine.environments.questions import QuestionEnvironment
from clora_engine.environments.word_problems import WordProblems, read_row
from clora_engine.errors import SamplerRestarted, UserError
from clora_engine.rollout import Rollouts
from clora_engine.rollout_config import Prompt, RolloutConfig, concurrency
from clora_engine.types import Group, Sample, SamplingParams, Version
from tests.unit.engine.chat_fixtures import ALTERNATING, CHATML, tiny_tokenizer

TOKENIZER = tiny_tokenizer(CHATML)
FACTORY = create("WordProblems", {"families": "errands"})
RENDERER = Renderer(TOKENIZER, FACTORY.tools)
END = "<|im_end|>"
OPEN = f"{END}\n<|im_start|>assistant\n"
CALCULATE, ANSWER, WRONG = '{"calculator": "100-7*4"}', '{"final_answer": 72}', '{"final_answer": 5}'
CONFIG = RolloutConfig(
    experiment="e", group_size=4, temperature=1.0, max_tokens=40, max_turns=3, max_context=2048, retry_seconds=0.0
)


def prompt(index: int, question: str = "How many?") -> Prompt:
    return Prompt(index, 100 + index, {"question": question, "answer": "72", "expressions": ["100-7*4"]})


class Lease:
    def __init__(self, sampler: Scripted, version: Version) -> None:
        self.version = version
        self._sampler = sampler

    def __enter__(self) -> Lease:
        self._sampler.held += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._sampler.held -= 1


@dataclass
class Request:
    version: Version
    history: tuple[int, ...]
    n: int
    params: SamplingParams

    @property
    def after(self) -> str:
        """What the model wrote last, or the question."""
        text: str = TOKENIZER.decode(list(self.history))
        return text.removesuffix(OPEN).rpartition("\n")[2]


Script = Callable[[Request], Sequence[str] | Awaitable[Sequence[str]]]


@dataclass
class Scripted:
    """Writes what `script` says for a request: one text for each sample. A text without END was cut off."""

    script: Script
    step: int = 3
    held: int = 0
    leases: int = 0
    requests: list[Request] = field(default_factory=list)

    def lease(self, experiment: str) -> Lease:
        self.leases += 1
        return Lease(self, Version(experiment, self.step))

    async def sample(self, lease: Lease, prompt_ids: Sequence[int], n: int, params: SamplingParams) -> list[Sample]:
        assert self.held > 0
        request = Request(lease.version, tuple(prompt_ids), n, params)
        self.requests.append(request)
        await asyncio.sleep(0)
        found = self.script(request)
        texts = found if isinstance(found, Sequence) else await found
        assert len(texts) == n
        return [self._sample(text, params, i) for i, text in enumerate(texts)]

    def _sample(self, text: str, params: SamplingParams, i: int) -> Sample:
        ids = tuple(TOKENIZER.encode(text, add_special_tokens=False))[: params.max_tokens]
        logprobs = tuple(-0.5 - i - k / 100 for k in range(len(ids)))
        return Sample(
            ids=ids, logprobs=logprobs, truncated=not text.endswith(END) or ids[-1] not in RENDERER.stop_token_ids
        )


def rollouts(
    script: Script, config: RolloutConfig = CONFIG, factory: EnvironmentFactory = FACTORY
) -> tuple[Rollouts[Lease], Scripted]:
    sampler = Scripted(script)
    return Rollouts(sampler, RENDERER, factory, config), sampler


def first_then(first: Sequence[str], second: str) -> Script:
    """`first` after the question, `second` for everything after a tool's answer."""
    return lambda request: [t + END for t in first] if "?" in request.after else [second + END] * request.n


def text(ids: Sequence[int]) -> str:
    decoded: str = TOKENIZER.decode(list(ids))
    return decoded


async def test_a_group_token_by_token() -> None:
    played, sampler = rollouts(first_then([CALCULATE, CALCULATE, "So 72.", ANSWER], ANSWER))
    (group,) = await played.step([prompt(5)])
    assert (group.index, group.example, group.version_step) == (5, 105, 3)
    assert group.prompt == RENDERER.prompt([Message("user", "How many?")])
    calculated, same, chatted, answered = group.trajectories
    observation = "\n<|im_start|>tool\n72<|im_end|>\n<|im_start|>assistant\n"
    assert text(calculated.ids) == CALCULATE + END + observation + ANSWER + END
    assert (
        text([i for i, m in zip(calculated.ids, calculated.mask, strict=True) if m]) == CALCULATE + END + ANSWER + END
    )
    assert {lp for lp, m in zip(calculated.logprobs, calculated.mask, strict=True) if not m} == {0.0}
    assert all(lp < 0 for lp, m in zip(calculated.logprobs, calculated.mask, strict=True) if m)
    assert same.ids == calculated.ids
    assert same.logprobs != calculated.logprobs  # each sample keeps its own
    assert [t.reward for t in group.trajectories] == [1.0, 1.0, 0.0, 1.0]
    assert [t.turns for t in group.trajectories] == [2, 2, 1, 1]
    assert [(t.tool_calls, t.tool_errors) for t in group.trajectories] == [(2, 0), (2, 0), (0, 1), (1, 0)]
    assert text(chatted.ids) == "So 72." + END
    assert text(answered.ids) == ANSWER + END
    assert sampler.held == 0


async def test_equal_histories_are_sampled_by_one_request() -> None:
    other = '{"calculator": "72"}'
    played, sampler = rollouts(first_then([CALCULATE, other, CALCULATE, CALCULATE], ANSWER))
    (group,) = await played.step([prompt(0)])
    assert sorted(request.n for request in sampler.requests) == [1, 3, 4]
    assert sampler.requests[0].history == tuple(group.prompt)
    for request in sampler.requests[1:]:
        histories = [(*group.prompt, *t.ids) for t in group.trajectories]
        assert sum(history[: len(request.history)] == request.history for history in histories) == request.n
    assert all(r.params == SamplingParams(1.0, 40, RENDERER.stop_token_ids) for r in sampler.requests)


async def test_different_answers_of_the_environment_part_equal_histories() -> None:
    class Numbered(QuestionEnvironment):
        made = 0

        def __init__(self) -> None:
            super().__init__(read_row)
            self.number = Numbered.made = Numbered.made + 1

        async def step(self, message: Message) -> StepResult:
            result = await super().step(message)
            return replace(result, messages=tuple(Message("tool", str(self.number % 2)) for _ in result.messages))

    played, sampler = rollouts(first_then([CALCULATE] * 4, ANSWER), factory=Factory(Numbered))
    (group,) = await played.step([prompt(0)])
    assert [request.n for request in sampler.requests] == [4, 2, 2]
    assert len({tuple(t.ids) for t in group.trajectories}) == 2


async def test_branches_do_not_wait_for_each_other() -> None:
    slow, fast = '{"calculator": "1"}', '{"calculator": "2"}'
    fast_is_done = asyncio.Event()

    async def script(request: Request) -> Sequence[str]:
        if "?" in request.after:
            return [slow + END, fast + END]
        if request.after == "1":
            await fast_is_done.wait()
        if request.after == "3":
            fast_is_done.set()
            return [ANSWER + END]
        return ['{"calculator": "3"}' + END]

    played, sampler = rollouts(script, replace(CONFIG, group_size=2))
    await asyncio.wait_for(played.step([prompt(0)]), 60)
    assert [request.after for request in sampler.requests].count("3") == 2


async def test_turn_limit() -> None:
    played, sampler = rollouts(lambda request: [CALCULATE + END] * request.n, replace(CONFIG, max_turns=2))
    (group,) = await played.step([prompt(0)])
    assert {(t.turns, t.reward, t.truncated, t.error) for t in group.trajectories} == {(2, 0.0, False, "")}
    assert text(group.trajectories[0].ids).endswith(CALCULATE + END)  # no answer that nobody would read
    assert [request.n for request in sampler.requests] == [4, 4]


async def test_a_cut_off_turn_ends_the_episode() -> None:
    played, _ = rollouts(first_then([ANSWER] * 4, ANSWER), replace(CONFIG, max_tokens=3))
    (group,) = await played.step([prompt(0)])
    assert {(t.truncated, t.reward, len(t.ids), t.error) for t in group.trajectories} == {(True, 0.0, 3, "")}


async def test_the_context_limits_turns_and_observations() -> None:
    room = len(RENDERER.prompt([Message("user", "How many?")]))
    call = len(TOKENIZER.encode(CALCULATE + END))
    played, sampler = rollouts(first_then([CALCULATE] * 4, ANSWER), replace(CONFIG, max_context=room + call + 2))
    (group,) = await played.step([prompt(0)])
    assert sampler.requests[0].params.max_tokens == min(40, call + 2)
    assert len(sampler.requests) == 1
    assert {(t.truncated, len(t.ids), t.error) for t in group.trajectories} == {(True, call, "")}


async def test_a_prompt_that_does_not_fit_fails_its_trajectories_alone() -> None:
    played, sampler = rollouts(first_then([ANSWER] * 4, ANSWER), replace(CONFIG, max_context=200))
    long, short = await played.step([prompt(0, "How many?" * 100), prompt(1)])
    assert all(t.error.startswith("PromptTooLong: ") and not t.ids for t in long.trajectories)
    assert [t.reward for t in short.trajectories] == [1.0] * 4
    assert len(sampler.requests) == 1


# --------------------------------------------------------------------------------------------- failing environments


class Factory(WordProblems):
    """Makes environments of one class and counts those that are open."""

    def __init__(self, make: Callable[[], QuestionEnvironment]) -> None:
        super().__init__(("errands",))
        self.make = make
        self.opened = self.closed = self.most = 0

    def new(self) -> QuestionEnvironment:
        environment = self.make()
        self.opened += 1
        self.most = max(self.most, self.opened - self.closed)
        close = environment.close

        async def counted() -> None:
            self.closed += 1
            await close()

        environment.close = counted  # type: ignore[method-assign]
        return environment


class Failing(QuestionEnvironment):
    """Every other instance does `fault` when it is asked."""

    made = 0

    def __init__(self, method: str, fault: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(read_row)
        Failing.made += 1
        self.method = method if Failing.made % 2 else ""
        self.fault = fault

    async def reset(self, example: Example) -> Sequence[Message]:
        messages = await super().reset(example)
        return await self.fault() if self.method == "reset" else messages

    async def step(self, message: Message) -> StepResult:
        if self.method == "step":
            return await self.fault()  # type: ignore[no-any-return]
        return await super().step(message)

    async def close(self) -> None:
        if self.method == "close":
            await self.fault()


async def crash() -> None:
    raise RuntimeError("boom")


async def hang() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("method", "fault", "error"),
    [
        ("reset", crash, "RuntimeError: boom"),
        ("step", crash, "RuntimeError: boom"),
        ("reset", hang, "Timeout: no answer within 0.05 s"),
        ("step", hang, "Timeout: no answer within 0.05 s"),
        ("close", crash, ""),
        ("close", hang, ""),
    ],
)
async def test_an_environment_fails_alone(method: str, fault: Callable[[], Awaitable[Any]], error: str) -> None:
    Failing.made = 0
    factory = Factory(lambda: Failing(method, fault))
    config = replace(CONFIG, environment_timeout_seconds=0.05)
    played, _ = rollouts(lambda request: [ANSWER + END] * request.n, config, factory)
    (group,) = await played.step([prompt(0)])
    assert [t.error for t in group.trajectories] == [error, ""] * 2
    assert [t.reward for t in group.trajectories] == ([0.0, 1.0] * 2 if error else [1.0] * 4)
    assert factory.closed == 4
    assert group.prompt == RENDERER.prompt([Message("user", "How many?")])


async def test_a_reward_that_is_no_number_fails_its_trajectory() -> None:
    async def bad() -> StepResult:
        return StepResult(reward=float("nan"), done=False)

    Failing.made = 0
    played, _ = rollouts(lambda request: [ANSWER + END] * request.n, factory=Factory(lambda: Failing("step", bad)))
    (group,) = await played.step([prompt(0)])
    assert [(t.error, t.reward) for t in group.trajectories] == [("BadReward: nan", 0.0), ("", 1.0)] * 2


async def test_one_group_is_one_prompt() -> None:
    async def other() -> Sequence[Message]:
        return [Message("user", "Something else?")]

    Failing.made = 1
    factory = Factory(lambda: Failing("reset", other))
    played, _ = rollouts(lambda request: ["So?" + END] * request.n, factory=factory)
    (group,) = await played.step([prompt(0)])
    assert [t.error.partition(":")[0] for t in group.trajectories] == ["", "PromptDiffers"] * 2


async def test_a_users_error_ends_the_step() -> None:
    async def wrong() -> None:
        raise UserError("the environment is gone", field="environment")

    Failing.made = 0
    factory = Factory(lambda: Failing("step", wrong))
    played, sampler = rollouts(lambda request: [ANSWER + END] * request.n, factory=factory)
    with pytest.raises(UserError, match="is gone"):
        await played.step([prompt(0), prompt(1), prompt(2)])
    assert sampler.held == 0
    assert factory.closed == factory.opened > 0


class Saying(QuestionEnvironment):
    """Begins with `first`, and answers every turn with `then`."""

    def __init__(self, first: Sequence[Message], then: Sequence[Message] = ()) -> None:
        super().__init__(read_row)
        self.first, self.then = first, tuple(then)

    async def reset(self, example: Example) -> Sequence[Message]:
        await super().reset(example)
        return self.first

    async def step(self, message: Message) -> StepResult:
        return StepResult(self.then, 0.5)


USER = Message("user", "How many?")


@pytest.mark.parametrize(
    ("first", "then", "error"),
    [
        ([USER, USER], [], "BadMessages: the chat template refuses the conversation: roles must alternate"),
        ([USER], [USER, USER], "BadMessages: the chat template refuses the conversation: roles must alternate"),
        ([Message("user", "<end_of_turn>\nme")], [], "SpecialToken: <end_of_turn> is a special token of the model"),
        ([USER], [Message("user", f"a{END}b")], f"SpecialToken: {END} is a special token of the model"),
        ([USER], [Message("tool", "a", name="<|eot_id|>")], "SpecialToken: <|eot_id|> is a special token"),
    ],
)
async def test_messages_that_the_template_refuses_fail_their_episode_alone(
    first: Sequence[Message], then: Sequence[Message], error: str
) -> None:
    made = itertools.count()
    factory = Factory(lambda: QuestionEnvironment(read_row) if next(made) % 2 else Saying(first, then))
    renderer = Renderer(tiny_tokenizer(ALTERNATING), FACTORY.tools)
    played = Rollouts(Scripted(lambda request: [ANSWER + END] * request.n), renderer, factory, CONFIG)
    (group,) = await played.step([prompt(0)])
    assert [t.error.startswith(error) for t in group.trajectories] == [True, False] * 2
    assert [t.reward for t in group.trajectories] == [0.0, 1.0] * 2
    assert factory.closed == 4


class CountingTokenizer:
    """Counts how often, how much, and on which thread the tokenizer is asked to encode."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.encoded: list[tuple[int, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.encoded.append((len(text), threading.current_thread() is threading.main_thread()))
        return self._inner.encode(text, **options)


@pytest.mark.parametrize(
    ("characters", "max_context", "encoded"),
    [(100, 1 << 20, [True]), (100_000, 1 << 20, [False]), (100_000, 100, [])],
    ids=["short", "long", "hopeless"],
)
async def test_long_messages_are_encoded_once_and_beside_the_event_loop(
    characters: int, max_context: int, encoded: list[bool]
) -> None:
    tokenizer = CountingTokenizer(TOKENIZER)
    renderer = Renderer(tokenizer, FACTORY.tools)
    tokenizer.encoded.clear()
    factory = Factory(lambda: Saying([Message("user", "a b " * (characters // 4))]))
    sampler = Scripted(lambda request: ["So" for _ in range(request.n)])  # cut off: the episode ends
    played = Rollouts(sampler, renderer, factory, replace(CONFIG, max_context=max_context))
    (group,) = await played.step([prompt(0)])
    assert [on_loop for length, on_loop in tokenizer.encoded if length >= characters] == encoded
    assert {t.error.partition(":")[0] for t in group.trajectories} == {"" if encoded else "PromptTooLong"}


async def test_an_observation_that_cannot_fit_ends_the_episode_unread() -> None:
    tokenizer = CountingTokenizer(TOKENIZER)
    renderer = Renderer(tokenizer, FACTORY.tools)
    factory = Factory(lambda: Saying([USER], [Message("tool", "x" * 1_000_000)]))
    played = Rollouts(Scripted(lambda request: [ANSWER + END] * request.n), renderer, factory, CONFIG)
    (group,) = await played.step([prompt(0)])
    assert {(t.truncated, t.reward, t.error) for t in group.trajectories} == {(True, 0.5, "")}
    assert max(length for length, _ in tokenizer.encoded) < 1000


async def test_who_is_cancelled_waits_for_no_environment_to_close() -> None:
    asked, closing, never = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Stuck(QuestionEnvironment):
        async def step(self, message: Message) -> StepResult:
            asked.set()
            await never.wait()
            raise AssertionError

        async def close(self) -> None:
            closing.set()
            await never.wait()

    factory = Factory(lambda: Stuck(read_row))
    config = replace(CONFIG, environment_timeout_seconds=3600.0)
    played, sampler = rollouts(lambda request: [ANSWER + END] * request.n, config, factory)
    step = asyncio.create_task(played.step([prompt(0)]))
    await asyncio.wait_for(asked.wait(), 60)
    step.cancel()
    await asyncio.wait([step])  # never ends if it waits for `never`
    assert step.cancelled()
    assert sampler.held == 0
    await asyncio.wait_for(closing.wait(), 60)
    never.set()


# --------------------------------------------------------------------------------------------- the sampler's failures


async def test_a_group_is_drawn_again_when_the_sampler_restarts() -> None:
    failures = 2

    def script(request: Request) -> Sequence[str]:
        nonlocal failures
        if "?" not in request.after and failures:
            failures -= 1
            sampler.step += 1
            raise SamplerRestarted("the core died")
        return [(CALCULATE if "?" in request.after else ANSWER) + END] * request.n

    factory = Factory(lambda: QuestionEnvironment(read_row))
    played, sampler = rollouts(script, factory=factory)
    seen: list[Group] = []

    async def log(group: Group) -> None:
        seen.append(group)

    (group,) = await played.step([prompt(0)], log)
    assert seen == [group]
    assert group.version_step == 5  # leased anew
    assert [t.reward for t in group.trajectories] == [1.0] * 4
    assert [t.turns for t in group.trajectories] == [2] * 4
    assert (sampler.leases, sampler.held) == (3, 0)
    assert factory.opened == factory.closed == 12  # environments are for one episode


async def test_it_is_not_drawn_again_for_ever() -> None:
    def script(request: Request) -> Sequence[str]:
        raise SamplerRestarted("the core died")

    played, sampler = rollouts(script, replace(CONFIG, retries=2))
    with pytest.raises(SamplerRestarted):
        await played.step([prompt(0)])
    assert len(sampler.requests) == 3
    assert sampler.held == 0


# --------------------------------------------------------------------------------------------- many groups


async def test_groups_are_handed_over_as_they_finish() -> None:
    first_is_logged = asyncio.Event()
    logged: list[int] = []

    async def script(request: Request) -> Sequence[str]:
        if request.after == "Slow?":
            await first_is_logged.wait()
        return [ANSWER + END] * request.n

    async def log(group: Group) -> None:
        logged.append(group.index)
        first_is_logged.set()

    played, _ = rollouts(script)
    groups = await asyncio.wait_for(played.step([prompt(0, "Slow?"), prompt(1)], log), 60)
    assert logged == [1, 0]
    assert [group.index for group in groups] == [0, 1]


async def test_logging_is_for_one_group_at_a_time_and_its_failure_ends_the_step() -> None:
    inside = 0

    async def log(group: Group) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        await asyncio.sleep(0)
        inside -= 1
        if group.index == 2:
            raise OSError("disk full")

    played, sampler = rollouts(lambda request: [ANSWER + END] * request.n)
    await played.step([prompt(0), prompt(1)], log)
    with pytest.raises(OSError, match="disk full"):
        await played.step([prompt(index) for index in range(5)], log)
    assert sampler.held == 0


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (4, 4), (9, 8), (1000, 24)])
async def test_no_more_episodes_than_allowed_are_in_flight(concurrency: int, most: int) -> None:
    factory = Factory(lambda: QuestionEnvironment(read_row))
    config = replace(CONFIG, concurrency=concurrency)
    played, _ = rollouts(lambda request: [ANSWER + END] * request.n, config, factory)
    groups = await played.step([prompt(index) for index in range(6)])
    assert [len(group.trajectories) for group in groups] == [4] * 6
    assert factory.most == most
    factory.most = 0
    await played.evaluate([prompt(0).example] * 24)
    assert factory.most == most


async def test_what_is_drawn_ahead_and_what_is_evaluated_share_one_limit() -> None:
    factory = Factory(lambda: QuestionEnvironment(read_row))
    config = replace(CONFIG, concurrency=8)
    sampler = Scripted(lambda request: [ANSWER + END] * request.n)
    limit = concurrency(config)
    drawing, evaluating = (Rollouts(sampler, Renderer(TOKENIZER, factory.tools), factory, config, limit) for _ in "12")
    await asyncio.gather(
        drawing.step([prompt(index) for index in range(6)]), evaluating.evaluate([prompt(0).example] * 24)
    )
    assert factory.most == 8


async def test_an_evaluation_has_no_more_tasks_than_can_play() -> None:
    tasks = []

    def script(request: Request) -> Sequence[str]:
        tasks.append(len(asyncio.all_tasks()))
        return [ANSWER + END] * request.n

    played, _ = rollouts(script, replace(CONFIG, concurrency=4))
    found = await played.evaluate([prompt(index).example for index in range(200)], samples=2)
    assert found["eval_examples"] == 200
    assert max(tasks) < 40


async def test_a_group_keeps_its_version_to_its_last_turn() -> None:
    def script(request: Request) -> Sequence[str]:
        sampler.step += 1  # a new version is published during every request
        return [(CALCULATE if "?" in request.after else ANSWER) + END] * request.n

    played, sampler = rollouts(script, replace(CONFIG, concurrency=4))
    groups = await played.step([prompt(index) for index in range(3)])
    assert [group.version_step for group in groups] == [3, 5, 7]  # admitted one by one, each under the latest
    versions = defaultdict(set)
    for request in sampler.requests:
        versions[request.version].add(request.history[: len(groups[0].prompt)])
    assert len(versions) == 3


async def test_cancelling_a_step_leaves_nothing_behind() -> None:
    reached = asyncio.Event()

    async def script(request: Request) -> Sequence[str]:
        reached.set()
        await asyncio.Event().wait()
        return []

    factory = Factory(lambda: QuestionEnvironment(read_row))
    played, sampler = rollouts(script, factory=factory)
    task = asyncio.create_task(played.step([prompt(0), prompt(1)]))
    await asyncio.wait_for(reached.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sampler.held == 0
    assert factory.opened == factory.closed == 8
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --------------------------------------------------------------------------------------------- evaluation


async def test_evaluation_is_greedy_under_one_version() -> None:
    def script(request: Request) -> Sequence[str]:
        sampler.step += 1
        return [(ANSWER if "Right" in TOKENIZER.decode(list(request.history)) else WRONG) + END] * request.n

    played, sampler = rollouts(script)
    examples = [prompt(0, question).example for question in ["Right?"] * 3 + ["Wrong?"] * 2]
    assert await played.evaluate(examples) == {
        "eval_accuracy": 0.6,
        "eval_reward": 0.6,
        "eval_examples": 5.0,
        "eval_errors": 0.0,
    }
    assert {request.params.temperature for request in sampler.requests} == {0.0}
    assert {request.version.step for request in sampler.requests} == {3}
    assert (sampler.leases, sampler.held) == (1, 0)


async def test_pass_at_k_counts_examples_and_mean_at_k_answers() -> None:
    def script(request: Request) -> Sequence[str]:
        if request.params.temperature == 0.0:
            return [WRONG + END] * request.n
        right = request.n if "All" in request.after else 1 if "One" in request.after else 0
        return [ANSWER + END] * right + [WRONG + END] * (request.n - right)

    played, sampler = rollouts(script)
    examples = [prompt(0, question).example for question in ("All?", "One?", "None?")]
    assert await played.evaluate(examples, samples=4, temperature=0.7) == {
        "eval_accuracy": 0.0,
        "eval_reward": 0.0,
        "eval_examples": 3.0,
        "eval_errors": 0.0,
        "eval_pass_at_k": pytest.approx(2 / 3),
        "eval_mean_at_k": pytest.approx(5 / 12),
    }
    assert {request.params.temperature for request in sampler.requests} == {0.0, 0.7}
    assert (sampler.leases, sampler.held) == (1, 0)


async def test_failed_episodes_do_not_count_as_wrong_answers() -> None:
    Failing.made = 0
    factory = Factory(lambda: Failing("step", crash))
    played, _ = rollouts(lambda request: [ANSWER + END] * request.n, factory=factory)
    assert await played.evaluate([prompt(0).example] * 4) == {
        "eval_accuracy": 1.0,
        "eval_reward": 1.0,
        "eval_examples": 2.0,
        "eval_errors": 2.0,
    }
    played, _ = rollouts(lambda request: [ANSWER + END] * request.n, replace(CONFIG, max_context=5))
    assert await played.evaluate([prompt(0).example]) == {"eval_examples": 0.0, "eval_errors": 1.0}
