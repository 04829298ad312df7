"""Reading metrics.jsonl (see journal.py) as far as its steps are committed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepLine:
    """seconds: since the Unix epoch. values: the step's finite numbers by name."""

    step: int
    seconds: float
    values: dict[str, float]


def read(path: Path, start: int, end: int) -> Iterator[StepLine]:
    """The lines between two offsets in bytes, both at a line's start."""
    with path.open("rb") as file:
        file.seek(start)
        while file.tell() < end:
            line = json.loads(file.readline())
            numbers = {name: float(value) for name, value in line.items() if _is_number(value) and name != "step"}
            yield StepLine(int(line["step"]), datetime.fromisoformat(line["time"]).timestamp(), numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
