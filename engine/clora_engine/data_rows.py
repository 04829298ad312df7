"""What rows of every format share: how they are numbered, how large they may become, how their errors are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clora_engine.errors import UserError

MAX_FILE_BYTES = 256 << 20
MAX_DECODED_BYTES = 1 << 30  # rows are held in memory, decoded
_VALUE_BYTES = 64  # what a value costs besides its characters: an empty object, for example


class RowError(ValueError):
    """A row that cannot be read; the message starts with where it is: `line 3: ...`."""


Numbered = Iterator[tuple[str, dict[str, Any]]]
"""Rows, each with where it stands: `line 3` (from 1, empty lines counted), or `row 3` of a Parquet file."""


class Room:
    """Counts the memory of rows before they are decoded: two bytes can be an object of 64."""

    def __init__(self) -> None:
        self._left = MAX_DECODED_BYTES

    def take(self, where: str, encoded: bytes) -> None:
        """Room for one row, given as JSON. Raises RowError when there is none left."""
        values = sum(map(encoded.count, (b",", b"[", b"{", b":")))
        self._left -= len(encoded) + _VALUE_BYTES * values
        if self._left < 0:
            raise RowError(f"{where}: rows up to here take more than {MAX_DECODED_BYTES >> 20} MiB of memory; split it")


def bad_data(message: str) -> UserError:
    return UserError(message, reason="InvalidData", field="data")
