"""What the accounts of the chart may do, as the API server itself answers (`kubectl auth can-i --list`).

The operator's rights must be those that every test of the operator runs with (operator_fixtures.RULES), to the verb.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

from local.control_plane import ControlPlane
from local.tools import tools
from tests.integration.chart_fixtures import CHART
from tests.integration.operator_fixtures import CLUSTER_RULES, RULES
from tests.integration.process_node import account_kubeconfig

pytestmark = pytest.mark.integration

Right = tuple[str, str, str, tuple[str, ...]]  # group, resource, verb, names (none: all)
RELEASE = "rights"
# What any of these would let the operator, or who takes its account over, do to others.
NEVER = {
    ("", "secrets", "list"),
    ("", "secrets", "watch"),
    ("", "secrets", "delete"),
    ("", "persistentvolumeclaims", "delete"),
    ("", "pods", "create"),
    ("", "pods/exec", "create"),
    ("", "nodes", "get"),
    ("", "serviceaccounts", "impersonate"),
    ("", "serviceaccounts/token", "create"),
    ("apps", "statefulsets", "delete"),
    ("leaderworkerset.x-k8s.io", "leaderworkersets", "delete"),
    ("clora.dev", "loraengines", "delete"),
    ("clora.dev", "loraexperiments", "deletecollection"),
    ("rbac.authorization.k8s.io", "roles", "bind"),
    ("rbac.authorization.k8s.io", "roles", "escalate"),
}


@pytest.fixture(params=["everywhere", "named"])
def system(control_plane: ControlPlane, namespace: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A release in `namespace`, which is also the one that it watches where it watches by name."""
    helm = [str(tools() / "helm"), f"--kubeconfig={control_plane.kubeconfig}", f"--namespace={namespace}"]
    flags = ["--set", "crds.enabled=false"]
    flags += ["--set", f"watchNamespaces={{{namespace}}}"] if request.param == "named" else []
    subprocess.run([*helm, "install", RELEASE, str(CHART), *flags], check=True, capture_output=True, timeout=120)
    yield namespace
    # no pod runs here, nor would the hook
    subprocess.run([*helm, "uninstall", RELEASE, "--no-hooks"], check=True, capture_output=True, timeout=120)


def _rights(
    cluster: ControlPlane, kube: client.ApiClient, account: tuple[str, str], within: str, at: Path
) -> set[Right]:
    """Of a ServiceAccount (namespace, name) within a namespace, one by one."""
    kubeconfig = account_kubeconfig(cluster, kube, *account, at / f"{account[1]}.kubeconfig")
    with config.new_client_from_config(str(kubeconfig)) as api:
        review = client.AuthorizationV1Api(api).create_self_subject_rules_review({"spec": {"namespace": within}})
    assert not review.status.incomplete
    return {
        (group, resource, verb, tuple(rule.resource_names or ()))
        for rule in review.status.resource_rules
        for group in rule.api_groups or ()
        for resource in rule.resources or ()
        for verb in rule.verbs
    }


def _expand(rules: list[dict[str, Any]]) -> set[Right]:
    return {
        (group, resource, verb, ())
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_operator_may_do_what_it_needs_and_nothing_else(
    control_plane: ControlPlane, kube: client.ApiClient, system: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    client.CoreV1Api(kube).create_namespaced_service_account(system, {"metadata": {"name": "nobody"}})
    everywhere = "everywhere" in request.node.name
    for within in (system, "default"):
        anybodys = _rights(control_plane, kube, (system, "nobody"), within, tmp_path)
        granted = _rights(control_plane, kube, (system, f"{RELEASE}-clora"), within, tmp_path)
        more = granted - anybodys
        assert not any("*" in part for right in more for part in right[:3])
        assert not NEVER & {right[:3] for right in more}
        if everywhere:
            assert more == _expand([*RULES, *CLUSTER_RULES])
        else:
            assert more == (_expand(RULES) if within == system else set())


def test_the_uninstall_hook_may_stop_this_operator_and_let_go(
    control_plane: ControlPlane, kube: client.ApiClient, system: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Before an uninstall only where it watches by name; its other rights come and go with the hook (test_hooks.py)."""
    core = client.CoreV1Api(kube)
    for name in ("nobody", f"{RELEASE}-clora-uninstall"):
        core.create_namespaced_service_account(system, {"metadata": {"name": name}})
    account = (system, f"{RELEASE}-clora-uninstall")
    more = _rights(control_plane, kube, account, system, tmp_path)
    more -= _rights(control_plane, kube, (system, "nobody"), system, tmp_path)
    named = {("clora.dev", "loraexperiments", verb, ()) for verb in ("list", "patch")}
    assert more == (set() if "everywhere" in request.node.name else named)
