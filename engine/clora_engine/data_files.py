"""Rows of a file, JSON Lines (one object a line) or Parquet (data_parquet.py). What they hold is not looked at here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from clora_engine import data_rows
from clora_engine.data_parquet import parse_parquet
from clora_engine.data_rows import Numbered, Room, RowError, bad_data

FORMATS = (".jsonl", ".parquet")


def parse_lines(lines: Iterable[bytes]) -> Numbered:
    """JSON Lines; empty lines are passed over. Raises RowError."""
    room = Room()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        room.take(f"line {number}", line)
        try:
            yield f"line {number}", msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise RowError(f"line {number}: no JSON object: {error}") from None
        except RecursionError:
            raise RowError(f"line {number}: no JSON object: nested too deeply") from None


def read_file(path: Path, root: Path, label: str, suffix: str) -> Numbered:
    """The rows of a file below `root` whose name ends in `suffix`, .jsonl or .parquet. Links are followed before it is
    decided whether the file is there. `label` stands for its path in errors. Raises UserError (field `data`), RowError.
    """
    if suffix not in FORMATS:
        raise bad_data(f"{label} is neither .jsonl nor .parquet: convert it to JSON Lines, one row a line")
    try:
        path, root = path.resolve(), root.resolve()
        if not path.is_relative_to(root):
            raise bad_data(f"{label} is not within its volume")
        if not path.is_file():
            raise bad_data(f"{label} does not exist or is no file")
        if path.stat().st_size > data_rows.MAX_FILE_BYTES:
            raise bad_data(f"{label} is larger than {data_rows.MAX_FILE_BYTES >> 20} MiB; split it")
        return parse_parquet(path, label) if suffix == ".parquet" else parse_lines(path.read_bytes().splitlines())
    except OSError as error:
        raise bad_data(f"{label} cannot be read: {error.strerror}") from None
    except (RuntimeError, ValueError):  # a link to itself, a zero byte
        raise bad_data(f"{label} is no path that can be followed") from None
