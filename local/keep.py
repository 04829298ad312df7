"""Keeps one program running: what a kubelet does for a pod's container, for the demo's processes.

    python -m local.keep -- PROGRAM ARGUMENT...

The program is started again when it ends in any way but with status 0; the pause before that doubles from 1 s to 30 s
and starts anew once the program has run for a minute. SIGTERM is passed on, and ends both. The program dies with its
keeper, however that ends.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from types import FrameType

from local.process import dying_with_parent

FIRST_PAUSE, LAST_PAUSE, STEADY_SECONDS = 1.0, 30.0, 60.0


def keep(command: Sequence[str]) -> int:
    """Runs until SIGTERM or a status of 0; returns the program's last status (0 after SIGTERM)."""
    stopping = threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()
        if child is not None:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    pause = FIRST_PAUSE
    while True:
        started = time.monotonic()
        child = subprocess.Popen(dying_with_parent(command))  # noqa: S603
        if stopping.is_set():
            child.terminate()  # the signal came before there was a child to pass it on to
        _say(f"started pid {child.pid}: {command[0]}")
        status = child.wait()
        _say(f"pid {child.pid} ended with status {status}")
        if stopping.is_set() or status == 0:
            return 0
        pause = FIRST_PAUSE if time.monotonic() - started > STEADY_SECONDS else min(LAST_PAUSE, pause * 2)
        if stopping.wait(pause):
            return 0


def _say(message: str) -> None:
    print(f"{datetime.now(UTC).isoformat(timespec='seconds')} keep: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] != "--":
        sys.exit("usage: python -m local.keep -- PROGRAM ARGUMENT...")
    sys.exit(keep(sys.argv[2:]))
