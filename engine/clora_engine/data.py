"""Where examples come from, and in which order.

A position is all that a run remembers of its data: position -> example is a pure function, so that a commit needs one
integer to be resumed from. A finite set of rows is gone through again and again, each time in another order that
depends only on the seed and the round; generated data is endless.

Formats: JSON Lines, as text (a ConfigMap's) or as a file, and Parquet files (data_files.py); files lie on a volume or
on the hub (data_hub.py). A row is either what the
experiment's environment takes (`question` and `answer`, say) or, for supervised training, a chat:
`{"messages": [{"role": ..., "content": ...}, ...]}`. In a chat the assistant's content is all that it writes, tool
calls included; it is trained on with the environment's tools declared, as they are in an episode.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from clora_engine.data_files import parse_lines, read_file
from clora_engine.data_hub import from_hub, hub_label, hub_root
from clora_engine.data_rows import Numbered, RowError, bad_data
from clora_engine.environments.protocol import EnvironmentFactory, Example, Generates, Message
from clora_engine.errors import UserError

# --------------------------------------------------------------------------------------------- sources


@dataclass(frozen=True, slots=True)
class Builtin:
    """`Generated`: the environment makes its own examples. `GSM8KSample`: a few rows of GSM8K, shipped with clora."""

    name: Literal["Generated", "GSM8KSample"]


@dataclass(frozen=True, slots=True)
class Inline:
    """JSON Lines as text; `label` names it in errors ("ConfigMap problems, key train.jsonl")."""

    text: str
    label: str


@dataclass(frozen=True, slots=True)
class File:
    """A file below `root`, the folder that its experiment may read; `label` names it in errors instead of its path on
    the engine. `held_out`: a file of rows to evaluate on, with a label of its own."""

    path: Path
    root: Path
    label: str
    held_out: File | None = None


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a data set's repository on the hub, and one of rows to evaluate on."""

    repo: str
    revision: str
    file: str
    held_out: str | None = None


Source = Builtin | Inline | File | HubFile


# --------------------------------------------------------------------------------------------- order


class Dataset(Protocol):
    """Examples by position, from 0 without end."""

    @property
    def size(self) -> int | None:
        """Rows of one round; None if there is no end of new ones."""
        ...

    def example(self, position: int) -> Example: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Finite rows, each once in every round of `size` positions, in an order of the round's own."""

    rows: Sequence[Example]
    seed: int

    @property
    def size(self) -> int:
        return len(self.rows)

    def example(self, position: int) -> Example:
        round_, place = divmod(position, len(self.rows))
        return self.rows[permutation(len(self.rows), self.seed, round_)[place]]


@dataclass(frozen=True, slots=True)
class Generated:
    """Examples that an environment makes."""

    maker: Generates
    seed: int

    @property
    def size(self) -> None:
        return None

    def example(self, position: int) -> Example:
        return self.maker.generate(self.seed, "train", position)


@lru_cache(maxsize=16)
def permutation(size: int, seed: int, round_: int) -> tuple[int, ...]:
    """A permutation of range(size), a pure function of its arguments.

    It sorts by keys from `random.Random.random`, the one sequence that Python promises to keep from version to version;
    `shuffle` has no such promise, and a run may be resumed under a newer Python.
    """
    rng = random.Random(f"{seed}/{round_}")  # noqa: S311 - no secret
    keys = [rng.random() for _ in range(size)]
    return tuple(sorted(range(size), key=keys.__getitem__))


# --------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True, slots=True)
class Data:
    """What an experiment trains on, and the examples that it is evaluated on and never trained on."""

    train: Dataset
    held_out: Sequence[Example]


def load(source: Source, factory: EnvironmentFactory, *, seed: int, held_out: int = 0, chat: bool = False) -> Data:
    """Reads and checks a source. A large file takes seconds: call it in a thread.

    Args:
        factory: the experiment's environment, which checks every row.
        seed: of the order, of generated examples, and of the choice of held-out rows.
        held_out: number of examples to evaluate on. Generated data, GSM8KSample and files with a held-out file have a
            split of their own for them; of other data, that many rows are set aside.
        chat: supervised training: rows may be chats too.

    Raises:
        UserError: with field `data` (`evaluation.examples` if too few rows are left), naming source and line.
        TransientError: the hub does not answer.
    """
    if isinstance(source, Builtin):
        return _builtin(source, factory, seed, held_out)
    if isinstance(source, HubFile):
        source = _downloaded(source, with_held_out=held_out > 0)
    if isinstance(source, Inline):
        lines = source.text.encode(errors="surrogatepass").splitlines()
        rows = _checked(parse_lines(lines), source.label, factory, chat)
    else:
        rows = _checked(_read(source), source.label, factory, chat)
        if source.held_out is not None and held_out:
            return Data(Rows(rows, seed), _held_out_rows(source.held_out, factory, held_out))
    if held_out >= len(rows):
        raise _too_few(held_out, f"{source.label} has {len(rows)} rows, of which at least one must be left to train on")
    # The choice must not change with the order of training: it has a permutation of its own.
    chosen = permutation(len(rows), seed, -1)[:held_out]
    if chat:
        _check_playable([rows[i] for i in chosen], source.label, factory)
    aside = set(chosen)
    return Data(Rows([row for i, row in enumerate(rows) if i not in aside], seed), [rows[i] for i in chosen])


def demonstration(example: Example, factory: EnvironmentFactory) -> Sequence[Message]:
    """The conversation to imitate: a chat row's own, otherwise the environment's. Raises ValueError if it has none."""
    if "messages" in example:
        return [Message(message["role"], message["content"]) for message in example["messages"]]
    return factory.demonstration(example)


def _builtin(source: Builtin, factory: EnvironmentFactory, seed: int, held_out: int) -> Data:
    if source.name == "Generated":
        if not isinstance(factory, Generates):
            raise bad_data("this environment generates no examples; give a file, a ConfigMap or another builtin")
        # Held-out examples do not depend on the seed: runs with different seeds are measured on the same ones.
        return Data(Generated(factory, seed), [factory.generate(0, "test", index) for index in range(held_out)])
    folder = resources.files("clora_engine.environments") / "gsm8k_sample"
    train, test = (
        _checked(
            parse_lines((folder / f"{split}.jsonl").read_bytes().splitlines()), f"GSM8KSample ({split})", factory, False
        )
        for split in ("train", "test")
    )
    if held_out > len(test):
        raise _too_few(held_out, f"GSM8KSample has {len(test)} test rows")
    return Data(Rows(train, seed), test[:held_out])


def _downloaded(source: HubFile, *, with_held_out: bool) -> File:
    def local(name: str) -> File:
        path = from_hub(source.repo, name, source.revision)
        return File(path, hub_root(source.repo), hub_label(source.repo, name, source.revision))

    train = local(source.file)
    wanted = source.held_out is not None and with_held_out
    return replace(train, held_out=local(source.held_out)) if wanted and source.held_out else train


def _read(source: File) -> Numbered:
    return read_file(source.path, source.root, source.label, source.path.suffix)


def _held_out_rows(source: File, factory: EnvironmentFactory, count: int) -> list[Example]:
    """Rows to evaluate on; which ones does not depend on the seed: runs are measured on the same ones."""
    rows = _checked(_read(source), source.label, factory, chat=False)
    if count > len(rows):
        raise _too_few(count, f"{source.label} has {len(rows)} rows")
    return [rows[i] for i in permutation(len(rows), 0, -1)[:count]]


def _check_playable(rows: Sequence[Example], label: str, factory: EnvironmentFactory) -> None:
    """Rows to evaluate on are played in the environment, which a chat alone is not enough for."""
    for row in rows:
        try:
            factory.check(row)
        except ValueError as error:
            raise UserError(
                f"{label}: rows of chats are set aside to evaluate on, and the environment cannot play them: {error}."
                " Give a held-out file of rows for it, add its fields to the chats, or set evaluation.examples to 0",
                reason="InvalidData",
                field="evaluation.examples",
            ) from None


class _ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


def _checked(numbered: Numbered, label: str, factory: EnvironmentFactory, chat: bool) -> list[Example]:
    rows: list[Example] = []
    try:
        for where, row in numbered:
            try:
                if chat and "messages" in row:
                    _check_chat(row["messages"])
                else:
                    factory.check(row)
            except ValueError as error:
                raise bad_data(f"{label}, {where}: {error}") from None
            rows.append(row)
    except RowError as error:
        raise bad_data(f"{label}, {error}") from None
    if not rows:
        raise bad_data(f"{label} holds no rows")
    return rows


def _check_chat(messages: Any) -> None:
    try:
        found = msgspec.convert(messages, list[_ChatMessage])
    except msgspec.ValidationError as error:
        raise ValueError(f"'messages': {error}") from None
    roles = [message.role for message in found]
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if len(spoken) < 2 or spoken[0] != "user" or spoken[-1] != "assistant":
        raise ValueError(
            "'messages' must start with the user (one system message may precede) and end with the assistant"
        )


def _too_few(held_out: int, available: str) -> UserError:
    return UserError(
        f"{held_out} examples to evaluate on, but {available}", reason="InvalidData", field="evaluation.examples"
    )
