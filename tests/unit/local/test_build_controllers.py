"""What is built once is found by its key, and a missing part is named. The build itself: tests/integration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from local import build_controllers
from local.build import Toolchain
from local.build_controllers import KUEUE, LWS, Controller
from local.cache import REPOSITORY, LocalClusterError


def test_key_follows_pins_and_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("go.mod", "go.sum"):
        (tmp_path / name).write_bytes((build_controllers.SOURCES / name).read_bytes())
    monkeypatch.setattr(build_controllers, "SOURCES", tmp_path)
    toolchain = Toolchain(Path("go"), "go1.26.0")
    folders = [build_controllers._folder(toolchain), build_controllers._folder(Toolchain(Path("go"), "go1.27.0"))]
    for name in ("go.mod", "go.sum"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"\n")
        folders.append(build_controllers._folder(toolchain))
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("controller", [LWS, KUEUE])
def test_missing_build_is_named_with_its_remedy(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLORA_CACHE_DIR", str(tmp_path))
    remedy = rf"{controller.name} is not built yet: run `python -m local\.build_controllers`"
    with pytest.raises(LocalClusterError, match=remedy):
        build_controllers.built(controller)


@pytest.mark.parametrize("controller", [LWS, KUEUE])
def test_the_documented_version_is_the_one_that_is_tested(controller: Controller) -> None:
    pins = (build_controllers.SOURCES / "go.mod").read_text()
    pinned = re.search(rf"{re.escape(controller.module)} v([0-9.]+)", pins)
    assert pinned
    page = (REPOSITORY / "docs" / "install.md").read_text()
    after = page[page.lower().index(f"https://{controller.name}.") :]  # its home page, linked where it is introduced
    assert re.search(rf"tested with\s+{re.escape(pinned[1])}\)", after[:300])
