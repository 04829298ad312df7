"""What is downloaded of the files that trackers keep: theirs alone, whatever a library has put there."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import tarfile
import threading
from pathlib import Path

import pytest

from clora_engine.errors import CheckpointError
from clora_engine.server import tracked_files


def pulled(experiment: Path, into: Path) -> list[str]:
    """Paths of all that the tar holds, which is unpacked."""
    file = tracked_files.packed(experiment)
    assert file is not None
    with file, tarfile.open(fileobj=file) as tar:
        tar.extractall(into, filter="data")
        return tar.getnames()


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    folder = tmp_path / "experiment"
    (folder / "tracking" / "a" / "empty").mkdir(parents=True)
    (folder / "tracking" / "a" / "b").write_text("b")
    (folder / "tracking" / ".Kind.lock").touch()
    return folder


def test_files_and_folders_are_there_as_they_were(experiment: Path, tmp_path: Path) -> None:
    large = os.urandom(3 << 20)
    (experiment / "tracking" / "large").write_bytes(large)
    assert sorted(pulled(experiment, tmp_path / "out")) == ["a", "a/b", "a/empty", "large"]
    assert (tmp_path / "out" / "large").read_bytes() == large
    assert list(experiment.iterdir()) == [experiment / "tracking"]


def test_links_and_devices_are_left_out(experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "token").write_text("secret")
    tracking = experiment / "tracking"
    (tracking / "token").symlink_to(tmp_path / "secrets" / "token")
    (tracking / "secrets").symlink_to(tmp_path / "secrets")
    (tracking / "a" / "up").symlink_to("..")
    (tracking / "x.db").symlink_to(tmp_path / "secrets" / "token")
    os.mkfifo(tracking / "pipe")
    assert sorted(pulled(experiment, tmp_path / "out")) == ["a", "a/b", "a/empty"]


def test_a_folder_that_is_a_link_is_none(experiment: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    (elsewhere / "tracking").symlink_to(experiment / "tracking")
    assert tracked_files.packed(elsewhere) is None


def test_nothing_is_said_of_locks_alone(tmp_path: Path) -> None:
    assert tracked_files.packed(tmp_path) is None
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking" / ".MLflow.lock").touch()
    assert tracked_files.packed(tmp_path) is None


def test_a_database_is_read_while_nobody_writes_it(experiment: Path, tmp_path: Path) -> None:
    """Its writer commits when it is asked to wait no longer; what was read is the state after that, and whole."""
    database, lock = experiment / "tracking" / "p.db", experiment / "tracking" / "p.lock"
    connection = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    connection.execute("CREATE TABLE t (n)")
    names: list[str] = []
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (1)")
        reader = threading.Thread(target=lambda: names.extend(pulled(experiment, tmp_path / "out")))
        reader.start()
        connection.execute("COMMIT")
        assert not names
    reader.join()
    assert sorted(names) == ["a", "a/b", "a/empty", "p.db"]
    with sqlite3.connect(tmp_path / "out" / "p.db") as copy:
        assert copy.execute("SELECT n FROM t").fetchall() == [(1,)]
    connection.close()


def test_what_a_killed_writer_has_left_comes_along(experiment: Path, tmp_path: Path) -> None:
    tracking = experiment / "tracking"
    for name in ("p.db", "p.db-journal", "p.lock"):
        (tracking / name).write_text(name)
    assert sorted(pulled(experiment, tmp_path / "out")) == ["a", "a/b", "a/empty", "p.db", "p.db-journal"]


def test_a_database_that_is_written_all_the_time_is_said(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_files, "LOCK_SECONDS", 0.05)
    (experiment / "tracking" / "p.db").touch()
    with (experiment / "tracking" / "p.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"p\.db is being written all the time"):
            tracked_files.packed(experiment)


def test_a_file_that_has_just_been_emptied_is_empty(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow writes a tag anew: its size may be told before, and its bytes read after."""
    path, fstat = experiment / "tracking" / "a" / "b", os.fstat

    def emptied(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        path.write_text("")
        return status

    with monkeypatch.context() as between:
        between.setattr(os, "fstat", emptied)
        file = tracked_files.packed(experiment)
    assert file is not None
    with file, tarfile.open(fileobj=file) as tar:
        assert tar.getmember("a/b").size == 0


def test_what_is_too_large_is_refused_before_it_is_copied(experiment: Path) -> None:
    with (experiment / "tracking" / "holes").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(CheckpointError, match=r"more than 1024 MiB: .* kubectl cp"):
        tracked_files.packed(experiment)
    assert list(experiment.iterdir()) == [experiment / "tracking"]


def test_a_large_file_that_becomes_shorter_is_asked_for_again(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fstat = experiment / "tracking" / "large", os.fstat
    path.write_bytes(bytes(2 << 20))

    def cut(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        if status.st_size == 2 << 20:
            os.truncate(path, 1)
        return status

    monkeypatch.setattr(os, "fstat", cut)
    with pytest.raises(CheckpointError, match="large became shorter as it was read: try again"):
        tracked_files.packed(experiment)
