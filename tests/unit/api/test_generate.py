"""The CRD manifests in the repository are those that the models make."""

from __future__ import annotations

from pathlib import Path

import pytest

from clora_api import generate


def test_manifests_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["check"]) == 0, capsys.readouterr().err


def test_a_stale_manifest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "TARGETS", (tmp_path / "crds",))
    values = tmp_path / "values.schema.json"
    values.write_text('{"properties": {"spec": {}, "preset": {"type": "string"}}}')
    monkeypatch.setattr(generate, "ENGINE_VALUES", values)
    assert generate.main(["write"]) == 0
    assert generate.main(["check"]) == 0
    (tmp_path / "crds" / "loraengines.clora.dev.yaml").write_text("old")
    assert generate.main(["check"]) == 1
    assert "crds/loraengines.clora.dev.yaml is stale" in capsys.readouterr().err
    values.write_text(values.read_text().replace("maxExperiments", "maximum"))
    assert generate.main(["check"]) == 1
    assert "values.schema.json is stale" in capsys.readouterr().err
    assert generate.main(["draw"]) == 2
