"""What is built once is found by its key, and a missing part is named. The build itself: tests/integration."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from local import build
from local.cache import REPOSITORY, LocalClusterError, exclusive, install_pinned, working_uv


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    for name in build.SOURCE_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((build.SOURCES / name).read_bytes())
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def test_key_follows_sources_pins_and_toolchain(sources: Path) -> None:
    toolchain = build.Toolchain(Path("go"), "go1.24.0")
    keys = [build.build_key(toolchain), build.build_key(build.Toolchain(Path("elsewhere/go"), "go1.24.0"))]
    assert keys[0] == keys[1], "where the same toolchain lies does not matter"
    keys.append(build.build_key(build.Toolchain(Path("go"), "go1.25.0")))
    for name in build.SOURCE_FILES:
        (sources / name).write_bytes((sources / name).read_bytes() + b"\n")
        keys.append(build.build_key(toolchain))
    assert len(set(keys)) == 2 + len(build.SOURCE_FILES)


@pytest.mark.parametrize(("version", "usable"), [("go1.23.9", False), ("go1.24", True), ("go2.0", True), ("", False)])
def test_go_is_used_from_1_24_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, usable: bool) -> None:
    program = tmp_path / "go"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CLORA_CACHE_DIR", str(tmp_path / "cache"))
    found = build.find_go(install=False)
    assert found == (build.Toolchain(program, version) if usable else None)


def test_missing_build_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLORA_CACHE_DIR", str(tmp_path))
    with pytest.raises(LocalClusterError, match=r"not built yet: run `python -m local\.build`"):
        build.built()


def test_version_is_the_one_that_go_mod_pins() -> None:
    assert "-X k8s.io/client-go/pkg/version.gitVersion=v1.34." in build._version_flags()


def test_a_second_process_waits_and_says_so(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    program = "import sys, pathlib; from local.cache import exclusive\n" + (
        "with exclusive(pathlib.Path(sys.argv[1]), 'the build'): print('mine')\n"
    )
    with exclusive(lock, "the build"):
        second = subprocess.Popen(
            [sys.executable, "-c", program, lock],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert second.stderr is not None
        assert second.stderr.readline() == "waiting for the build, which another process is at\n"
        assert second.poll() is None
    answer, _ = second.communicate(timeout=30)
    assert answer == "mine\n"


def test_lock_is_free_again_after_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), exclusive(tmp_path / "lock", "it"):
        raise RuntimeError
    with exclusive(tmp_path / "lock", "it"):
        assert capsys.readouterr().err == "", "nobody was waited for"


def _wheel(folder: Path) -> Path:
    path = folder / "tiny-1.0-py3-none-any.whl"
    metadata = {
        "tiny.py": "answer = 42\n",
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny-1.0.dist-info/RECORD": "tiny.py,,\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in metadata.items():
            archive.writestr(name, content)
    return path


def test_the_uv_that_was_fetched_is_used_where_none_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have none, or a version manager's that only says which Python lacks it."""
    fetched = tmp_path / "cache" / "uv-tool" / "bin" / "uv"
    broken = tmp_path / "path" / "uv"
    for program, status in ((fetched, 0), (broken, 127)):
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\nexit {status}\n")
        program.chmod(0o755)
    monkeypatch.setenv("CLORA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(broken.parent))
    assert working_uv() == str(fetched)
    fetched.unlink()
    assert working_uv() is None


def test_only_a_package_of_the_pinned_hash_is_installed(tmp_path: Path) -> None:
    wheel, requirements = _wheel(tmp_path), tmp_path / "tools.txt"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requirements.write_text(f"tiny @ {wheel.as_uri()} --hash=sha256:{digest}\n")
    install_pinned(requirements, tmp_path / "right")
    assert (tmp_path / "right" / "tiny.py").read_text() == "answer = 42\n"
    requirements.write_text(f"tiny @ {wheel.as_uri()} --hash=sha256:{'0' * 64}\n")
    with pytest.raises(LocalClusterError, match=r"cannot install tools\.txt"):
        install_pinned(requirements, tmp_path / "wrong")
    assert not (tmp_path / "wrong" / "tiny.py").exists()
