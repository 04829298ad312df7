"""The LoRAEngine that charts/clora-engine renders. That a cluster takes it: tests/integration/test_chart_engine.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from clora_api.v1alpha1.engine import EngineSpec
from tests.unit.charts.rendering import CHART, ENGINE_CHART, helm, of_kind, template


def spec(*settings: str, name: str = "warm") -> dict[str, Any]:
    (engine,) = of_kind(template(ENGINE_CHART, *settings, name=name), "LoRAEngine")
    found: dict[str, Any] = engine["spec"]
    return found


def refusal(*settings: str, name: str = "warm") -> str:
    flags = [flag for setting in settings for flag in ("--set-json", setting)]
    done = helm("template", name, str(ENGINE_CHART), *flags)
    assert done.returncode != 0
    return done.stderr


def test_lint_finds_nothing() -> None:
    done = helm("lint", "--strict", str(ENGINE_CHART))
    assert done.returncode == 0, done.stdout


def test_versions_are_those_of_the_operators_chart() -> None:
    mine, theirs = (yaml.safe_load((chart / "Chart.yaml").read_text()) for chart in (ENGINE_CHART, CHART))
    assert [mine[key] for key in ("version", "appVersion", "kubeVersion")] == [
        theirs[key] for key in ("version", "appVersion", "kubeVersion")
    ]


@pytest.mark.parametrize(
    ("preset", "gpus", "image"), [("h200x8", 8, "clora-engine:0.1.0"), ("cpu", 0, "clora-engine:0.1.0-cpu")]
)
def test_presets_are_whole_specs(preset: str, gpus: int, image: str) -> None:
    rendered = spec(f'preset="{preset}"')
    parsed = EngineSpec.model_validate(rendered)
    assert parsed.sampler.gpus + parsed.trainer.gpus == gpus
    assert parsed.image == image


def test_every_preset_can_be_chosen() -> None:
    schema = json.loads((ENGINE_CHART / "values.schema.json").read_text())
    files = {path.stem for path in (ENGINE_CHART / "files" / "presets").glob("*.yaml")}
    assert set(schema["properties"]["preset"]["enum"]) == files | {""}


def test_what_is_given_wins_over_the_preset_also_when_it_is_nothing() -> None:
    rendered = spec(
        'spec={"sampler": {"gpus": 0}, "storage": {"size": "1Ti"}, "podTemplate": {"spec": {"tolerations": []}}}'
    )
    assert rendered["sampler"]["gpus"] == 0
    assert rendered["sampler"]["maxModelLen"] == 8192, "the preset's, beside it"
    assert rendered["storage"] == {"size": "1Ti"}
    assert rendered["podTemplate"]["spec"]["tolerations"] == []
    assert spec('spec={"sampler": {"maxModelLen": 1048576}}')["sampler"]["maxModelLen"] == 1048576


def test_every_field_of_the_kind_may_be_given() -> None:
    schema = json.loads((ENGINE_CHART / "values.schema.json").read_text())["properties"]["spec"]
    assert set(schema["properties"]) == {field.alias or name for name, field in EngineSpec.model_fields.items()}
    whole = {
        "model": {"name": "org/model", "revision": "main", "claimName": "models", "path": "a/b"},
        "scheduling": "ShortestRemaining",
        "dataVolumes": [{"name": "sets", "claimName": "sets"}],
        "storage": {"existingClaim": "mine", "whenDeleted": "Delete"},
        "image": "elsewhere/engine:2",
    }
    rendered = spec('preset=""', f"spec={json.dumps(whole)}")
    assert rendered == whole


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('spec={"sampler": {"gpu": 4}}', "gpu"),
        ('spec={"sampler": {"gpus": "four"}}', "/spec/sampler/gpus"),
        ('spec={"trainer": {"nodes": 0}}', "/spec/trainer/nodes"),
        ('spec={"trainer": {"nodes": "two"}}', "nodes"),
        ('spec={"capacity": {"maxRank": 33}}', "/spec/capacity/maxRank"),
        ('spec={"dataVolumes": [{"name": "sets"}]}', "claimName"),
        ('spec={"storage": {"size": "much"}}', "/spec/storage/size"),
        ('spec={"scheduling": "Lottery"}', "/spec/scheduling"),
        ('preset="h100"', "preset"),
        ("replicas=2", "replicas"),
        ('token="secret"', "token"),
        ('preset=""', "spec.model.name"),
        ('nameOverride="4b"', "nameOverride"),
    ],
)
def test_a_wrong_value_is_refused_by_name(setting: str, words: str) -> None:
    assert words in refusal(setting)


def test_a_release_that_cannot_be_a_service_is_refused() -> None:
    assert "a letter first" in refusal(name="4b")


def test_a_release_whose_pods_would_have_too_long_names_is_refused() -> None:
    several = 'spec={"trainer": {"nodes": 2}}'
    assert "at most 44 characters" in refusal(several, name="a" * 45)
    assert spec(several, name="a" * 44)["trainer"]["nodes"] == 2
    assert "nodes" not in spec(name="a" * 45)["trainer"]


def test_an_engine_elsewhere_gets_no_image_and_no_pod() -> None:
    given = {"endpoint": "https://engine.example.com", "tokenSecretRef": {"name": "engine-token"}}
    rendered = spec(f"spec={json.dumps(given)}", 'imagePullSecrets=[{"name": "mirror"}]')
    assert "image" not in rendered
    assert "podTemplate" not in rendered
    assert rendered["tokenSecretRef"] == {"name": "engine-token"}


def test_secrets_are_named_never_held() -> None:
    documents = template(ENGINE_CHART, 'spec={"model": {"tokenSecretRef": {"name": "hub"}}}', name="warm")
    assert of_kind(documents, "Secret") == []
    (engine,) = of_kind(documents, "LoRAEngine")
    assert engine["spec"]["model"]["tokenSecretRef"] == {"name": "hub"}


@pytest.mark.parametrize("preset", ["h200x8", "cpu"])
def test_an_air_gapped_cluster_pulls_from_its_mirror_and_nothing_from_the_hub(preset: str) -> None:
    documents = template(
        ENGINE_CHART,
        f'preset="{preset}"',
        'image={"registry": "mirror.example.com"}',
        'test={"image": {"registry": "mirror.example.com"}}',
        'imagePullSecrets=[{"name": "mirror"}]',
        'spec={"model": {"claimName": "models", "path": "small"}}',
        name="warm",
    )
    (engine,), (pod,) = of_kind(documents, "LoRAEngine"), of_kind(documents, "Pod")
    assert engine["spec"]["image"].startswith("mirror.example.com/clora-engine:")
    assert engine["spec"]["model"]["claimName"] == "models"
    assert pod["spec"]["containers"][0]["image"] == "mirror.example.com/clora-operator:0.1.0"
    for template_spec in (engine["spec"]["podTemplate"]["spec"], pod["spec"]):
        assert template_spec["imagePullSecrets"] == [{"name": "mirror"}]
