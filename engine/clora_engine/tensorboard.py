"""A run's metrics as TensorBoard event files: `tensorboard --logdir experiments/<uid>` below the engine's storage.

Derived from metrics.jsonl and never read back: an event file that cannot be written is given up, with a line in the
log, and the experiment goes on. Each life of an engine writes a file of its own that first takes back what an earlier
one wrote of steps which do not exist (any more).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

log = logging.getLogger(__name__)


class TensorBoard:
    """Writes below `folder`, in the epoch's file. Not thread-safe; blocking."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self._folder = folder
        self._epoch = epoch
        self._writer: Any = None
        self._given_up = False

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds the numbers of a step's line of metrics, under their names. Raises nothing."""
        if self._given_up:
            return
        try:
            self._add(line)
        except OSError as error:
            log.warning("no more TensorBoard events in %s: %s", self._folder.parent.name, error)
            self._given_up = True

    def _add(self, line: Mapping[str, Any]) -> None:
        step = int(line["step"])
        if self._writer is None:
            self._folder.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(self._folder / f"epoch-{self._epoch}"))
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(wall_time=time.time(), step=step, session_log=start))
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
