"""Environments of the verifiers library for tests, as a package of a user's own has them: load_environment(kind).

Loaded by the library, in a Python environment of its own; all data is made here.
"""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset

SUMS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(1, 6) for b in range(1, 6)]


def load_environment(kind: str, **arguments: Any) -> vf.Environment:
    return KINDS[kind](**arguments)


# ---------------------------------------------------------------------------------------------- that are served


async def _exact(completion: Any, answer: str) -> float:
    """An asynchronous reward function, as a judge's is."""
    await asyncio.sleep(0)
    said = completion[-1]["content"]
    if said == "break":
        raise ConnectionError("the judge does not answer")
    return float(said.strip() == answer)


def _length(completion: Any) -> float:
    return float(len(completion[-1]["content"]))


def single(held_out: int = 5) -> vf.Environment:
    """One turn: a sum."""
    rubric = vf.Rubric(funcs=[_exact, _length], weights=[1.0, 0.0])
    test = Dataset.from_list(SUMS[:held_out]) if held_out else None
    rows = Dataset.from_list(SUMS[held_out:])
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=test, system_prompt="Give the sum.", rubric=rubric)


def _variety(completion: Any) -> float:
    said = completion[-1]["content"]
    return len(set(said)) / max(1, len(said))


def letters() -> vf.Environment:
    """Rewards any text, one that repeats itself less: a model of random weights gets something of it."""
    return vf.SingleTurnEnv(dataset=Dataset.from_list(SUMS), rubric=vf.Rubric(funcs=[_variety]))


def mixed() -> vf.Environment:
    """Two of them, each with its own rubric."""
    return vf.EnvGroup([single(), letters()], env_names=["single", "letters"])


class Guess(vf.MultiTurnEnv):
    """Guesses a number; what the environment keeps of a rollout it drops in its cleaning up."""

    async def setup_state(self, state: Any) -> Any:
        state["guesses"] = 0
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        said = messages[-1]["content"]
        if said == "fail":
            raise vf.InfraError("the sandbox is gone")
        if said == "crash":
            raise ZeroDivisionError("a bug")
        state["guesses"] += 1
        word = "higher" if int(said) < int(state["answer"]) else "lower"
        return [{"role": "user", "content": word}]

    @vf.stop
    async def found(self, state: Any) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == state["answer"]

    @vf.cleanup
    async def tell(self, state: Any) -> None:
        print(f"cleaned up after {len(state['trajectory'])} turns", flush=True)


async def _found(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


async def _turns(state: Any) -> float:
    return -float(state["guesses"])


def conversation() -> vf.Environment:
    """At most four turns: 1 for the number, less a tenth for each wrong guess."""
    rows = [{"question": "Guess my number, from 1 to 9.", "answer": str(n)} for n in range(1, 10)]
    rubric = vf.Rubric(funcs=[_found, _turns], weights=[1.0, 0.1])
    return Guess(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=4)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the one
        b: the other
    """
    return a + b


def lookup(word: str) -> str:
    """Looks a word up."""
    raise KeyError(f"no {word} here")


def tools() -> vf.Environment:
    """Tools, and an answer without one."""
    rubric = vf.Rubric(funcs=[_exact])
    return vf.ToolEnv(tools=[add, lookup], max_turns=5, dataset=Dataset.from_list(SUMS), rubric=rubric)


# ---------------------------------------------------------------------------------------------- that are refused


def _spread(completions: Any) -> list[float]:
    return [0.0 for _ in completions]


def _with(prompt: list[dict[str, Any]] | None = None, funcs: Any = (_length,), **more: Any) -> vf.Environment:
    rows = [{"prompt": prompt, "answer": ""}] * 3 if prompt else SUMS
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=list(funcs)), **more)


def group() -> vf.Environment:
    return _with(funcs=[_length, _spread])


def several() -> vf.Environment:
    """The group's reward is in one of an EnvGroup's environments, in one of a RubricGroup's rubrics."""
    inner = _with()
    inner.rubric = vf.RubricGroup([inner.rubric, vf.Rubric(funcs=[_spread])])
    return vf.EnvGroup([_with(), inner], env_names=["plain", "grouped"])


def logprobs() -> vf.Environment:
    return _with(sampling_args={"logprobs": True})


def picture() -> vf.Environment:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    return _with([{"role": "user", "content": [image]}])


def shots() -> vf.Environment:
    said = [("user", "1 + 1?"), ("assistant", "2"), ("user", "1 + 2?")]
    return _with([{"role": role, "content": content} for role, content in said])


def one_row() -> vf.Environment:
    return vf.SingleTurnEnv(dataset=Dataset.from_list(SUMS[:1]), rubric=vf.Rubric(funcs=[_length]))


class Unset(vf.SingleTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        raise RuntimeError("no browser found")


def broken() -> vf.Environment:
    return Unset(dataset=Dataset.from_list(SUMS), rubric=vf.Rubric(funcs=[_length]))


class Forgets(Guess):
    async def get_prompt_messages(self, state: Any) -> Any:
        found = await super().get_prompt_messages(state)
        return found[-1:]


def forgets() -> vf.Environment:
    """Not refused at the start: it shows in the second turn alone."""
    rows = [{"question": "Guess.", "answer": "5"}] * 2
    return Forgets(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[_found]), max_turns=4)


SERVED = (single, letters, mixed, conversation, tools, forgets)
REFUSED = (group, several, logprobs, picture, shots, one_row, broken)
KINDS = {made.__name__: made for made in (*SERVED, *REFUSED)}
