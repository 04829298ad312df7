"""A storage without room is waited for, and nothing else is."""

from __future__ import annotations

import errno

import pytest

from clora_engine.errors import CheckpointError, StorageFullError
from clora_engine.patience import Patience


def full() -> Exception:
    return OSError(errno.ENOSPC, "No space left on device", "x")


class Storage:
    """Raises these errors, one a write, then takes what is written."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def write(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "written"


@pytest.mark.parametrize(
    "error", [full(), StorageFullError("x"), CheckpointError("x", reason="StorageFull"), OSError(errno.EDQUOT, "x")]
)
async def test_it_pauses_says_so_and_goes_on(error: Exception) -> None:
    said: list[str] = []
    patience = Patience(said.append, lambda: False, retry_seconds=0.0)
    assert await patience.keep(Storage(error, full()).write) == "written"
    assert [bool(message) for message in said] == [True, True, False]
    assert "storage is full" in said[0]


async def test_without_time_to_wait_it_gives_up() -> None:
    patience = Patience(lambda message: None, lambda: True)
    with pytest.raises(StorageFullError):
        await patience.keep(Storage(full()).write)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "x"), CheckpointError("x"), ValueError("x")])
async def test_other_errors_are_raised_at_once(error: Exception) -> None:
    said: list[str] = []
    with pytest.raises(type(error)):
        await Patience(said.append, lambda: False).keep(Storage(error).write)
    assert said == []
