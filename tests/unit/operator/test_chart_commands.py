"""The commands of the charts' hook and tests where no API server answers (with one: test_chart_life.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clora_operator.__main__ import main


@pytest.fixture
def nowhere(tmp_path: Path) -> str:
    """A kubeconfig whose server is a port that nobody listens on."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["release-finalizers"], "not every experiment could be released: the API server: no answer"),
        (
            ["release-finalizers", "--deployment", "a/b"],
            "Deployment a/b cannot be scaled to 0: the API server: no answer",
        ),
        (["wait-ready", "--deployment", "a/b"], "Deployment a/b is not available: the API server: no answer"),
        (["wait-ready", "--engine", "a/b"], "LoRAEngine a/b is not ready: the API server: no answer"),
    ],
)
def test_time_that_is_over_is_an_error_that_says_what_was_in_the_way(
    nowhere: str, command: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--kubeconfig", nowhere, "--timeout-seconds", "0"]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plain", "a/", "/b", "a/b/c"])
def test_a_name_without_its_namespace_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["release-finalizers", "--deployment", name])
    assert f"'{name}' is not NAMESPACE/NAME" in capsys.readouterr().err


def test_without_access_to_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["release-finalizers", "--kubeconfig", str(tmp_path / "none")]) == 1
    assert "clora-operator:" in capsys.readouterr().err


def test_waiting_needs_something_to_wait_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["wait-ready"])
    assert "--deployment --engine is required" in capsys.readouterr().err
