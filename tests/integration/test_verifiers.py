"""examples/verifiers-environment: the real verifiers library behind clora's own HTTP environment client, and a real
engine that trains on it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clora_engine.environments import Message, ToolCall
from clora_engine.environments.http import GeneratingHttpFactory, build
from clora_engine.environments.http_client import BadStatus
from local.cache import cache_dir, pinned_environment
from local.control_plane import free_port
from tests.engine_fixtures import EngineProcess, rl_spec
from tests.unit.engine.environments.http_server import LOOPBACK

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "verifiers-environment"
REQUIREMENTS = EXAMPLE / "requirements.txt"
START_SECONDS = 300.0
REFUSED = {
    "absent": "it does not load: KeyError: 'absent'",
    "group": "it rewards a group's rollouts together; clora plays and rewards each by itself",
    "several": "it rewards a group's rollouts together; clora plays and rewards each by itself",
    "logprobs": "it needs the tokens of the model's turns (logprobs); it gets their text",
    "picture": "the environment's messages hold more than text (image_url)",
    "shots": "the environment has a message of role 'assistant' before the model's first turn",
    "one_row": "it has one row and no eval dataset: nothing is left to evaluate on",
    "broken": "its first rollout fails: RuntimeError: no browser found",
}
SERVE_ALL = """
import asyncio, json, logging, sys
from aiohttp import web
from classic import ClassicEnvironment
from rollout import CannotServe
from serve import Server

async def serve(kind, port):
    name, arguments = ("reverse_text", {}) if kind == "reverse_text" else ("verifiers_environments", {"kind": kind})
    try:
        server = Server(ClassicEnvironment(name, arguments), most=16, idle=600)
        runner = web.AppRunner(server.app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
    except CannotServe as error:
        return str(error)

async def main():
    ports = json.loads(sys.argv[1])
    print("refusals", json.dumps({kind: await serve(kind, port) for kind, port in ports.items()}), flush=True)
    await asyncio.Event().wait()

logging.basicConfig(level=logging.INFO)
asyncio.run(main())
"""


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the library's own environment, made once for each requirements file."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:16]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return pinned_environment(cache_dir() / "verifiers" / f"{version}-{digest}", REQUIREMENTS, sys.executable)


def environ() -> dict[str, str]:
    folders = (EXAMPLE, EXAMPLE / "environments", Path(__file__).parent)
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


@dataclass
class Served:
    """A `serve.py` of one environment, as a process."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                urllib.request.urlopen(f"{self.url}/v1/environment", timeout=10).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)  # it listens only later: there is nothing yet to wait on
        raise AssertionError(f"{self.url} does not answer:\n{self.log.read_text()}")

    def ask(self, path: str, body: dict[str, Any], key: str = "") -> tuple[int, Any]:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Idempotency-Key": key})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    async def factory(self) -> GeneratingHttpFactory:
        found = await asyncio.to_thread(build, {"url": self.url, "retries": "0"}, LOOPBACK)
        assert isinstance(found, GeneratingHttpFactory)
        return found


@pytest.fixture(scope="module")
def served(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """`letters` by the documented command; beside it, in one process for the seconds that the library takes to
    load, an environment of each kind, also of those that are refused."""
    folder = tmp_path_factory.mktemp("served")
    ports = {
        kind: free_port() for kind in ("reverse_text", "single", "mixed", "conversation", "tools", "forgets", *REFUSED)
    }
    found: dict[str, Served] = {}

    def start(name: str, port: int, *command: str) -> None:
        log = folder / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [str(python), *command], env=environ(), stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        found[name] = Served(f"http://127.0.0.1:{port}", log, process)

    try:
        port = free_port()
        command = ["verifiers_environments", '--arguments={"kind": "letters"}', "--host=127.0.0.1", f"--port={port}"]
        start("letters", port, str(EXAMPLE / "serve.py"), *command)
        start("all", ports["forgets"], "-c", SERVE_ALL, json.dumps(ports))
        for server in list(found.values()):
            server.wait()
        for kind, port in ports.items():
            found[kind] = Served(f"http://127.0.0.1:{port}", found["all"].log, found["all"].process)
        yield found
    finally:
        for server in found.values():
            server.process.terminate()
        for server in found.values():
            server.process.wait(60)


def says(content: str) -> Message:
    return Message("assistant", content)


def calls(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", (ToolCall(name, arguments),))


# ------------------------------------------------------------------------------------------------ one turn


@pytest.mark.parametrize(("answer", "reward"), [("right", 1.0), ("wrong", 0.0), ("", 0.0)])
async def test_a_single_turn_is_rewarded_by_the_rubric(served: dict[str, Served], answer: str, reward: float) -> None:
    factory = await served["single"].factory()
    assert factory.tools == ()
    episode = factory.new()
    first = await episode.reset(factory.generate(3, "train", 8))
    assert [message.role for message in first] == ["system", "user"]
    assert first[0].content == "Give the sum."
    a, b = (int(word) for word in first[1].content.removeprefix("What is ").rstrip("?").split(" + "))
    result = await episode.step(says(str(a + b) if answer == "right" else answer))
    assert (result.reward, result.done, result.messages) == (reward, True, ())
    await episode.close()


@pytest.mark.parametrize(("said", "reward"), [("<reversed>{}</reversed>", 1.0), ("{}", 0.0), ("", 0.0)])
async def test_the_examples_environment(served: dict[str, Served], said: str, reward: float) -> None:
    factory = await served["reverse_text"].factory()
    episode = factory.new()
    text = (await episode.reset(factory.generate(0, "train", 5)))[-1].content
    result = await episode.step(says(said.format(text[::-1])))
    assert (result.done, result.reward) == (True, reward)
    await episode.close()


async def test_a_group_of_environments_rewards_each_by_its_own_rubric(served: dict[str, Served]) -> None:
    factory = await served["mixed"].factory()
    found = set()
    for index in range(20):
        episode = factory.new()
        first = await episode.reset(factory.generate(0, "train", index))
        found.add((len(first), (await episode.step(says("aabb"))).reward))
        await episode.close()
    assert found == {(2, 0.0), (1, 0.5)}  # a system message and an exact answer; none, and how much it varies


async def prompts(factory: GeneratingHttpFactory, seed: int, split: Any, count: int) -> list[str]:
    found = []
    for index in range(count):
        episode = factory.new()
        found.append((await episode.reset(factory.generate(seed, split, index)))[-1].content)
        await episode.close()
    return found


async def test_a_row_is_the_same_episode_every_time_and_the_splits_are_apart(served: dict[str, Served]) -> None:
    factory = await served["single"].factory()
    train, again, other = [await prompts(factory, seed, "train", 40) for seed in (1, 1, 2)]
    assert train == again
    assert train != other
    assert set(train[:20]) == set(train[20:]) == set(other[:20])  # each row once in every round
    assert train[:20] != train[20:]
    test = await prompts(factory, 1, "test", 6)
    assert test == await prompts(factory, 2, "test", 6)
    assert len(set(test)) == 5
    assert test[5] == test[0]
    assert not set(test) & set(train)


async def test_without_an_eval_dataset_rows_are_held_out(served: dict[str, Served]) -> None:
    factory = await served["tools"].factory()
    train, test = set(await prompts(factory, 1, "train", 23)), set(await prompts(factory, 1, "test", 4))
    assert (len(train), len(test)) == (23, 2)
    assert not train & test


# ------------------------------------------------------------------------------------------------ several turns


def number(served: Served, index: int) -> int:
    """Of the example: found by trying, which costs the episode nothing."""
    for guess in range(1, 10):
        name = uuid.uuid4().hex
        example = {"seed": 0, "split": "train", "index": index}
        served.ask("/v1/reset", {"episode": name, "example": example}, f"{name}/reset")
        body = {"episode": name, "turn": 1, "message": {"content": str(guess), "toolCalls": []}}
        status, answer = served.ask("/v1/step", body, f"{name}/step/1")
        served.ask("/v1/close", {"episode": name}, f"{name}/close")
        if status == 200 and answer.get("done"):
            return guess
    raise AssertionError("none of them")


async def test_a_conversation_goes_on_until_its_stop_condition(served: dict[str, Served]) -> None:
    factory = await served["conversation"].factory()
    wanted = await asyncio.to_thread(number, served["conversation"], 2)
    episode = factory.new()
    await episode.reset(factory.generate(0, "train", 2))
    wrong = [guess for guess in (1, 9, 2) if guess != wanted][:2]
    for guess in wrong:
        result = await episode.step(says(str(guess)))
        word = "higher" if guess < wanted else "lower"
        assert (result.done, result.reward, result.messages) == (False, 0.0, (Message("user", word),))
    result = await episode.step(says(str(wanted)))
    assert result.done
    assert result.reward == pytest.approx(0.8)
    await episode.close()
    assert '"_turns": -2.0' in served["conversation"].log.read_text()  # what each function gave is in the log


async def test_a_conversation_ends_at_the_environments_own_turns(served: dict[str, Served]) -> None:
    factory = await served["conversation"].factory()
    wanted = await asyncio.to_thread(number, served["conversation"], 0)
    wrong = 1 if wanted != 1 else 2
    episode = factory.new()
    await episode.reset(factory.generate(0, "train", 0))
    results = [await episode.step(says(str(wrong))) for _ in range(4)]
    assert [result.done for result in results] == [False, False, False, True]
    assert results[-1].reward == pytest.approx(-0.3)
    await episode.close()


# ------------------------------------------------------------------------------------------------ tools


async def test_tools_are_declared_called_and_answered(served: dict[str, Served]) -> None:
    factory = await served["tools"].factory()
    assert [tool.name for tool in factory.tools] == ["add", "lookup"]
    assert factory.tools[0].description.startswith("Adds two numbers.")
    assert set(factory.tools[0].parameters["properties"]) == {"a", "b"}
    episode = factory.new()
    first = await episode.reset(factory.generate(0, "train", 1))
    a, b = (int(word) for word in first[-1].content.removeprefix("What is ").rstrip("?").split(" + "))
    both = Message("assistant", "", (ToolCall("add", {"a": a, "b": b}), ToolCall("lookup", {"word": "sum"})))
    result = await episode.step(both)
    assert result.messages == (
        Message("tool", str(a + b), name="add"),
        Message("tool", "'no sum here'", name="lookup"),
    )
    unknown = await episode.step(calls("subtract", a=1))
    assert [(message.role, message.name) for message in unknown.messages] == [("tool", "subtract")]
    result = await episode.step(says(str(a + b)))
    assert (result.done, result.reward) == (True, 1.0)
    await episode.close()


async def test_a_turn_that_is_no_wellformed_call_is_text(served: dict[str, Served]) -> None:
    factory = await served["tools"].factory()
    episode = factory.new()
    await episode.reset(factory.generate(0, "train", 1))
    result = await episode.step(Message("assistant", '<tool_call>{"name": ', parse_error="no JSON"))
    assert (result.done, result.reward) == (True, 0.0)
    await episode.close()


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_the_same_key_gets_the_same_answer_and_plays_no_turn(served: dict[str, Served]) -> None:
    server, name = served["conversation"], uuid.uuid4().hex
    reset = {"episode": name, "example": {"seed": 0, "split": "train", "index": 0}}
    assert server.ask("/v1/reset", reset, f"{name}/reset") == server.ask("/v1/reset", reset, f"{name}/reset")
    wrong = "1" if number(server, 0) != 1 else "2"
    for turn in (1, 2, 3, 4):
        step = {"episode": name, "turn": turn, "message": {"content": wrong, "toolCalls": [], "parseError": ""}}
        first, second = (server.ask("/v1/step", step, f"{name}/step/{turn}") for _ in range(2))
        assert first == second
        assert first[1].get("done", False) == (turn == 4)
    server.ask("/v1/close", {"episode": name}, f"{name}/close")
    assert server.ask("/v1/close", {"episode": name}, f"{name}/close")[0] == 200
    assert server.ask("/v1/step", step, f"{name}/step/4")[0] == 404


@pytest.mark.parametrize(
    ("kind", "said", "told"),
    [
        ("single", "break", "reward function _exact: ConnectionError: the judge does not answer"),
        ("conversation", "fail", "the sandbox is gone"),
        ("conversation", "crash", "ZeroDivisionError: a bug"),
        ("forgets", "1", "the environment changes what was said before"),
    ],
)
async def test_an_exception_of_the_environment_fails_its_episode(
    served: dict[str, Served], kind: str, said: str, told: str
) -> None:
    server, factory = served[kind], await served[kind].factory()
    episode = factory.new()
    await episode.reset(factory.generate(0, "train", 0))
    with pytest.raises(BadStatus, match="POST /v1/step answered 422") as caught:
        await episode.step(says(said))
    assert caught.value.lasting  # clora does not try it again
    await episode.close()
    assert told in server.log.read_text()
    name = uuid.uuid4().hex
    body = {"episode": name, "example": {"seed": 0, "split": "train", "index": 0}}
    assert await asyncio.to_thread(server.ask, "/v1/reset", body, f"{name}/reset")
    step = {"episode": name, "turn": 1, "message": {"content": said, "toolCalls": []}}
    status, answer = await asyncio.to_thread(server.ask, "/v1/step", step, f"{name}/step/1")
    assert status == 422
    assert told in answer["error"]


async def test_a_closed_episode_is_cleaned_up_by_its_environment(served: dict[str, Served]) -> None:
    server, factory = served["conversation"], await served["conversation"].factory()
    cleaned = server.log.read_text().count("cleaned up after 0 turns")
    episode = factory.new()
    await episode.reset(factory.generate(0, "train", 0))
    await episode.close()
    for _ in range(600):
        if server.log.read_text().count("cleaned up after 0 turns") > cleaned:
            return
        await asyncio.sleep(0.1)  # another process's log: nothing to wait on
    raise AssertionError(server.log.read_text())


async def test_what_the_protocol_cannot_carry_is_refused_at_the_start(served: dict[str, Served]) -> None:
    for _ in range(600):
        found = [line for line in served["all"].log.read_text().splitlines() if line.startswith("refusals ")]
        if found:
            told = json.loads(found[0].removeprefix("refusals "))
            assert {kind: why for kind, why in told.items() if why} == REFUSED
            return
        await asyncio.sleep(0.1)  # another process's log: nothing to wait on
    raise AssertionError(served["all"].log.read_text())


def test_the_servers_last_words_are_one_sentence(python: Path) -> None:
    group = ["verifiers_environments", "--arguments", '{"kind": "group"}', f"--port={free_port()}"]
    done = subprocess.run([python, EXAMPLE / "serve.py", *group], env=environ(), capture_output=True, check=False)
    assert done.returncode == 1
    told = done.stderr.decode().splitlines()[-1]
    assert told == f"serve: environment verifiers_environments cannot be served: {REFUSED['group']}"


# ------------------------------------------------------------------------------------------------ an experiment


def test_a_real_engine_trains_on_it(served: dict[str, Served], tmp_path: Path, tiny_model: Path) -> None:
    flags = {"environment_host": "127.0.0.1", "loopback_environments": True}
    engine = EngineProcess(tmp_path / "engine", tiny_model, **flags)
    try:
        engine.start()
        uid = str(uuid.uuid4())
        environment = {"name": "HTTP", "arguments": {"url": served["letters"].url}, "maxTurns": 1}
        algorithm = {"promptsPerStep": 2, "groupSize": 8, "learningRate": "1e-3"}
        # Long enough for a random model to end a turn now and then: one that is cut off is not judged.
        spec = rl_spec(environment=environment, algorithm=algorithm, sampling={"maxTokens": 160}, maxSteps=2)
        assert engine.put(uid, spec).status_code == 200, engine.tail()
        report = engine.finish(uid)
        assert report.progress.step == 2
        assert report.checkpoint is not None
        assert report.checkpoint.step == 2
        lines = engine.metrics(uid)[1:]
        assert [line["step"] for line in lines] == [1, 2]
        assert sum(line["reward_mean"] for line in lines) > 0.0
        assert not [line for line in lines if line.get("environment_errors")]
    finally:
        engine.close()
    assert "_variety" in served["letters"].log.read_text()
