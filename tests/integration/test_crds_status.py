"""What the API server stored under other rules: its status and finalizers are written all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from clora_api import FINALIZER, GROUP, VERSION
from tests.cluster_fixtures import wait_until
from tests.integration.test_crds import CRDS, REFUSED_ENGINES, REFUSED_EXPERIMENTS, Api, api

pytestmark = pytest.mark.integration
__all__ = ["api"]

TABLES = {"loraexperiments": REFUSED_EXPERIMENTS, "loraengines": REFUSED_ENGINES}
RULES = "x-kubernetes-validations"


@pytest.mark.parametrize("plural", sorted(TABLES))
def test_no_rule_blocks_a_status_write(kube: client.ApiClient, namespace: str, api: Api, plural: str) -> None:
    """An object for each of the rules that it breaks, made as by an earlier release that did not have them."""
    custom = client.CustomObjectsApi(kube)
    definition = yaml.safe_load((CRDS / f"{plural}.{GROUP}.yaml").read_text())
    messages = [rule["message"] for schema in schemas(definition) for rule in schema.get(RULES, ())]
    broken = [changes for changes, words in TABLES[plural] if any(words in message for message in messages)]
    assert len(broken) >= 8

    def taken(name: str, changes: dict[str, Any]) -> bool:
        try:
            api.create(plural, name, **changes)
        except ApiException as error:
            if error.status != 422:
                raise
            return False
        return True

    with without_rules(kube, plural):
        wait_until(lambda: taken("first", broken[0]), "the API server to forget the rules")
        for number, changes in enumerate(broken):
            api.create(plural, f"broken-{number}", **changes)
    probes = iter(range(1000))
    wait_until(lambda: not taken(f"probe-{next(probes)}", broken[0]), "the API server to know the rules again")

    for number in range(len(broken)):
        at = (GROUP, VERSION, namespace, plural, f"broken-{number}")
        written = custom.patch_namespaced_custom_object_status(*at, {"status": {"observedGeneration": 7}})
        assert written["status"]["observedGeneration"] == 7
        for finalizers in ([FINALIZER], None):  # the operator's other write: nothing is to stay for ever
            custom.patch_namespaced_custom_object(*at, {"metadata": {"finalizers": finalizers}})


@contextmanager
def without_rules(kube: client.ApiClient, plural: str) -> Iterator[None]:
    """The kind without its CEL rules, until the end of the block."""
    call, name = client.ApiextensionsV1Api(kube).patch_custom_resource_definition, f"{plural}.{GROUP}"
    definition, loosened = (yaml.safe_load((CRDS / f"{name}.yaml").read_text()) for _ in range(2))
    for schema in schemas(loosened):
        schema.pop(RULES, None)
    try:
        call(name, {"spec": {"versions": loosened["spec"]["versions"]}})
        yield
    finally:
        call(name, {"spec": {"versions": definition["spec"]["versions"]}})


def schemas(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from schemas(inner)
