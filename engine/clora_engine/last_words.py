"""Why an engine ends, where Kubernetes looks for it: the container's termination message, which is in the pod's status
and in what `kubectl describe pod` shows. Everywhere else the log has it."""

from __future__ import annotations

import contextlib
from pathlib import Path

MESSAGE_FILE = Path("/dev/termination-log")  # the default terminationMessagePath; kubelet makes the file
MOST_BYTES = 2048  # Kubernetes keeps 4096 of a container


def tell(message: str) -> None:
    """Leaves the message in a container, and does nothing elsewhere."""
    if MESSAGE_FILE.is_file():
        with contextlib.suppress(OSError):  # the log has it
            MESSAGE_FILE.write_bytes(message.encode()[:MOST_BYTES])
