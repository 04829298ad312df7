"""Which vLLM is accepted, and that vLLM's processes end with their engine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import pytest

from clora_engine.errors import EngineError
from clora_engine.vllm_plugin import ENGINE_PID, register
from clora_engine.vllm_plugin.compat import check_version, check_vllm


def test_the_installed_vllm_is_accepted() -> None:
    assert check_vllm()


def test_an_old_vllm_is_refused_and_a_new_one_is_tried_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineError, match=r"vllm 0\.31\.2 is too old: clora needs 0\.32\.0"):
        check_version("vllm", "0.31.2")
    check_version("vllm", "0.33.1")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_version("vllm", "1.0.0")
    assert "newer than clora was checked with" in caplog.text


def test_the_plugin_leaves_another_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sampler's mark it does not even import vLLM."""
    monkeypatch.delenv(ENGINE_PID, raising=False)
    before = set(sys.modules)
    register()
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] == "vllm"}


WAITING = "from clora_engine.vllm_plugin.parent import end_with; import sys, threading; end_with(int(sys.argv[1])); "


def test_a_process_ends_with_its_engine() -> None:
    engine = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    script = WAITING + "print('up', flush=True); threading.Event().wait()"
    child = subprocess.Popen([sys.executable, "-c", script, str(engine.pid)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert child.poll() is None
        os.kill(engine.pid, signal.SIGKILL)
        engine.wait(timeout=30)
        assert child.wait(timeout=30) == -signal.SIGKILL
    finally:
        for process in (engine, child):
            process.kill()
            process.wait()
        if child.stdout is not None:
            child.stdout.close()


def test_a_process_whose_engine_is_already_gone_does_not_start() -> None:
    engine = subprocess.Popen([sys.executable, "-c", ""])
    engine.wait(timeout=30)
    child = subprocess.run([sys.executable, "-c", WAITING + "threading.Event().wait()", str(engine.pid)], timeout=60)
    assert child.returncode == -signal.SIGKILL
