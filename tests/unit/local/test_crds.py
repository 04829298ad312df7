"""The definitions are waited for by a kubectl that stumbles over those that are very new."""

from __future__ import annotations

from pathlib import Path

import pytest

from local import crds
from local.cache import LocalClusterError

STUMBLES = """#!/bin/sh
echo "$2" >> {folder}/calls
[ "$2" = wait ] || exit 0
[ "$(grep -c wait {folder}/calls)" -gt {failures} ] && exit 0
echo 'error: {error}' >&2
exit 1
"""
NULL = ".status.conditions accessor error: <nil> is of the type <nil>, expected []interface{}"


def kubectl(folder: Path, monkeypatch: pytest.MonkeyPatch, error: str, failures: int) -> None:
    """One whose `wait` fails so often."""
    program = folder / "kubectl"
    program.write_text(STUMBLES.format(folder=folder, failures=failures, error=error))
    program.chmod(0o755)
    monkeypatch.setattr(crds, "tools", lambda: folder)


def test_conditions_that_are_null_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl(tmp_path, monkeypatch, NULL, failures=2)
    crds.install_crds(tmp_path / "kubeconfig")
    assert (tmp_path / "calls").read_text().split() == ["apply", "wait", "wait", "wait"]


def test_other_failures_are_said_in_kubectl_s_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl(tmp_path, monkeypatch, "timed out waiting for the condition", failures=9)
    with pytest.raises(LocalClusterError, match=r"kubectl wait of the resource definitions failed:\nerror: timed out"):
        crds.install_crds(tmp_path / "kubeconfig")
    assert (tmp_path / "calls").read_text().split() == ["apply", "wait"]
