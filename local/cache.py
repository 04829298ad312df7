"""Where built and downloaded programs are kept between runs, one builder at a time.

`CLORA_CACHE_DIR` (default `~/.cache/clora`) can be deleted at any time; what is missing is made again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
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


def made_once(folder: Path, what: str, make: Callable[[Path], None]) -> Path:
    """`folder`; where it is missing, what `make` puts into the folder that it is given, once that is whole. While
    another process makes it, it is waited for, not made again."""
    with exclusive(folder.with_suffix(".lock"), what):
        if not folder.is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


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


def pinned_environment(folder: Path, requirements: Path, base: str) -> Path:
    """The interpreter of a Python environment at `folder`, made from a hash-pinned file where it is not there yet.

    Args:
        base: the Python that it is an environment of.
    """
    python = folder / "bin" / "python"
    with exclusive(folder.with_name(folder.name + ".lock"), f"the environment {folder.name}"):
        if not (folder / ".installed").exists():
            say(f"installing {requirements.name}")
            shutil.rmtree(folder, ignore_errors=True)
            pinned = ["--no-deps", "--require-hashes", "-r", str(requirements)]
            if uv := working_uv():
                _call([uv, "venv", "--quiet", "--python", base, str(folder)])
                _call([uv, "pip", "install", "--quiet", "--python", str(python), *pinned])
            else:
                _call([base, "-m", "venv", str(folder)])
                _call([str(python), "-m", "pip", "install", "--quiet", *pinned])
            (folder / ".installed").touch()
    return python


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise LocalClusterError(f"{' '.join(command[:3])} failed:\n{done.stderr.strip()}")


def working_uv() -> str | None:
    """The one on the PATH, or else the one that local/install.sh has fetched. A version manager may have put a `uv` on
    the PATH that only says which Python lacks it."""
    fetched = cache_dir() / "uv-tool" / "bin" / "uv"
    for uv in (shutil.which("uv"), str(fetched) if fetched.exists() else None):
        if uv and subprocess.run([uv, "--version"], capture_output=True, check=False).returncode == 0:  # noqa: S603
            return uv
    return None
