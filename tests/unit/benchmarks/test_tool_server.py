"""The benchmarks' tool server plays the episodes of the built-in environment, and falsifies rewards if asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.tool_server import ToolServer
from clora_engine.environments.http import GeneratingHttpFactory, build
from clora_engine.environments.http_addresses import policy
from clora_engine.environments.protocol import EnvironmentFactory, Example, Message, StepResult, ToolCall
from clora_engine.environments.word_problems import WordProblems

FAMILY = "kitchen"


@pytest.fixture(scope="module")
def server() -> Iterator[ToolServer]:
    with ToolServer() as serving:
        yield serving


def call(name: str, **arguments: object) -> Message:
    return Message("assistant", "", (ToolCall(name, arguments),))


async def play(factory: EnvironmentFactory, example: Example, turns: list[Message]) -> list[Message | StepResult]:
    environment = factory.new()
    said: list[Message | StepResult] = [*await environment.reset(example)]
    said += [await environment.step(turn) for turn in turns]
    await environment.close()
    return said


async def over_http(server: ToolServer, rewards: str) -> GeneratingHttpFactory:
    arguments = server.environment(FAMILY, rewards)["arguments"]
    hosts = policy([server.engine_flags()["environment_host"]], loopback=True)
    factory = await asyncio.to_thread(build, arguments, hosts)
    assert isinstance(factory, GeneratingHttpFactory)
    return factory


@pytest.mark.parametrize("split", ["train", "test"])
async def test_the_same_episodes_as_without_a_server(server: ToolServer, split: str) -> None:
    ours, theirs = WordProblems((FAMILY,)), await over_http(server, "true")
    assert [(t.name, t.parameters) for t in theirs.tools] == [(t.name, t.parameters) for t in ours.tools]
    for index in range(4):
        row = ours.generate(3, "train" if split == "train" else "test", index)
        sent = theirs.generate(3, "train" if split == "train" else "test", index)
        turns = [
            call("calculator", expression=row["expressions"][0]),
            call("calculator", expression="1+"),
            call("final_answer", answer=float(row["answer"])),
        ]
        played = await play(theirs, sent, turns)
        assert played == await play(ours, row, turns)
        assert isinstance(played[-1], StepResult)
        assert played[-1].reward == 1.0


async def test_held_out_problems_are_always_judged_truly(server: ToolServer) -> None:
    factory, ours = await over_http(server, "flipped"), WordProblems((FAMILY,))
    answer = float(ours.generate(3, "test", 0)["answer"])
    end = (await play(factory, factory.generate(3, "test", 0), [call("final_answer", answer=answer)]))[-1]
    assert isinstance(end, StepResult)
    assert end.reward == 1.0


async def test_falsified_rewards_say_nothing_of_the_answer(server: ToolServer) -> None:
    ours = WordProblems((FAMILY,))
    for rewards, right, wrong in (("flipped", {-1.0}, {0.0}), ("random", {0.0, 1.0}, {0.0, 1.0})):
        factory = await over_http(server, rewards)
        answer = float(ours.generate(3, "train", 0)["answer"])
        for given, expected in ((answer, right), (answer + 1, wrong)):
            ends = [
                (await play(factory, factory.generate(3, "train", 0), [call("final_answer", answer=given)]))[-1]
                for _ in range(20)
            ]
            assert {end.reward for end in ends if isinstance(end, StepResult)} == expected
