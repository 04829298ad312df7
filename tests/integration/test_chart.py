"""The chart on a real API server: installed, upgraded, uninstalled, and its rules held against the real operator.

The operator, the uninstall hook and the tests run as processes, with nothing but the rights of the accounts that the
chart gives them (process_node.py). Their lives with experiments: test_chart_life.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from local.control_plane import ControlPlane
from tests.cluster_fixtures import audit_events, wait_until
from tests.integration.chart_fixtures import CHART, ChartCluster, chart_cluster, own_ports

pytestmark = pytest.mark.integration

KINDS = ("loraengines.clora.dev", "loraexperiments.clora.dev")

EXAMPLE = '{"question": "1 + 1", "answer": "2"}'
EXPERIMENT = {
    "apiVersion": "clora.dev/v1alpha1",
    "kind": "LoRAExperiment",
    "metadata": {"name": "sums"},
    "spec": {
        "engineRef": {"name": "mine"},
        "lora": {"rank": 8, "alpha": 16},
        "algorithm": {"estimator": "GRPO", "loss": "PPO", "learningRate": "1e-4"},
        "environment": {"name": "GSM8K"},
        "data": {"configMap": {"name": "sums", "key": "train.jsonl"}},
        "maxSteps": 1,
    },
}


def _engine(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "clora.dev/v1alpha1",
        "kind": "LoRAEngine",
        "metadata": {"name": name},
        "spec": {"model": {"name": "example/model"}, "image": "clora-engine:0.1.0"},
    }


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartCluster]:
    """Without clora's kinds: the chart brings them."""
    with chart_cluster(tmp_path_factory.mktemp("chart")) as made:
        yield made


def _kinds(api: client.ApiClient) -> dict[str, Any]:
    found = client.ApiextensionsV1Api(api).list_custom_resource_definition().items
    return {crd.metadata.name: crd for crd in found}


def test_install_upgrade_uninstall(charts: ChartCluster) -> None:
    api = charts.api
    apps, custom = client.AppsV1Api(api), client.CustomObjectsApi(api)
    notes = charts.install("clora-system", "--set=networkPolicy.enabled=true,metrics.dashboard.enabled=true")
    assert "works in all namespaces" in notes
    assert set(_kinds(api)) == set(KINDS)
    pod = apps.read_namespaced_deployment("clora", "clora-system").spec.template.spec
    assert pod.containers[0].args == ["run", "--all-namespaces"]
    assert client.CoreV1Api(api).read_namespaced_service_account(pod.service_account_name, "clora-system")

    assert "Phase:          Succeeded" in charts.helm("test", "clora", "--namespace", "clora-system")

    version = apps.read_namespaced_deployment("clora", "clora-system").metadata.generation
    place = ("--namespace", "clora-system", "--wait", "--timeout=120s")
    charts.helm("upgrade", "clora", str(CHART), *place, *own_ports(), "--set", "settings.workers=3")
    upgraded = apps.read_namespaced_deployment("clora", "clora-system")
    assert upgraded.metadata.generation == version + 1
    assert ("CLORA_OPERATOR_WORKERS", "3") in [
        (entry.name, entry.value) for entry in upgraded.spec.template.spec.containers[0].env
    ]

    custom.create_namespaced_custom_object("clora.dev", "v1alpha1", "default", "loraengines", _engine("kept"))
    charts.uninstall("clora-system")
    assert set(_kinds(api)) == set(KINDS), "the kinds stay, and with them what people made"
    assert custom.get_namespaced_custom_object("clora.dev", "v1alpha1", "default", "loraengines", "kept")
    assert _left_in(api, "clora-system") == []

    charts.install("clora-system")
    assert _kinds(api)[KINDS[0]].metadata.annotations["meta.helm.sh/release-name"] == "clora", "taken up again"
    charts.uninstall("clora-system")
    custom.delete_namespaced_custom_object("clora.dev", "v1alpha1", "default", "loraengines", "kept")


def _left_in(api: client.ApiClient, namespace: str) -> list[str]:
    """Of the release and its hooks. Pods that have ended go with their Job in the background."""
    core, apps, batch = client.CoreV1Api(api), client.AppsV1Api(api), client.BatchV1Api(api)
    rbac = client.RbacAuthorizationV1Api(api)
    wait_until(lambda: not core.list_namespaced_pod(namespace).items, "the release's pods to be gone")
    found = [
        *apps.list_namespaced_deployment(namespace).items,
        *batch.list_namespaced_job(namespace).items,
        *core.list_namespaced_service(namespace).items,
        *[account for account in core.list_namespaced_service_account(namespace).items if _name(account) != "default"],
        *rbac.list_namespaced_role(namespace).items,
        *rbac.list_namespaced_role_binding(namespace).items,
        *[role for role in rbac.list_cluster_role().items if _is_ours(role)],
        *[binding for binding in rbac.list_cluster_role_binding().items if _is_ours(binding)],
    ]
    return [_name(item) for item in found]


def _name(item: Any) -> str:
    return str(item.metadata.name)


def _served(custom: client.CustomObjectsApi) -> bool:
    try:
        custom.list_namespaced_custom_object("clora.dev", "v1alpha1", "default", "loraengines")
    except client.ApiException:
        return False
    return True


def _is_ours(item: Any) -> bool:
    return bool((item.metadata.labels or {}).get("app.kubernetes.io/part-of") == "clora")


def _requests(plane: ControlPlane, user: str) -> Counter[tuple[str, str, int]]:
    """How often `user` did what, with which HTTP status."""
    return Counter(
        (event["verb"], event["objectRef"]["resource"], event["responseStatus"]["code"])
        for event in audit_events(plane)
        if event["user"]["username"] == user and "objectRef" in event
    )


@pytest.mark.parametrize("scope", ["everywhere", "named"])
def test_operator_does_its_work_with_the_rights_of_its_account(charts: ChartCluster, scope: str) -> None:
    core, apps = client.CoreV1Api(charts.api), client.AppsV1Api(charts.api)
    custom = client.CustomObjectsApi(charts.api)
    system, tenant = f"system-{scope}", f"tenant-{scope}"
    core.create_namespace({"metadata": {"name": tenant}})
    flags = ["--set", f"watchNamespaces={{{tenant}}}"] if scope == "named" else []
    charts.install(system, *flags)
    core.create_namespaced_config_map(tenant, {"metadata": {"name": "sums"}, "data": {"train.jsonl": EXAMPLE}})
    custom.create_namespaced_custom_object("clora.dev", "v1alpha1", tenant, "loraengines", _engine("mine"))
    custom.create_namespaced_custom_object("clora.dev", "v1alpha1", tenant, "loraexperiments", EXPERIMENT)
    wait_until(lambda: bool(apps.list_namespaced_stateful_set(tenant).items), "the engine's StatefulSet")

    def listed(plural: str) -> list[dict[str, Any]]:
        return list(custom.list_namespaced_custom_object("clora.dev", "v1alpha1", tenant, plural)["items"])

    def told(plural: str) -> bool:
        return bool(listed(plural)[0].get("status", {}).get("conditions"))

    wait_until(lambda: told("loraengines") and told("loraexperiments"), "the status of both")
    wait_until(lambda: bool(core.list_namespaced_event(tenant).items), "an event")
    assert core.list_namespaced_service(tenant).items[0].metadata.name == "mine"
    policy = client.NetworkingV1Api(charts.api).read_namespaced_network_policy("mine", tenant)
    (peer,) = policy.spec.ingress[0]._from
    assert peer.namespace_selector.match_labels == {"kubernetes.io/metadata.name": system}
    assert core.read_namespaced_persistent_volume_claim("mine-storage", tenant).metadata.name == "mine-storage"
    assert [secret.metadata.name for secret in core.list_namespaced_secret(tenant).items] == ["mine-token"]
    custom.delete_namespaced_custom_object("clora.dev", "v1alpha1", tenant, "loraexperiments", "sums")
    wait_until(lambda: not listed("loraexperiments"), "the deleted experiment to be released")
    words = charts.node.log("clora")
    charts.uninstall(system)
    for account in ("clora", "clora-uninstall"):
        requests = _requests(charts.plane, f"system:serviceaccount:{system}:{account}")
        assert [request for request in requests if request[2] in (401, 403)] == [], words
    asked = {(verb, what) for verb, what, _ in _requests(charts.plane, f"system:serviceaccount:{system}:clora")}
    assert {("get", "configmaps"), ("list", "pods"), ("get", "secrets"), ("watch", "statefulsets")} <= asked
    assert _left_in(charts.api, system) == []
    assert client.RbacAuthorizationV1Api(charts.api).list_namespaced_role(tenant).items == []
