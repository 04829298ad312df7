"""What TensorBoard reads of a run, and that nothing depends on it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event

from clora_engine.tensorboard import TensorBoard
from tests.unit.engine.loop import Life, desired


def events(folder: Path) -> list[Any]:
    """All events in the order of their files: TFRecords, each a length, its checksum, the data and its checksum."""

    def masked(data: bytes) -> int:
        crc: int = crc32c(data)
        rotated: int = crc >> 15 | crc << 17
        return (rotated + 0xA282EAD8) & 0xFFFFFFFF

    found = []
    for path in sorted(folder.glob("epoch-*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            record, data_crc = data[12 : 12 + length], data[12 + length : 16 + length]
            assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
            assert struct.unpack("<I", data_crc)[0] == masked(record)
            found.append(Event.FromString(record))
            data = data[16 + length :]
    return found


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    return {(v.tag, e.step): v.simple_value for e in events(folder) for v in e.summary.value}


async def test_a_run_is_there_number_by_number(tmp_path: Path) -> None:
    life = Life(tmp_path, desired())
    await life.run()
    found = scalars(life.folder / "tensorboard")
    for line in life.metrics():
        numbers = {name: value for name, value in line.items() if isinstance(value, float) and name != "step"}
        for name, value in numbers.items():
            assert found[name, line["step"]] == pytest.approx(value, rel=1e-6)
    assert ("reward_mean", 3) in found


def test_a_later_life_takes_back_what_comes_after_its_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    first, second = TensorBoard(folder, 1), TensorBoard(folder, 2)
    first.add({"step": 1, "loss": 0.5, "time": "now"})
    first.add({"step": 2, "loss": 0.25})
    first.close()
    second.add({"step": 2, "loss": 0.75})
    second.close()
    assert [e.step for e in events(folder) if e.HasField("session_log")] == [1, 2]
    assert scalars(folder) == {("loss", 1): 0.5, ("loss", 2): 0.75}


def test_what_cannot_be_written_is_given_up_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    board = TensorBoard(tmp_path / "file", 1)
    board.add({"step": 1, "loss": 0.5})
    board.add({"step": 2, "loss": 0.5})
    board.close()
    assert len(caplog.records) == 1
