"""The folder in which an experiment's trackers keep files when they are offline, as a tar.

Their libraries write there (tracker/), so that nothing in it is believed: links and whatever is neither a file nor a
folder are left out, none is followed, and no other folder is read. Lock files are left out too. Trackio's database is
read while nobody writes it, with what a writer that was killed has left beside it.
"""

from __future__ import annotations

import fcntl
import io
import os
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from clora_engine.errors import CheckpointError

LOCK_SECONDS = 10.0  # a step of Trackio's takes it for milliseconds
LOCKS, DATABASE, JOURNAL = ".lock", ".db", "-journal"
MOST_BYTES = 1 << 30  # a tar lies beside what it holds while it is sent, on the storage of all experiments
SMALL = 1 << 20  # bytes of a file that is read at once: one that is written anew may be shorter than it has just been


def packed(experiment: Path) -> IO[bytes] | None:
    """A tar of `tracking` in an experiment's folder, at its start, in a file without a name on the same storage.

    None where no tracker has kept a file. Raises CheckpointError for more than MOST_BYTES, for a file that becomes
    shorter as it is read, and when a database is being written all the time.
    """
    into: IO[bytes] = tempfile.TemporaryFile(dir=experiment)  # noqa: SIM115 - the caller's
    try:
        with tarfile.open(fileobj=into, mode="w") as tar:
            files = sum(_added(tar, place, folder, names) for place, folder, names in _folders(experiment / "tracking"))
    except BaseException:
        into.close()
        raise
    if not files:
        into.close()
        return None
    into.seek(0)
    return into


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """All of it, and closes it."""
    with file:
        while data := file.read(1 << 18):
            yield data


def _folders(top: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Each folder: its path below `top`, a descriptor of it, and the names in it that are no folders."""
    if not top.exists():
        return
    for path, _, names, folder in os.fwalk(top, follow_symlinks=False):
        yield os.path.relpath(path, top), folder, sorted(names)


def _added(tar: tarfile.TarFile, place: str, folder: int, names: list[str]) -> int:
    """Adds a folder; returns how many files it had."""
    if place != os.curdir:
        member = tarfile.TarInfo(place)
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(member)
    added = 0
    for name in names:
        if name.endswith(DATABASE):
            with _unwritten(folder, name):
                added += _add(tar, place, folder, name)
                _add(tar, place, folder, name + JOURNAL)  # none, or that of a killed writer: it belongs to this state
        elif not name.endswith((LOCKS, DATABASE + JOURNAL)):
            added += _add(tar, place, folder, name)
    return added


def _add(tar: tarfile.TarFile, place: str, folder: int, name: str) -> bool:
    """False for what is no file, or is gone."""
    with suppress(FileNotFoundError), _opened(folder, name) as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode):
            member = tarfile.TarInfo(os.path.normpath(os.path.join(place, name)))
            member.size, member.mtime, member.mode = status.st_size, status.st_mtime, 0o644
            whole: IO[bytes] = file
            if member.size <= SMALL:
                data = file.read(SMALL)
                member.size, whole = len(data), io.BytesIO(data)
            if tar.offset + member.size > MOST_BYTES:
                raise CheckpointError(
                    f"trackers have kept more than {MOST_BYTES >> 20} MiB: take the folder tracking from the engine's"
                    " volume, by kubectl cp"
                )
            try:
                tar.addfile(member, whole)
            except OSError as error:
                if error.errno is not None:  # the system's own: a full disk, say
                    raise
                raise CheckpointError(f"{name} became shorter as it was read: try again") from None
            return True
    return False


@contextmanager
def _opened(folder: int, name: str) -> Iterator[IO[bytes]]:
    """Raises FileNotFoundError for a link, as for what is gone."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:  # ELOOP of a link, ENXIO of a socket
        raise FileNotFoundError(name) from error
    with os.fdopen(descriptor, "rb") as file:
        yield file


@contextmanager
def _unwritten(folder: int, name: str) -> Iterator[None]:
    """While nobody writes p.db: to do so, Trackio takes p.lock."""
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(_opened(folder, name.removesuffix(DATABASE) + LOCKS))
        except FileNotFoundError:  # nobody has ever written it
            yield
            return
        deadline = time.monotonic() + LOCK_SECONDS
        while not _shared(lock):
            if time.monotonic() > deadline:
                raise CheckpointError(f"{name} is being written all the time: try again later")
            time.sleep(0.01)
        yield


def _shared(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
