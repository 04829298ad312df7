"""What clora and a user's own environment say to each other over HTTP: version 1, four requests with JSON bodies.

    GET  <url>/v1/environment   -> Description       once per experiment, before it is accepted
    POST <url>/v1/reset   Reset -> FirstMessages     begins an episode
    POST <url>/v1/step    Step  -> Turn              answers one turn of the model
    POST <url>/v1/close   Close -> any JSON, ignored the episode is over, however it ended

Every POST carries the header Idempotency-Key, one value for each request and the same when it is tried again: a server
that has answered a key already gives the same answer. Whatever a server says beyond these fields is ignored. Models are
strict: a number is no text. docs/environments.md holds the same as OpenAPI for those who write servers.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.alias_generators import to_camel

PROTOCOL = 1
MAX_MESSAGES = 64
MAX_REWARD = 1e6


class Wire(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", strict=True, frozen=True)


# ------------------------------------------------------------------------------------ what clora sends


class Call(Wire):
    """A tool call as the model wrote it: its arguments are not checked against the tool's parameters."""

    name: str
    arguments: dict[str, Any]


class ModelTurn(Wire):
    """A turn of the model. With `parse_error` it is no well-formed call: `content` is then its raw text."""

    content: str
    tool_calls: list[Call] = []
    parse_error: str = ""


class Reset(Wire):
    """`episode` names the episode in all later requests; `example` is a row of the experiment's data."""

    episode: str
    example: dict[str, JsonValue]


class Step(Wire):
    """`turn` counts the model's turns from 1."""

    episode: str
    turn: int
    message: ModelTurn


class Close(Wire):
    episode: str


# ------------------------------------------------------------------------------------ what the environment answers


class JsonSchema(Wire):
    """The JSON schema of a tool's parameters; keywords beyond these go to the model as they are."""

    model_config = ConfigDict(extra="allow")

    type: Literal["object"]
    properties: dict[str, dict[str, JsonValue]] = {}


class ToolDescription(Wire):
    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")
    description: str = Field("", max_length=4096)
    parameters: JsonSchema


class Description(Wire):
    """`required_fields`: keys that a row of data must have. `generates`: it makes its own examples, so that
    `data.builtin: Generated` works; a row then is {"seed", "split", "index"}, and the same row is the same episode."""

    protocol: Literal[1]
    tools: list[ToolDescription] = Field([], max_length=32)
    required_fields: list[str] = Field([], max_length=64)
    generates: bool = False

    @model_validator(mode="after")
    def _tools_differ(self) -> Description:
        names = [tool.name for tool in self.tools]
        if twice := next((i for i, name in enumerate(names) if name in names[:i]), None):
            raise ValueError(f"tools.{twice}.name: there is a tool {names[twice]} already")
        for i, tool in enumerate(self.tools):
            try:
                json.dumps(tool.parameters.model_dump(), allow_nan=False)
            except ValueError:
                raise ValueError(f"tools.{i}.parameters: holds a number that is not finite") from None
        return self


class FirstMessage(Wire):
    role: Literal["system", "user"]
    content: str


class FirstMessages(Wire):
    messages: list[FirstMessage] = Field(min_length=1, max_length=MAX_MESSAGES)


class AnswerMessage(Wire):
    """`name`: of the tool whose answer it is."""

    role: Literal["user", "tool"]
    content: str
    name: str = Field("", max_length=64)


class Turn(Wire):
    """`reward` is added to the episode's. `tool_errors`: calls of this turn that were answered with an error."""

    messages: list[AnswerMessage] = Field([], max_length=MAX_MESSAGES)
    reward: Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)] = 0.0
    done: bool = False
    tool_errors: int = Field(0, ge=0, le=1024)

    @model_validator(mode="after")
    def _goes_on(self) -> Turn:
        if not self.done and not self.messages:
            raise ValueError("an episode that is not done needs messages for the model")
        return self
