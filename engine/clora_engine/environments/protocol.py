"""The protocol between an episode and its environment: messages in, messages and a reward out.

An environment sees messages, never tokens, and knows no model: the Renderer of clora_engine.chat turns one into the
other. One instance lives for one episode; a factory, made once per experiment from its checked arguments, makes them
and knows what all its episodes share: the tools, and what a row of data must hold. What runs foreign code, that of the
verifiers library too, is a container that http.py asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "test"]

Example = Mapping[str, Any]
"""One row of data as decoded JSON. Which keys it must have is the factory's to say (`check`)."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it: nothing in `arguments` has been checked against the tool's schema."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `parse_error` says why a model's turn is no call in the model's tool format; the
    content is then the turn's raw text and `tool_calls` is empty. `name` is that of the tool whose answer a message is;
    some templates print it."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    parse_error: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A declaration: `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a turn led to. `messages` go to the model before its next turn and are empty when `done`. The rewards of an
    episode's steps are added up. `tool_errors` counts the calls of this turn that were answered with an error."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    tool_errors: int = 0


@runtime_checkable
class Generates(Protocol):
    """A factory whose environment makes its own examples, without end."""

    def generate(self, seed: int, split: Split, index: int) -> Example:
        """Example `index` of a split: a pure function. No example is in both splits, whatever the seeds."""
        ...


class Environment(Protocol):
    """One episode. Any exception but UserError fails this episode alone; a UserError fails the experiment."""

    async def reset(self, example: Example) -> Sequence[Message]:
        """The messages before the model's first turn."""
        ...

    async def step(self, message: Message) -> StepResult:
        """Answers the model's turn. Not called for a turn that was cut off by a token limit: that ends the episode."""
        ...

    async def close(self) -> None:
        """Called once, however the episode ended."""
        ...


class EnvironmentFactory(Protocol):
    """What the episodes of one experiment share, and the maker of each. Stateless, so that concurrent episodes can use
    one."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Declared to the model before its first turn."""
        ...

    def new(self) -> Environment:
        """A fresh instance for one episode."""
        ...

    def check(self, example: Example) -> None:
        """Raises ValueError, saying what is missing or wrong, for a row that this environment cannot use."""
        ...

    def demonstration(self, example: Example) -> Sequence[Message]:
        """A whole conversation that earns the full reward, for supervised training: what `reset` returns, then turns of
        the assistant and the environment's answers, the last from the assistant. Raises ValueError if there is none."""
        ...
