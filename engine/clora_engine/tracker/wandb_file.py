"""Reading the file in which W&B keeps an offline run (run-*.wandb); its library writes it and no longer reads it.

A header (":W&B", magic, version), then LevelDB's log format: blocks of 32 KiB, in them records, whole or in parts, each
with a checksum, its length and its kind. A record is a protocol buffer of the library's own. What is torn, by a kill or
because it is being written, ends the file.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER = struct.Struct("<4sHB")
_RECORD = struct.Struct("<IHB")
_BLOCK = 1 << 15
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def history(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The steps of a run in the order in which they were logged, each with its values by name."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _records(path.read_bytes()):
        record: Any = Record.FromString(data)
        if record.HasField("history"):
            row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            values = {name: value for name, value in row.items() if not name.startswith("_")}
            yield int(row.get("_step", record.history.step.num)), values


def _records(data: bytes) -> Iterator[bytes]:
    if len(data) < _HEADER.size or data[:4] != b":W&B":
        return
    at, parts = _HEADER.size, b""
    while True:
        left = _BLOCK - at % _BLOCK
        if left < _RECORD.size:
            at += left  # the block's end is filled up
        if at + _RECORD.size > len(data):
            return
        checksum, length, kind = _RECORD.unpack_from(data, at)
        start = at + _RECORD.size
        body, at = data[start : start + length], start + length
        if len(body) < length or zlib.crc32(bytes([kind]) + body) != checksum:
            return
        parts = body if kind in (_FULL, _FIRST) else parts + body
        if kind in (_FULL, _LAST):
            yield parts
