"""Applies clora's resource definitions to a cluster and waits until it serves them.

python -m local.crds             the cluster of $KUBECONFIG
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from local.cache import REPOSITORY, LocalClusterError
from local.tools import tools

FOLDER = REPOSITORY / "crds"
WAIT_SECONDS = 60


def install_crds(kubeconfig: Path) -> None:
    """Applies crds/*.yaml server-side and returns once each is Established.

    Raises LocalClusterError with kubectl's words.
    """
    files = [argument for path in sorted(FOLDER.glob("*.yaml")) for argument in ("-f", str(path))]
    if not files:
        raise LocalClusterError(f"no resource definitions in {FOLDER}")
    _kubectl(kubeconfig, "apply", "--server-side", *files)
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return _kubectl(kubeconfig, "wait", "--for=condition=Established", f"--timeout={WAIT_SECONDS}s", *files)
        except LocalClusterError as error:
            # kubectl stumbles over a definition that is so new that its conditions are null
            if "accessor error" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _kubectl(kubeconfig: Path, *arguments: str) -> None:
    done = subprocess.run(  # noqa: S603
        [tools() / "kubectl", f"--kubeconfig={kubeconfig}", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise LocalClusterError(f"kubectl {arguments[0]} of the resource definitions failed:\n{done.stderr.strip()}")


if __name__ == "__main__":
    configured = os.environ.get("KUBECONFIG")
    if not configured:
        sys.exit("error: KUBECONFIG is not set")
    try:
        install_crds(Path(configured))
    except LocalClusterError as error:
        sys.exit(f"error: {error}")
