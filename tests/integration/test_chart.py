"""The chart on a real API server: installed, upgraded, uninstalled, and its rules held against the real operator.

No pod runs there: the operator runs beside it, with nothing but the rights of the chart's ServiceAccount.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from local import process
from local.cache import REPOSITORY
from local.control_plane import ControlPlane, free_port
from local.tools import tools
from tests.cluster_fixtures import audit_events, wait_until

pytestmark = pytest.mark.integration

CHART = REPOSITORY / "charts" / "clora"
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
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A cluster without clora's kinds: the chart brings them."""
    with ControlPlane(tmp_path_factory.mktemp("chart") / "cluster", audit=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def api(bare: ControlPlane) -> Iterator[client.ApiClient]:
    with config.new_client_from_config(str(bare.kubeconfig)) as found:
        yield found


def _helm(cluster: ControlPlane, *arguments: str) -> str:
    command = [str(tools() / "helm"), f"--kubeconfig={cluster.kubeconfig}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _install(cluster: ControlPlane, namespace: str, *flags: str) -> str:
    return _helm(cluster, "install", "clora", str(CHART), "--namespace", namespace, "--create-namespace", *flags)


def _kinds(api: client.ApiClient) -> dict[str, Any]:
    found = client.ApiextensionsV1Api(api).list_custom_resource_definition().items
    return {crd.metadata.name: crd for crd in found}


def test_install_upgrade_uninstall(bare: ControlPlane, api: client.ApiClient) -> None:
    apps, custom = client.AppsV1Api(api), client.CustomObjectsApi(api)
    notes = _install(bare, "clora-system")
    assert "works in all namespaces" in notes
    assert set(_kinds(api)) == set(KINDS)
    pod = apps.read_namespaced_deployment("clora", "clora-system").spec.template.spec
    assert pod.containers[0].args == ["run", "--all-namespaces"]
    assert client.CoreV1Api(api).read_namespaced_service_account(pod.service_account_name, "clora-system")

    version = apps.read_namespaced_deployment("clora", "clora-system").metadata.generation
    _helm(bare, "upgrade", "clora", str(CHART), "--namespace", "clora-system", "--set", "settings.workers=3")
    upgraded = apps.read_namespaced_deployment("clora", "clora-system")
    assert upgraded.metadata.generation == version + 1
    assert ("CLORA_OPERATOR_WORKERS", "3") in [
        (entry.name, entry.value) for entry in upgraded.spec.template.spec.containers[0].env
    ]

    wait_until(lambda: _served(custom), "the new kinds to be served")
    custom.create_namespaced_custom_object("clora.dev", "v1alpha1", "default", "loraengines", _engine("kept"))
    _helm(bare, "uninstall", "clora", "--namespace", "clora-system", "--wait")
    assert set(_kinds(api)) == set(KINDS), "the kinds stay, and with them what people made"
    assert custom.get_namespaced_custom_object("clora.dev", "v1alpha1", "default", "loraengines", "kept")
    assert apps.list_namespaced_deployment("clora-system").items == []
    assert [role for role in client.RbacAuthorizationV1Api(api).list_cluster_role().items if _is_ours(role)] == []

    _install(bare, "clora-system")
    assert _kinds(api)[KINDS[0]].metadata.annotations["meta.helm.sh/release-name"] == "clora", "taken up again"
    _helm(bare, "uninstall", "clora", "--namespace", "clora-system", "--wait")
    custom.delete_namespaced_custom_object("clora.dev", "v1alpha1", "default", "loraengines", "kept")


def _served(custom: client.CustomObjectsApi) -> bool:
    try:
        custom.list_namespaced_custom_object("clora.dev", "v1alpha1", "default", "loraengines")
    except client.ApiException:
        return False
    return True


def _is_ours(role: client.V1ClusterRole) -> bool:
    return bool((role.metadata.labels or {}).get("app.kubernetes.io/part-of") == "clora")


def _account_kubeconfig(bare: ControlPlane, api: client.ApiClient, namespace: str, target: Path) -> Path:
    """The administrator's kubeconfig with the token of the chart's ServiceAccount instead of the certificate."""
    request = {"spec": {"expirationSeconds": 3600}}
    token = client.CoreV1Api(api).create_namespaced_service_account_token("clora", namespace, request).status.token
    content = yaml.safe_load(bare.kubeconfig.read_text())
    content["users"][0]["user"] = {"token": token}
    target.touch(mode=0o600)
    target.write_text(json.dumps(content))
    return target


def _requests(bare: ControlPlane, user: str) -> Counter[tuple[str, str, int]]:
    """How often `user` did what, with which HTTP status."""
    return Counter(
        (event["verb"], event["objectRef"]["resource"], event["responseStatus"]["code"])
        for event in audit_events(bare)
        if event["user"]["username"] == user and "objectRef" in event
    )


@pytest.mark.parametrize("scope", ["everywhere", "named"])
def test_operator_does_its_work_with_the_rights_of_its_account(
    bare: ControlPlane, api: client.ApiClient, tmp_path: Path, scope: str
) -> None:
    core, apps, custom = client.CoreV1Api(api), client.AppsV1Api(api), client.CustomObjectsApi(api)
    system, tenant = f"system-{scope}", f"tenant-{scope}"
    core.create_namespace({"metadata": {"name": tenant}})
    flags = ["--set", f"watchNamespaces={{{tenant}}}"] if scope == "named" else []
    # the kinds may be those that an earlier release of another namespace left
    _install(bare, system, "--take-ownership", *flags)
    wait_until(lambda: _served(custom), "the kinds to be served")
    kubeconfig = _account_kubeconfig(bare, api, system, tmp_path / "operator.kubeconfig")
    scope_flag = f"--namespace={tenant}" if scope == "named" else "--all-namespaces"
    port = free_port()
    command = [sys.executable, "-m", "clora_operator", "run", scope_flag, f"--liveness-port={port}", "--metrics-port=0"]
    log = tmp_path / "operator.log"
    operator = process.start([*command, f"--kubeconfig={kubeconfig}"], cwd=REPOSITORY, log=log, dies_with_parent=True)
    try:
        core.create_namespaced_config_map(tenant, {"metadata": {"name": "sums"}, "data": {"train.jsonl": EXAMPLE}})
        custom.create_namespaced_custom_object("clora.dev", "v1alpha1", tenant, "loraengines", _engine("mine"))
        custom.create_namespaced_custom_object("clora.dev", "v1alpha1", tenant, "loraexperiments", EXPERIMENT)
        wait_until(lambda: bool(apps.list_namespaced_stateful_set(tenant).items), "the engine's StatefulSet")

        def listed(plural: str) -> list[dict[str, Any]]:
            found = custom.list_namespaced_custom_object("clora.dev", "v1alpha1", tenant, plural)
            return list(found["items"])

        def told(plural: str) -> bool:
            return bool(listed(plural)[0].get("status", {}).get("conditions"))

        wait_until(lambda: told("loraengines") and told("loraexperiments"), "the status of both")
        wait_until(lambda: bool(core.list_namespaced_event(tenant).items), "an event")
        assert core.list_namespaced_service(tenant).items[0].metadata.name == "mine"
        assert core.read_namespaced_persistent_volume_claim("mine-storage", tenant).metadata.name == "mine-storage"
        assert [secret.metadata.name for secret in core.list_namespaced_secret(tenant).items] == ["mine-token"]
        custom.delete_namespaced_custom_object("clora.dev", "v1alpha1", tenant, "loraexperiments", "sums")
        wait_until(
            lambda: (
                not custom.list_namespaced_custom_object("clora.dev", "v1alpha1", tenant, "loraexperiments")["items"]
            ),
            "the deleted experiment to be released",
        )
        assert operator.alive()
    finally:
        operator.end()
        words = log.read_text()
        _helm(bare, "uninstall", "clora", "--namespace", system, "--wait")
    requests = _requests(bare, f"system:serviceaccount:{system}:clora")
    assert [request for request in requests if request[2] in (401, 403)] == [], words
    asked = {(verb, resource) for verb, resource, _code in requests}
    assert {("get", "configmaps"), ("get", "pods"), ("get", "secrets"), ("watch", "statefulsets")} <= asked
