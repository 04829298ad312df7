"""Where built and downloaded programs are kept between runs, one builder at a time.

`CLORA_CACHE_DIR` (default `~/.cache/clora`) can be deleted at any time; what is missing is made again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


class LocalClusterError(Exception):
    """Something the user can mend; the message says how."""


def say(message: str) -> None:
    """Progress is for people and goes to stderr: stdout carries only the answer."""
    print(message, file=sys.stderr, flush=True)


def cache_dir() -> Path:
    configured = os.environ.get("CLORA_CACHE_DIR")
    return Path(configured).absolute() if configured else Path.home() / ".cache" / "clora"


@contextmanager
def exclusive(lock_file: Path, waiting_for: str) -> Iterator[None]:
    """Holds `lock_file`; a second caller waits and says for what. The kernel frees it when its holder dies."""
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for {waiting_for}, which another process is at")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def install_pinned(requirements: Path, target: Path) -> None:
    """Installs a hash-pinned requirements file, without dependencies, into the folder `target`.

    Uses uv where it is, else pip; both refuse a file whose hash is not the one written down.
    """
    uv = working_uv()
    installer = [uv, "pip", "install", "--quiet"] if uv else [sys.executable, "-m", "pip", "install", "--quiet"]
    command = [*installer, "--no-deps", "--require-hashes", "--target", str(target), "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise LocalClusterError(f"cannot install {requirements.name} ({' '.join(installer)}):\n{done.stderr.strip()}")


def working_uv() -> str | None:
    """A version manager may have put a `uv` on the PATH that only says which Python lacks it."""
    uv = shutil.which("uv")
    works = uv and subprocess.run([uv, "--version"], capture_output=True, check=False).returncode == 0  # noqa: S603
    return uv if works else None
