"""A process that outlives the command which started it, known by pid and start time, and its end.

A pid alone may be another program's by the time it is signalled; the kernel's start time tells the two apart.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """`start_ticks` is field 22 of /proc/PID/stat: clock ticks from the machine's boot to the start of the process."""

    pid: int
    start_ticks: int

    def alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks

    def signal(self, number: signal.Signals) -> None:
        if self.alive():
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> bool:
        """True once the process has ended, whoever its parent is."""
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)  # not our child in general: there is nothing to wait on
        return True

    def end(self, grace_seconds: float = 10.0) -> None:
        """SIGTERM, then SIGKILL once the grace is over."""
        self.signal(signal.SIGTERM)
        if not self.wait(grace_seconds):
            self.signal(signal.SIGKILL)
            self.wait(10.0)


def start(command: Sequence[str], *, cwd: Path, log: Path, dies_with_parent: bool = False) -> Process:
    """Starts `command` in a session of its own, its output appended to `log`.

    With `dies_with_parent` the kernel kills it when this process ends, however that ends.
    """
    with log.open("ab") as output:
        child = subprocess.Popen(  # noqa: S603
            dying_with_parent(command) if dies_with_parent else command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    child.returncode = 0  # kept by pid: Popen shall neither warn about nor wait for it
    ticks = _start_ticks(child.pid)
    assert ticks is not None, "not reaped: a zombie at worst"
    return Process(child.pid, ticks)


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """`command`, to be started by this process and killed by the kernel when this process ends.

    The shell ends at once where this process was gone before the kernel knew: then nobody would be told.
    """
    check = 'test "$PPID" = "$1" || exit 1; shift; exec "$@"'
    return ["setpriv", "--pdeathsig", "KILL", "--", "/bin/sh", "-c", check, "sh", str(os.getpid()), *command]


def _start_ticks(pid: int) -> int | None:
    """None where no such process runs; a zombie counts as ended, and is reaped if it is ours.

    One with threads has not ended: those of a killed process end one by one, its first perhaps before the others, and
    until the last of them its ports are taken.
    """
    try:
        # the second field, the program's name, may hold spaces and brackets: count from its end
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] == "Z" and fields[17] == "1":
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return None
    return int(fields[19])
