"""Applies clora's resource definitions to a cluster and waits until it serves them.

python -m local.crds             the cluster of $KUBECONFIG
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from local.cache import REPOSITORY, LocalClusterError
from local.tools import tools

FOLDER = REPOSITORY / "crds"


def install_crds(kubeconfig: Path) -> None:
    """Applies crds/*.yaml server-side and returns once each is Established.

    Raises LocalClusterError with kubectl's words.
    """
    files = [argument for path in sorted(FOLDER.glob("*.yaml")) for argument in ("-f", str(path))]
    if not files:
        raise LocalClusterError(f"no resource definitions in {FOLDER}")
    for command in (
        ["apply", "--server-side", *files],
        ["wait", "--for=condition=Established", "--timeout=60s", *files],
    ):
        done = subprocess.run(  # noqa: S603
            [tools() / "kubectl", f"--kubeconfig={kubeconfig}", *command], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise LocalClusterError(f"kubectl {command[0]} of the resource definitions failed:\n{done.stderr.strip()}")


if __name__ == "__main__":
    configured = os.environ.get("KUBECONFIG")
    if not configured:
        sys.exit("error: KUBECONFIG is not set")
    try:
        install_crds(Path(configured))
    except LocalClusterError as error:
        sys.exit(f"error: {error}")
