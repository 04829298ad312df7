"""What the operator's chart hands to the Prometheus operator, against that one's own CRDs on the real API server."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from tests.cluster_fixtures import installed_kinds
from tests.unit.charts.rendering import of_kind, render

pytestmark = pytest.mark.integration

CRDS = Path(__file__).resolve().parents[1] / "data" / "crds" / "prometheus-operator"
GROUP, VERSION = "monitoring.coreos.com", "v1"
PLURALS = {"ServiceMonitor": "servicemonitors", "PrometheusRule": "prometheusrules"}
LABELS = {"labels": {"release": "prometheus"}}
MONITORING = (
    f"metrics.serviceMonitor={json.dumps({'enabled': True, 'interval': '90s', **LABELS})}",
    f"metrics.prometheusRule={json.dumps({'enabled': True, **LABELS})}",
)


class Monitoring:
    """An API server that knows the Prometheus operator's kinds, and refuses unknown fields."""

    def __init__(self, kube: client.ApiClient, namespace: str) -> None:
        self._api, self._namespace = client.CustomObjectsApi(kube), namespace

    def create(self, document: dict[str, Any]) -> dict[str, Any]:
        body = copy.deepcopy(document)
        body["metadata"]["namespace"] = self._namespace
        plural = PLURALS[document["kind"]]
        create = self._api.create_namespaced_custom_object
        return dict(create(GROUP, VERSION, self._namespace, plural, body, field_validation="Strict"))


@pytest.fixture(scope="module")
def kinds(kube: client.ApiClient) -> Iterator[None]:
    with installed_kinds(kube, CRDS):
        yield


@pytest.fixture
def monitoring(kinds: None, kube: client.ApiClient, namespace: str) -> Monitoring:
    return Monitoring(kube, namespace)


@pytest.mark.parametrize("more", [(), ('watchNamespaces=["a", "b"]',)])
def test_monitors_and_rules_are_what_the_prometheus_operator_takes(
    monitoring: Monitoring, more: tuple[str, ...]
) -> None:
    documents = render(*MONITORING, *more)
    monitors, rules = of_kind(documents, "ServiceMonitor"), of_kind(documents, "PrometheusRule")
    assert (len(monitors), len(rules)) == (2, 1)
    for document in (*monitors, *rules):
        stored = monitoring.create(document)
        assert stored["metadata"]["labels"]["release"] == "prometheus"


def test_what_they_would_not_take_is_refused_here(monitoring: Monitoring) -> None:
    """So that the test above can fail."""
    monitor, rule = (of_kind(render(*MONITORING), kind)[0] for kind in PLURALS)
    monitor["spec"]["endpoints"][0]["interval"] = "often"
    with pytest.raises(ApiException, match="interval"):
        monitoring.create(monitor)
    monitor["spec"]["endpoints"][0] = {"port": "metrics", "intervall": "30s"}
    with pytest.raises(ApiException, match="intervall"):
        monitoring.create(monitor)
    rule["spec"]["groups"][0]["rules"][0]["for"] = "a while"
    with pytest.raises(ApiException, match="for"):
        monitoring.create(rule)
