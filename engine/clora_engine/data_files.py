"""Rows of a file: JSON Lines or Parquet, on a data volume or on the hub. What a row must hold is not known here.

JSON Lines is one object a line. Parquet is read with pyarrow (the extra `parquet`); values that JSON does not know
become text: dates in ISO 8601, decimals as they are written, bytes in base64. Left out: whole data sets of the hub with
their configurations and scripts. A file of a repository at a revision is named, so that a resumed run sees the same
rows; it is asked for without a token, and so only public ones are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# what its HTTP library raises; which library that is differs between its releases
from huggingface_hub.errors import HTTPError as HubHTTPError  # type: ignore[attr-defined]

from clora_engine.errors import TransientError, UserError

MAX_FILE_BYTES = 256 << 20  # rows are held in memory, decoded
FORMATS = (".jsonl", ".parquet")
HUB_SECONDS = 5.0  # the hub has to answer within; the operator waits for the admission's answer


class RowError(ValueError):
    """A row that cannot be read; the message starts with where it is: `line 3: ...`."""


Numbered = Iterator[tuple[str, dict[str, Any]]]
"""Rows, each with where it stands: `line 3` (from 1, empty lines counted), or `row 3` of a Parquet file."""


def parse_lines(lines: Iterable[bytes]) -> Numbered:
    """JSON Lines; empty lines are passed over. Raises RowError."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise RowError(f"line {number}: no JSON object: {error}") from None
        except RecursionError:
            raise RowError(f"line {number}: no JSON object: nested too deeply") from None


def read_file(path: Path, label: str, suffix: str) -> Numbered:
    """The rows of a file whose name ends in `suffix`, .jsonl or .parquet. `label` stands for its path in errors. Raises
    UserError (field `data`), RowError."""
    if suffix not in FORMATS:
        raise bad_data(f"{label} is neither .jsonl nor .parquet: convert it to JSON Lines, one row a line")
    if not path.is_file():
        raise bad_data(f"{label} does not exist or is no file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise bad_data(f"{label} is larger than {MAX_FILE_BYTES >> 20} MiB; split it")
    if suffix == ".parquet":
        return _parse_parquet(path, label)
    try:
        return parse_lines(path.read_bytes().splitlines())
    except OSError as error:
        raise bad_data(f"{label} cannot be read: {error.strerror}") from None


def _parse_parquet(path: Path, label: str) -> Numbered:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise bad_data(
            f"{label}: this engine reads no Parquet (pyarrow is missing); convert it to JSON Lines"
        ) from None
    number, size = 0, 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                size += batch.nbytes
                if size > MAX_FILE_BYTES:
                    raise bad_data(f"{label} is larger than {MAX_FILE_BYTES >> 20} MiB when it is unpacked; split it")
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", msgspec.to_builtins(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise bad_data(f"{label} is no Parquet file that can be read: {str(error)[:200]}") from None


def from_hub(repo: str, file: str, revision: str, *, endpoint: str | None = None, cache: Path | None = None) -> Path:
    """The local path of a file in a data set's repository; downloaded once, then taken from the cache. Blocking.

    Raises:
        UserError: no such repository, revision or file, a private one, a file that is too large, or one that is not in
        the cache of an engine that works offline. TransientError: the hub does not answer.
    """
    label = hub_label(repo, file, revision)
    found = try_to_load_from_cache(repo, file, revision=revision, repo_type="dataset", cache_dir=cache)
    if isinstance(found, str):
        return Path(found)
    if constants.HF_HUB_OFFLINE:
        raise bad_data(f"{label} is not in the cache of this engine, which works offline: put it into a dataVolume")
    where: dict[str, Any] = {"repo_id": repo, "filename": file, "revision": revision, "repo_type": "dataset"}
    how: dict[str, Any] = {"endpoint": endpoint, "cache_dir": cache, "token": False, "etag_timeout": HUB_SECONDS}
    try:
        size = hf_hub_download(**where, **how, dry_run=True).file_size
        if size > MAX_FILE_BYTES:
            raise bad_data(f"{label} is larger than {MAX_FILE_BYTES >> 20} MiB; split it")
        return Path(hf_hub_download(**where, **how))
    except LocalEntryNotFoundError:  # of the cache, after the hub could not be asked
        raise TransientError(f"the hub cannot be reached for {label}; a file in a dataVolume needs no hub") from None
    except GatedRepoError:
        raise bad_data(f"{label} is gated: put it into a dataVolume") from None
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError):
        raise bad_data(f"{label} does not exist on the hub, or is private: put it into a dataVolume") from None
    except (HubHTTPError, OSError) as error:
        raise TransientError(f"the hub does not give {label} now: {type(error).__name__}") from None


def hub_label(repo: str, file: str, revision: str) -> str:
    return f"{file} of {repo} at {revision}"


def bad_data(message: str) -> UserError:
    return UserError(message, reason="InvalidData", field="data")
