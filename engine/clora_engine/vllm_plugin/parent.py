"""Ends this process when the engine that started vLLM ends, however it ends.

vLLM's core notices a clean shutdown; after a `kill -9` of the engine it would keep its memory and its devices. A pidfd
is used rather than PR_SET_PDEATHSIG, which fires when the parent's starting *thread* ends, and which the grandchildren
(vLLM's workers) would not get.
"""

from __future__ import annotations

import os
import select
import signal
import threading


def end_with(pid: int) -> None:
    """Start a daemon thread that kills this process (SIGKILL) as soon as process `pid` has ended. Linux only."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        _end()
        return
    threading.Thread(target=_wait, args=(pidfd,), name="end-with-engine", daemon=True).start()


def _wait(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
