"""Each fault of an environment, or of what a model says to one: what becomes of the trajectory, and with which message.

Played through rollouts with written-down tokens, against a real server where the fault is a server's. In each group one
member meets the fault; its neighbours must be untouched.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from aiohttp import web

from clora_engine.chat import Renderer
from clora_engine.environments import EnvironmentFactory, Example, create
from clora_engine.rollout import Rollouts
from clora_engine.rollout_config import Prompt, RolloutConfig
from clora_engine.rollout_metrics import step_metrics
from clora_engine.types import Group, Trajectory
from tests.unit.engine.chat_fixtures import CHATML, tiny_tokenizer
from tests.unit.engine.environments.http_server import Handler, answers, breaks_off, never, serving
from tests.unit.engine.test_rollout import END, Request, Scripted

TOKENIZER = tiny_tokenizer(CHATML)
EXAMPLE = {"question": "How many?", "answer": "1234.5", "expressions": []}
CONFIG = RolloutConfig(
    experiment="e",
    group_size=2,
    temperature=1.0,
    max_tokens=400,
    max_turns=3,
    max_context=4096,
    environment_timeout_seconds=60.0,
)


async def play(
    factory: EnvironmentFactory, odd: Sequence[str], neighbour: str, seconds: float = 60.0, example: Example = EXAMPLE
) -> Group:
    """Plays a group of two: one writes `odd`, turn by turn (the last for ever), the other `neighbour`."""
    renderer = Renderer(TOKENIZER, factory.tools)
    turns = [0]

    def script(request: Request) -> Sequence[str]:
        if request.n == 2:
            return [odd[0] + END, neighbour + END]
        turns[0] += 1
        return [odd[min(turns[0], len(odd) - 1)] + END]

    config = replace(CONFIG, environment_timeout_seconds=seconds)
    (group,) = await Rollouts(Scripted(script), renderer, factory, config).step([Prompt(0, 0, example)])
    return group


def observed(trajectory: Trajectory) -> str:
    """The last thing that the environment said."""
    text: str = TOKENIZER.decode([i for i, m in zip(trajectory.ids, trajectory.mask, strict=True) if not m])
    return text.rpartition("<|im_start|>tool\n")[2].partition(END)[0] if text else ""


# ------------------------------------------------------------------------------------ a server's

FINISH, SAY = '{"echo": "end"}', '{"echo": "x"}'

SERVERS: dict[str, tuple[Handler, str]] = {
    "time-out": (never, "Timeout: no answer within 1 s"),
    "500": (answers("oops", 500), "BadStatus: POST /v1/step answered 500"),
    "garbage JSON": (answers("{{{"), "BadAnswer: Invalid JSON: key must be a string at line 1 column 2"),
    "wrong schema": (answers('{"done": "yes"}'), "BadAnswer: done: Input should be a valid boolean"),
    "10 MB answer": (
        answers(b"x" * 10_000_000),
        "AnswerTooLarge: POST /v1/step: the answer is longer than 1048576 bytes",
    ),
    "redirect": (
        answers("", 302, Location="http://169.254.169.254/"),
        "BadStatus: POST /v1/step answered 302: redirects are not followed",
    ),
    "breaks off": (breaks_off, "Unreachable: POST /v1/step: Server disconnected"),
}


@pytest.mark.parametrize("fault", SERVERS)
async def test_a_servers_fault_ends_its_trajectory_alone(fault: str) -> None:
    handler, message = SERVERS[fault]
    async with serving() as server:

        async def step(request: web.Request) -> web.StreamResponse:
            body = json.loads(await request.read())
            if body["message"]["toolCalls"][0]["arguments"] == {"text": "end"}:
                return web.json_response({"reward": 1.0, "done": True})
            return await handler(request)

        server.handlers["/v1/step"] = step
        group = await play(server.factory(), [SAY], FINISH, seconds=1.0 if handler is never else 60.0)
    struck, neighbour = group.trajectories
    assert (struck.error, struck.reward) == (message, 0.0)
    assert (neighbour.error, neighbour.reward) == ("", 1.0)
    metrics = step_metrics([group])
    reason = message.partition(":")[0]
    assert metrics[f"environment_errors/{reason}"] == metrics["environment_errors"] == 1.0
    assert metrics["reward_mean"] == 1.0


async def test_an_endless_tool_loop_ends_at_the_turn_limit() -> None:
    async with serving() as server:
        group = await play(server.factory(), [SAY], FINISH)
        steps = [body["turn"] for path, _, body in server.requests if path == "/v1/step"]
    looping, neighbour = group.trajectories
    assert (looping.turns, looping.error, looping.truncated) == (3, "", False)
    assert looping.reward == 3 * 0.25
    assert neighbour.reward == 1.0
    assert sorted(steps) == [1, 1, 2, 3]


async def test_every_episode_of_a_server_is_closed_even_when_it_was_given_up() -> None:
    async with serving(step=never) as server:
        await play(server.factory(), [SAY], FINISH, seconds=1.0)
        begun = {body["episode"] for path, _, body in server.requests if path == "/v1/reset"}
        closed = {body["episode"] for path, _, body in server.requests if path == "/v1/close"}
    assert begun == closed


# ------------------------------------------------------------------------------------ a model's

RIGHT = '{"final_answer": 1234.5}'
ONLY = "error: only numbers and + - * / ** % ( ) are allowed"

CALLS: dict[str, tuple[str, str]] = {
    "power tower": ("9**9**9", "error: exponents are whole numbers up to 64"),
    "nested brackets": ("(" * 40 + "1" + ")" * 40, "error: too deeply nested"),
    "nested lists": ("[" * 40 + "1" + "]" * 40, ONLY),
    "Arabic digits": ("٣+٤", ONLY),
    "full-width digits": ("１+1", ONLY),
    "superscript": ("3²", ONLY),
    "huge input": ("9" * 390, "error: longer than 200 characters"),
    "huge number": ("9" * 150, "error: number too large"),
    "code": ("__import__('os').getpid()", ONLY),
    "nothing": ("", "error: empty expression"),
    "division by zero": ("1/0", "error: division by zero"),
}


@pytest.mark.parametrize("fault", CALLS)
async def test_a_call_that_cannot_be_carried_out_is_answered_and_the_model_goes_on(fault: str) -> None:
    expression, message = CALLS[fault]
    call = json.dumps({"calculator": expression}, ensure_ascii=False)
    group = await play(create("WordProblems", {}), [call, RIGHT], RIGHT)
    struck, neighbour = group.trajectories
    assert observed(struck) == message
    assert (struck.error, struck.reward, struck.tool_errors) == ("", 1.0, 1)
    assert (neighbour.reward, neighbour.tool_errors) == (1.0, 0)


TURNS: dict[str, tuple[str, float, int]] = {
    # what the model writes, the reward, errors counted
    "dollars": ('{"final_answer": "$1,234.50"}', 1.0, 0),
    "trailing zeros": ('{"final_answer": "1234.500"}', 1.0, 0),
    "a fraction": ('{"final_answer": "2469/2"}', 1.0, 0),
    "a number": ('{"final_answer": 1234.5}', 1.0, 0),
    "wrong": ('{"final_answer": 1234}', 0.0, 0),
    "units": ('{"final_answer": "1234.5 apples"}', 0.0, 0),
    "unicode digits": ('{"final_answer": "١٢٣٤"}', 0.0, 0),
    "an expression that would be huge": ('{"final_answer": "9**9**9"}', 0.0, 0),
    "empty": ("", 0.0, 1),
    "talk": ("It is 1234.5.", 0.0, 1),
    "cut JSON": ('{"final_answer": ', 0.0, 1),
    "nested JSON": ('{"final_answer": ' + "[" * 300, 0.0, 1),
    "two calls": (RIGHT + RIGHT, 0.0, 1),
}


@pytest.mark.parametrize("fault", TURNS)
async def test_a_turn_that_ends_the_episode(fault: str) -> None:
    written, reward, errors = TURNS[fault]
    group = await play(create("WordProblems", {}), [written], RIGHT)
    struck, neighbour = group.trajectories
    assert (struck.error, struck.reward, struck.tool_errors, struck.turns) == ("", reward, errors, 1)
    assert neighbour.reward == 1.0


MALFORMED: dict[str, tuple[str, str]] = {
    "empty": ("", "error: not JSON: Input data was truncated"),
    "talk": ("It is 1234.5.", "error: not JSON: JSON is malformed: invalid character (byte 0)"),
    "cut JSON": ('{"final_answer": ', "error: not JSON: Input data was truncated"),
    "nested JSON": ('{"final_answer": ' + "[" * 300, "error: not JSON: Input data was truncated"),
    "two keys": (
        '{"calculator": "1", "final_answer": 2}',
        "error: not a JSON object with one tool's name as its only key",
    ),
}


@pytest.mark.parametrize("fault", MALFORMED)
async def test_a_malformed_call_is_answered_where_the_experiment_says_so(fault: str) -> None:
    written, message = MALFORMED[fault]
    group = await play(create("WordProblems", {"malformedCalls": "Answer"}), [written, RIGHT], RIGHT)
    struck, neighbour = group.trajectories
    assert observed(struck) == message
    assert (struck.error, struck.reward, struck.tool_errors, struck.turns) == ("", 1.0, 1, 2)
    assert (neighbour.reward, neighbour.tool_errors) == (1.0, 0)


async def test_malformed_calls_without_end_stop_at_the_turn_limit() -> None:
    group = await play(create("GSM8K", {}), ["{"], RIGHT, example={"question": "How many?", "answer": "#### 1,234.50"})
    struck, neighbour = group.trajectories
    assert (struck.turns, struck.tool_errors, struck.reward) == (3, 3, 0.0)
    assert neighbour.reward == 1.0


async def test_an_endless_calculator_loop_ends_at_the_turn_limit() -> None:
    group = await play(create("WordProblems", {}), ['{"calculator": "1+1"}'], RIGHT)
    looping, neighbour = group.trajectories
    assert (looping.turns, looping.tool_calls, looping.reward, looping.error) == (3, 3, 0.0, "")
    assert neighbour.reward == 1.0
