"""The directory below which the sampler's versions lie: of this user alone, and empty of an earlier engine's versions.

Left out: what is in a version (adapter_files.py), and which versions there are (versions.py).
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from clora_engine.errors import EngineError


def prepare_root(root: Path) -> None:
    """Make the versions root, private to this user, and empty it of an earlier engine's versions."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.lstat()
    permissions = found.st_mode & 0o777  # a pod's fsGroup adds setgid, which lets nobody in
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or permissions != 0o700:
        raise EngineError(f"the versions root {root} must be a directory of this user with mode 0700")
    empty_root(root)


def empty_root(root: Path) -> None:
    """Remove all versions below the root."""
    for directory in root.glob("v[0-9]*-*"):
        shutil.rmtree(directory, ignore_errors=True)
