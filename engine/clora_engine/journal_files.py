"""Writing so that a kill, a full disk or another engine leaves a file as it was: what the journal is made of."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clora_engine.errors import FolderLockedError, StorageFullError

LOCK_SECONDS = 30.0
LOCK_POLL_SECONDS = 0.01


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Raises FolderLockedError when another process holds it for long: a write takes milliseconds, but its process may
    have been stopped in the middle of one. Raises StorageFullError for what is written under it."""
    with room(), path.open("a") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                held = f"{path.parent.name} has been locked for {LOCK_SECONDS:.0f} s"
                raise FolderLockedError(f"{held}: another engine on this volume hangs; end it")
            time.sleep(LOCK_POLL_SECONDS)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def room() -> Iterator[None]:
    """Raises StorageFullError, naming the file, when there is no room for what is written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            name = Path(error.filename).name if error.filename else "a file"
            raise StorageFullError(f"no room for {name}: {error.strerror}") from error
        raise


def append(path: Path, line: bytes) -> None:
    """Adds a line and syncs it: all of the line or, when there is no room for it, nothing."""
    before = path.stat().st_size if path.exists() else 0
    with path.open("ab", buffering=0) as file:
        try:
            written = 0
            while written < len(line):
                written += file.write(line[written:])
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces a file: it holds the old data or the new, whatever happens."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Syncs a file, or the names in a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256(path: Path) -> str:
    """In hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
