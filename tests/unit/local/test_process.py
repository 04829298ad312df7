"""A process is known by pid and start time, so that nobody else's is ever ended."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL

from local import process


def _sleeper(tmp_path: Path) -> process.Process:
    return process.start(["sleep", "300"], cwd=tmp_path, log=tmp_path / "log")


def test_ends_what_it_started(tmp_path: Path) -> None:
    started = _sleeper(tmp_path)
    assert started.alive()
    started.end()
    assert not started.alive()


def test_leaves_a_process_alone_that_got_the_pid_of_an_ended_one(tmp_path: Path) -> None:
    started = _sleeper(tmp_path)
    earlier = replace(started, start_ticks=started.start_ticks - 1)
    assert not earlier.alive()
    earlier.end()
    assert started.alive()
    started.end()


def test_kills_what_does_not_hear_sigterm(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    log = tmp_path / "log"
    started = process.start([sys.executable, "-c", deaf], cwd=tmp_path, log=log)
    while not log.read_text():
        assert started.alive()
    started.end(grace_seconds=0.2)
    assert not started.alive()


def test_can_die_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from local import process\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "child = process.start(['sleep', '300'], cwd=folder, log=folder / 'log', dies_with_parent=True)\n"
        "print(child.pid, child.start_ticks, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == -SIGKILL
    pid, ticks = (int(word) for word in done.stdout.split())
    assert process.Process(pid, ticks).wait(10.0)


def test_a_zombie_counts_as_ended(tmp_path: Path) -> None:
    started = _sleeper(tmp_path)
    os.kill(started.pid, SIGKILL)
    assert started.wait(10.0)


def test_has_not_ended_while_one_of_its_threads_lives(tmp_path: Path) -> None:
    """As a killed process for some moments: its first thread is a zombie, and its ports are still taken."""
    outlived = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(300,)).start();"
        "ctypes.CDLL(None).syscall(60, 0)"  # exit, of this thread alone
    )
    started = process.start([sys.executable, "-c", outlived], cwd=tmp_path, log=tmp_path / "log")
    while Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert started.alive()
    assert started.alive()
    started.end(grace_seconds=0.0)
    assert not started.alive()
