"""Helm, run on the charts without a cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from local.cache import REPOSITORY
from local.tools import tools

CHART = REPOSITORY / "charts" / "clora"
ENGINE_CHART = REPOSITORY / "charts" / "clora-engine"


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(tools() / "helm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def template(chart: Path, *settings: str, name: str) -> list[dict[str, Any]]:
    """The documents of a release in namespace clora-system, hooks and tests among them; `settings` are NAME=JSON."""
    flags = [flag for setting in settings for flag in ("--set-json", setting)]
    done = helm("template", name, str(chart), "--namespace", "clora-system", *flags)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def render(*settings: str, name: str = "clora") -> list[dict[str, Any]]:
    """Of the operator's chart."""
    return template(CHART, *settings, name=name)


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def hook(document: dict[str, Any]) -> str:
    """When helm makes it; empty for what is part of the release."""
    return str(document["metadata"].get("annotations", {}).get("helm.sh/hook", ""))
