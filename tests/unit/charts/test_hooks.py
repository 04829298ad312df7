"""The uninstall hook and the tests of the operator's chart, as helm would make them."""

from __future__ import annotations

from typing import Any

from tests.unit.charts.rendering import hook, of_kind, render


def _jobs(*settings: str) -> list[dict[str, Any]]:
    return of_kind(render(*settings), "Job")


def test_the_uninstall_hook_leaves_nothing_and_is_no_pod_of_the_operator() -> None:
    documents = [document for document in render() if hook(document) == "pre-delete"]
    assert sorted(document["kind"] for document in documents) == [
        "ClusterRole",
        "ClusterRoleBinding",
        "Job",
        "Role",
        "RoleBinding",
        "ServiceAccount",
    ]
    for document in documents:
        policy = document["metadata"]["annotations"]["helm.sh/hook-delete-policy"].split(",")
        assert {"before-hook-creation", "hook-succeeded", "hook-failed"} == set(policy)
    (job,) = of_kind(documents, "Job")
    (deployment,) = of_kind(render(), "Deployment")
    labels = job["spec"]["template"]["metadata"]["labels"]
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert not set(selector) & set(labels), "or it would wait for its own end, and answer for the operator"


def test_the_uninstall_hook_runs_as_the_operator_does_with_rights_of_its_own() -> None:
    (job,), (deployment,) = _jobs(), of_kind(render(), "Deployment")
    pod, other = job["spec"]["template"]["spec"], deployment["spec"]["template"]["spec"]
    for key in ("image", "imagePullPolicy", "securityContext"):
        assert pod["containers"][0][key] == other["containers"][0][key]
    assert pod["securityContext"] == other["securityContext"]
    assert pod["serviceAccountName"] != other["serviceAccountName"]
    assert pod["containers"][0]["args"] == [
        "release-finalizers",
        "--deployment=clora-system/clora",
        "--timeout-seconds=240",
        "--all-namespaces",
    ]
    (named,) = _jobs('watchNamespaces=["a", "b"]')
    assert named["spec"]["template"]["spec"]["containers"][0]["args"][-2:] == ["--namespace=a", "--namespace=b"]
    roles = [role for kind in ("Role", "ClusterRole") for role in of_kind(render(), kind) if hook(role)]
    granted = {
        (resource, verb)
        for role in roles
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {
        ("deployments", "get"),
        ("deployments/scale", "patch"),
        ("pods", "list"),
        ("loraexperiments", "list"),
        ("loraexperiments", "patch"),
    }
    assert _jobs('uninstall={"releaseFinalizers": false}') == []


def test_every_pod_comes_from_the_mirror_with_its_secret() -> None:
    digest = "sha256:" + "a" * 64
    image = f'image={{"registry": "mirror.example.com/clora/", "digest": "{digest}"}}'
    for document in [*render(image, 'imagePullSecrets=[{"name": "mirror"}]')]:
        if document["kind"] in ("Job", "Deployment"):
            pod = document["spec"]["template"]["spec"]
        elif document["kind"] == "Pod":
            pod = document["spec"]
        else:
            continue
        assert pod["imagePullSecrets"] == [{"name": "mirror"}]
        assert [each["image"] for each in pod["containers"]] == [f"mirror.example.com/clora/clora-operator@{digest}"]


def test_the_test_waits_for_this_operator_with_one_right() -> None:
    documents = [document for document in render() if hook(document) == "test"]
    (pod,), (role,) = of_kind(documents, "Pod"), of_kind(documents, "Role")
    assert pod["spec"]["containers"][0]["args"][:2] == ["wait-ready", "--deployment=clora-system/clora"]
    assert role["rules"] == [
        {"apiGroups": ["apps"], "resources": ["deployments"], "resourceNames": ["clora"], "verbs": ["get"]}
    ]
    assert pod["spec"]["serviceAccountName"] == role["metadata"]["name"]
