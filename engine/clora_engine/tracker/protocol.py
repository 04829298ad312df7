"""What the engine and a tracker's process say to each other: a JSON object a line, one answer to each order.

    Start -> Sent   what is to be tracked, where; Sent says what the tracker has already
    Upto  -> Sent   the metrics file may be read up to there: its steps are committed, and are never taken back
    End   -> Ended  the experiment leaves the engine
    any   -> Trouble, and the process ends

The end of stdin without End means that the engine is gone.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`folder`: experiments/<uid> in the engine's storage. `config`: the run's configuration, nested. `hosts`: that it
    may connect to, as the engine's --tracking-host. `api_server`: the host of the Kubernetes API server's Service,
    and `nodes`: addresses of the engine's other nodes, which it may not. A new Start with the same uid goes on
    with the same run."""

    kind: str
    online: bool
    uid: str
    project: str
    run_name: str
    entity: str | None
    url: str | None
    key: str | None
    needs_key: bool
    folder: str
    config: dict[str, Any]
    hosts: tuple[str, ...]
    loopback: bool
    api_server: str | None
    nodes: tuple[str, ...]

    def __repr__(self) -> str:
        """Without the key."""
        return f"Start({self.kind} of {self.uid})"


class Upto(msgspec.Struct, frozen=True, tag=True):
    metrics_bytes: int


class End(msgspec.Struct, frozen=True, tag=True):
    """succeeded: None when it may go on later."""

    succeeded: bool | None


class Sent(msgspec.Struct, frozen=True, tag=True):
    """The last step that the tracker has; None before the first."""

    step: int | None


class Ended(msgspec.Struct, frozen=True, tag=True):
    pass


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """A sentence for people, without the key."""

    message: str


Order = Start | Upto | End
Answer = Sent | Ended | Trouble


def line(message: Order | Answer) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def order(data: bytes) -> Order:
    return msgspec.json.decode(data, type=Order)


def answer(data: bytes) -> Answer:
    return msgspec.json.decode(data, type=Answer)
