"""Rows of a Parquet file, by pyarrow (the extra `parquet`), whatever its author packed into it.

A few hundred bytes of Parquet can stand for gigabytes: one value that all rows repeat. Texts are therefore read as
references into a dictionary, and what they will take is counted before they are expanded. Values that JSON does not
know become text: dates in ISO 8601, to the microsecond, decimals as they are written, bytes in base64; a number that is
not finite becomes null.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from clora_engine import data_rows
from clora_engine.data_rows import Numbered, Room, RowError, bad_data

MAX_COLUMNS = 1024
BATCH_ROWS = 1024


def parse_parquet(path: Path, label: str) -> Numbered:
    """The rows. Raises UserError (field `data`), RowError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise bad_data(
            f"{label}: this engine reads no Parquet (pyarrow is missing); convert it to JSON Lines"
        ) from None
    number, size, room = 0, 0, Room()
    try:
        with parquet.ParquetFile(path) as file:
            texts = _check_columns(file, label)
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                size += sum(map(_expanded_bytes, batch.columns))
                if size > data_rows.MAX_FILE_BYTES:
                    limit = data_rows.MAX_FILE_BYTES >> 20
                    raise bad_data(f"{label} is larger than {limit} MiB when it is unpacked; split it")
                for encoded in _as_json(batch, number):
                    number += 1
                    room.take(f"row {number}", encoded)
                    yield f"row {number}", msgspec.json.decode(encoded)
    except (pyarrow.ArrowException, OSError) as error:
        raise bad_data(f"{label} is no Parquet file that can be read: {str(error)[:200]}") from None


def _check_columns(file: Any, label: str) -> list[str]:
    """The paths of the columns that hold texts or bytes. Raises UserError."""
    metadata = file.metadata
    if metadata.num_columns > MAX_COLUMNS:
        raise bad_data(f"{label} has more than {MAX_COLUMNS} columns; leave out what is not needed")
    names = file.schema_arrow.names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise bad_data(f"{label} has two columns {twice[:100]!r}; rename one")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    values = sum(group.column(i).num_values for group in groups for i in range(metadata.num_columns))
    if values * 8 > data_rows.MAX_FILE_BYTES:
        raise bad_data(f"{label} holds {values} values, more than {data_rows.MAX_FILE_BYTES // 8}; split it")
    columns = [file.schema.column(i) for i in range(metadata.num_columns)]
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _expanded_bytes(array: Any) -> int:
    """Bytes of an Arrow array whose dictionaries are replaced by what they refer to."""
    import pyarrow
    from pyarrow import compute, types

    kind = array.type
    if types.is_dictionary(kind):
        if not (types.is_binary(kind.value_type) or types.is_string(kind.value_type)):
            return int(array.nbytes + 8 * len(array))
        lengths = compute.binary_length(array.dictionary).cast(pyarrow.int64()).take(array.indices)
        return 8 * len(array) + int(compute.sum(lengths).as_py() or 0)
    if types.is_map(kind):
        return 8 * len(array) + _expanded_bytes(array.keys) + _expanded_bytes(array.items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 8 * len(array) + _expanded_bytes(array.flatten())
    if types.is_struct(kind):
        return sum(_expanded_bytes(array.field(i)) for i in range(kind.num_fields))
    return int(array.nbytes)


def _as_json(batch: Any, before: int) -> Iterator[bytes]:
    """The rows of a batch, of which `before` rows came before. Raises RowError."""
    batch = _to_microseconds(batch)
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except Exception:  # Python has no value for one of them, for as many reasons as there are types: found below
        rows = None
    for i in range(batch.num_rows):
        try:
            row = batch.slice(i, 1).to_pylist(maps_as_pydicts="strict")[0] if rows is None else rows[i]
            encoded = msgspec.json.encode(row)
        except Exception as error:
            raise RowError(f"row {before + i + 1}: {type(error).__name__}: {str(error)[:200]}") from None
        yield encoded


def _to_microseconds(batch: Any) -> Any:
    """Python's times end there."""
    import pyarrow
    from pyarrow import types

    for i, field in enumerate(batch.schema):
        if types.is_timestamp(field.type) and field.type.unit == "ns":
            kind = pyarrow.timestamp("us", field.type.tz)
        elif types.is_time64(field.type) and field.type.unit == "ns":
            kind = pyarrow.time64("us")
        elif types.is_duration(field.type) and field.type.unit == "ns":
            kind = pyarrow.duration("us")
        else:
            continue
        batch = batch.set_column(i, field.name, batch.column(i).cast(kind, safe=False))
    return batch
