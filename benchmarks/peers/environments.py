"""The peers' own Python environments, from hash-pinned files in requirements/, made once where they are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.report import ROOT
from local.cache import LocalClusterError, pinned_environment

SKYRL_PYTHON = "PYTHON_FOR_SKYRL"


def trl(folder: Path) -> Path:
    """The interpreter of TRL's environment below `folder`: clora's Python, and clora's torch, transformers and PEFT."""
    return _environment(folder / "trl", "peer-trl.txt", sys.executable)


def skyrl(folder: Path) -> Path:
    """The interpreter of SkyRL's environment below `folder`. Raises LocalClusterError without a Python 3.12."""
    return _environment(folder / "skyrl", "peer-skyrl.txt", _python_3_12())


def versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    """What of these an environment holds."""
    paths = [str(path) for path in (python.parent.parent / "lib").glob("python3*/site-packages")]
    found = {distribution.name.lower(): distribution.version for distribution in distributions(path=paths)}
    return {name: found[name] for name in names if name in found}


def source_path() -> str:
    """PYTHONPATH of a peer: clora's packages and its benchmarks, without clora's dependencies."""
    return os.pathsep.join(str(ROOT / name) for name in (".", "crds", "engine"))


def _environment(folder: Path, requirements: str, base: str) -> Path:
    return pinned_environment(folder, ROOT / "requirements" / requirements, base)


def _python_3_12() -> str:
    """A version manager's Pythons are looked at too: what it has put on the PATH may only say which ones there are."""
    managed = sorted(map(str, (Path.home() / ".pyenv" / "versions").glob("3.12.*/bin/python")))
    for candidate in [os.environ.get(SKYRL_PYTHON, ""), "python3.12", sys.executable, *managed]:
        if candidate and shutil.which(candidate):
            asked = [candidate, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            if done.stdout.strip() == "3.12":
                return candidate
    raise LocalClusterError(f"SkyRL needs Python 3.12 and there is none: install it, or name it in {SKYRL_PYTHON}")
