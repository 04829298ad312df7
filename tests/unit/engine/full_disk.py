"""A process of the durability tests whose storage is a file system of a few megabytes, full at a chosen moment."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
from pathlib import Path
from typing import Any

from clora_engine import journal
from clora_engine.journal import Journal
from tests.unit.engine.durable_run import SPEC
from tests.unit.engine.loop import Life, LocalTrainer, desired

CLONE_NEWNS, CLONE_NEWUSER, MS_PRIVATE_REC = 0x00020000, 0x10000000, 0x44000
MOMENTS: dict[str, tuple[Any, str]] = {
    "a group is logged": (Journal, "append_group"),
    "a step is saved": (LocalTrainer, "save"),
    "a manifest is written": (journal, "write_atomic"),
}


def live(storage: str, outside: str, moment: str) -> None:
    """One life. The disk is full from the third write of `moment`'s kind until the experiment has said so. What is left
    is copied to `outside`, with what was said in `said`."""
    _mount(storage)
    folder = Path(storage)
    balloon = folder / "balloon"
    life = Life(folder, desired(**SPEC))
    life.experiment._patience._retry_seconds = 0.0
    said: list[str] = []

    def changed() -> None:
        report = life.experiment.report(0)
        if report.reason == "StorageFull" and balloon.exists():
            said.append(f"{report.phase} {report.message}")
            balloon.unlink()

    life.experiment._changed = changed
    _fill_before(*MOMENTS[moment], balloon)
    experiment = asyncio.run(life.run())
    assert experiment.phase.value == "Succeeded", experiment.report(0)
    assert experiment.report(0).reason == ""
    shutil.copytree(folder, outside, dirs_exist_ok=True)
    Path(outside, "said").write_text("\n".join(said))


def _mount(storage: str) -> None:
    """A small file system that this process alone sees. This process must have one thread."""
    user, group, libc = os.getuid(), os.getgid(), ctypes.CDLL(None, use_errno=True)

    def call(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    call(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    call(libc.mount(b"none", b"/", None, MS_PRIVATE_REC, None))
    call(libc.mount(b"tmpfs", storage.encode(), b"tmpfs", 0, b"size=4m"))


def _fill_before(owner: Any, name: str, balloon: Path) -> None:
    original, calls = getattr(owner, name), 0

    def fill() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            with balloon.open("wb", buffering=0) as file:
                try:
                    while file.write(b"\0" * 4096):
                        pass
                except OSError:
                    return

    if asyncio.iscoroutinefunction(original):

        async def wrapped(*args: Any, **options: Any) -> Any:
            fill()
            return await original(*args, **options)

    else:

        def wrapped(*args: Any, **options: Any) -> Any:  # type: ignore[misc]
            fill()
            return original(*args, **options)

    setattr(owner, name, wrapped)
