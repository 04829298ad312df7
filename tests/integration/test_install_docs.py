"""docs/install.md's admission policy on the real API server: it keeps a class for some namespaces, and stops no one."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from kubernetes import client, utils
from kubernetes.client.exceptions import ApiException

from tests.cluster_fixtures import wait_until
from tests.integration.test_crds import Api

pytestmark = pytest.mark.integration

PAGE = Path(__file__).resolve().parents[2] / "docs" / "install.md"
NAME = "clora-urgent"
WORDS = "the PriorityClass urgent is for namespaces with the label clora-urgent=allowed"


@contextmanager
def policy(kube: client.ApiClient) -> Iterator[None]:
    """The page's, applied as it stands."""
    (block,) = re.findall(r"(?m)^    apiVersion: admissionregistration(?:.*\n(?=    |\n))*.*\n", PAGE.read_text())
    manifests = list(yaml.safe_load_all(textwrap.dedent(block)))
    assert [m["kind"] for m in manifests] == ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
    for manifest in manifests:
        utils.create_from_dict(kube, manifest)
    try:
        yield
    finally:
        admission = client.AdmissionregistrationV1Api(kube)
        admission.delete_validating_admission_policy_binding(NAME)
        admission.delete_validating_admission_policy(NAME)


def denied(api: Api, name: str, priority: str) -> str:
    """What the API server says to a new experiment of that class; empty where it takes it."""
    try:
        api.create(name=name, priorityClassName=priority)
    except ApiException as refused:
        return str(json.loads(refused.body)["message"])
    return ""


def test_a_class_is_kept_for_some_namespaces(kube: client.ApiClient, namespace: str) -> None:
    api, core = Api(kube, namespace), client.CoreV1Api(kube)
    names = (f"try-{number}" for number in range(1000))
    api.create(name="earlier", priorityClassName="urgent")
    with policy(kube):
        wait_until(lambda: WORDS in denied(api, next(names), "urgent"), "the policy to take effect")
        api.patch({"suspend": True}, name="earlier")
        assert denied(api, "other-class", "high") == ""
        with pytest.raises(ApiException, match="for namespaces with the label"):
            api.patch({"priorityClassName": "urgent"}, name="other-class")
        core.patch_namespace(namespace, {"metadata": {"labels": {"clora-urgent": "allowed"}}})
        wait_until(lambda: denied(api, next(names), "urgent") == "", "the namespace's label to count")
