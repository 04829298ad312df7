"""What the chart renders, read as objects. That a cluster takes it: tests/integration/test_chart.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from clora_operator.settings import Settings
from local.cache import REPOSITORY
from tests.unit.charts.rendering import CHART, ENGINE_CHART, helm, hook, of_kind, render


def _container(*settings: str) -> dict[str, Any]:
    (deployment,) = of_kind(render(*settings), "Deployment")
    container: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


def test_lint_finds_nothing() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


def test_versions_are_those_of_the_distribution() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert f'\nversion = "{chart["version"]}"\n' in project
    assert chart["appVersion"] == chart["version"]


def test_one_operator_at_a_time_that_owns_nothing_it_does_not_need() -> None:
    (deployment,) = of_kind(render(), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]


def test_probes_ask_the_port_on_which_the_operator_answers() -> None:
    container = _container()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"health": Settings().liveness_port, "metrics": Settings().metrics_port}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "health"}


def test_every_setting_of_the_operator_can_be_given_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    given = set(schema["properties"]["settings"]["properties"])
    # where the operator listens and where it finds its cluster is the chart's business
    theirs = {field.name for field in dataclasses.fields(Settings)} - {
        "namespaces",
        "kubeconfig",
        "liveness_port",
        "metrics_port",
        "engine_ingress_from",
        "engine_tenants_from",
    }
    assert given == {first + "".join(map(str.title, rest)) for first, *rest in (name.split("_") for name in theirs)}


def test_settings_reach_the_operator_by_its_environment() -> None:
    container = _container('settings={"resyncSeconds": 7.5, "serviceAddressing": "ClusterIP"}')
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment["CLORA_OPERATOR_RESYNC_SECONDS"] == "7.5"
    assert environment["CLORA_OPERATOR_SERVICE_ADDRESSING"] == "ClusterIP"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('settings={"resyncSecond": 5}', "resyncSecond"),
        ('settings={"logLevel": "LOUD"}', "logLevel"),
        ('watchNamespaces=["Not_A_Name"]', "watchNamespaces"),
        ('image={"pullPolicy": "Sometimes"}', "pullPolicy"),
        ("replicas=2", "replicas"),
        ('image={"digest": "latest"}', "digest"),
        ('uninstall={"timeoutSeconds": 0}', "timeoutSeconds"),
    ],
)
def test_a_wrong_value_is_refused_by_name(setting: str, words: str) -> None:
    done = helm("template", "clora", str(CHART), "--set-json", setting)
    assert done.returncode != 0
    assert words in done.stderr


def test_rules_name_every_verb_and_reach_no_further_than_the_operator_does() -> None:
    documents = [*render(), *render('watchNamespaces=["a"]')]
    roles = [*of_kind(documents, "ClusterRole"), *of_kind(documents, "Role")]
    rules = [rule for role in roles for rule in role["rules"]]
    assert not any("*" in rule[key] for rule in rules for key in ("apiGroups", "resources", "verbs"))
    operator = next(role for role in roles if role["metadata"]["name"] == "clora")["rules"]
    deleted = [rule["resources"] for rule in operator if "delete" in rule["verbs"]]
    assert deleted == [["loraexperiments"], ["pods"]]
    assert [rule["verbs"] for rule in operator if "secrets" in rule["resources"]] == [["get", "create"]]


def test_everywhere_by_a_cluster_role_or_in_named_namespaces_by_a_role_in_each() -> None:
    everywhere = [document for document in render('rbac={"aggregate": false}') if not hook(document)]
    assert of_kind(everywhere, "Role") == []
    assert len(of_kind(everywhere, "ClusterRoleBinding")) == 1
    assert _container()["args"] == ["run", "--all-namespaces"]

    named = render('watchNamespaces=["a", "b"]', 'rbac={"aggregate": false}')
    assert of_kind(named, "ClusterRole") == []
    assert of_kind(named, "ClusterRoleBinding") == []
    roles = [role for role in of_kind(named, "Role") if role["metadata"]["name"] == "clora"]
    assert [role["metadata"]["namespace"] for role in roles] == ["a", "b"]
    for binding in of_kind(named, "RoleBinding"):
        assert binding["subjects"][0]["namespace"] == "clora-system", "the account of the release's own namespace"
    assert _container('watchNamespaces=["a", "b"]')["args"] == ["run", "--namespace=a", "--namespace=b"]


def test_those_who_may_edit_a_namespace_may_edit_experiments_but_not_their_status() -> None:
    roles = {role["metadata"]["name"]: role for role in of_kind(render(), "ClusterRole")}
    viewer, editor = roles["clora-viewer"], roles["clora-editor"]
    assert viewer["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in editor["metadata"]["labels"]
    assert editor["rules"][0]["resources"] == ["loraengines", "loraexperiments"]


def test_kinds_are_the_generated_ones_and_outlive_the_release() -> None:
    generated = {
        crd["metadata"]["name"]: crd["spec"]
        for path in (REPOSITORY / "crds").glob("*.yaml")
        for crd in [yaml.safe_load(path.read_text())]
    }
    rendered = of_kind(render(), "CustomResourceDefinition")
    assert {crd["metadata"]["name"]: crd["spec"] for crd in rendered} == generated
    assert all(crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"} for crd in rendered)
    given_up = of_kind(render('crds={"keep": false}'), "CustomResourceDefinition")
    assert not any("annotations" in crd["metadata"] for crd in given_up)
    assert of_kind(render('crds={"enabled": false}'), "CustomResourceDefinition") == []


def test_names_stay_within_what_kubernetes_allows() -> None:
    documents = render(name="a-release-with-a-name-as-long-as-helm-allows-it-to-b")
    names = [document["metadata"]["name"] for document in documents if document["kind"] != "CustomResourceDefinition"]
    assert max(map(len, names)) <= 63
    assert not any(name.endswith("-") for name in names)


@pytest.mark.parametrize("chart", [CHART, ENGINE_CHART], ids=lambda path: path.name)
def test_every_value_has_a_schema(chart: Path) -> None:
    def check(values: dict[str, Any], schema: dict[str, Any], at: str) -> None:
        for name, value in values.items():
            assert name in schema["properties"], f"{at}{name}"
            if isinstance(value, dict) and "properties" in schema["properties"][name]:
                check(value, schema["properties"][name], f"{at}{name}.")

    schema = json.loads((chart / "values.schema.json").read_text())
    check(yaml.safe_load((chart / "values.yaml").read_text()), schema, "")
    assert schema["additionalProperties"] is False
