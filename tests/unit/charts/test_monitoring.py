"""What the chart hands to Prometheus, Grafana and the network, all off unless asked for.

The alerts and the dashboard may only speak of metrics that the code exports.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.registry import Collector

from clora_operator import metrics as operator_metrics
from clora_operator import workload
from clora_operator.settings import IngressPeers
from tests.unit.charts.rendering import CHART, helm, of_kind, render
from tests.unit.operator.factories import engine

MONITORING = CHART / "files" / "monitoring"
ALL = (
    *(f'metrics.{each}={{"enabled": true}}' for each in ("serviceMonitor", "prometheusRule", "dashboard")),
    'networkPolicy={"enabled": true}',
)


def _alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return found


def _expressions() -> list[str]:
    alerts = [rule["expr"] for rule in _alerts()]
    return alerts + [target["expr"] for panel in _panels() for target in panel.get("targets", [])]


def _names(registry: Any) -> set[str]:
    """Of every series, histograms' buckets among them."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {family.name + end for family in registry.collect() for end in suffixes.get(family.type, ())}


class _Idle:
    """A supervisor whose sampler has done nothing yet: all that the collector asks of one."""

    epoch, ready = 1, True

    def phases(self) -> dict[str, int]:
        return {}

    def sampler_stats(self) -> Any:
        from clora_engine.gate import GateStats
        from clora_engine.sampler import Counts, SamplerStats

        return SamplerStats(1, True, 0, 0, 0, 0, 0, 0, (), GateStats(8, 0, 0, 0, 0, 0.0), 0.0, Counts())

    def trainer_busy_seconds(self) -> float:
        return 0.0


def _exported_by_engines() -> set[str]:
    from clora_engine.server.metrics import EngineCollector  # with torch, which the other tests here need not load

    collector: Collector = EngineCollector(_Idle())  # type: ignore[arg-type]
    registry = CollectorRegistry()
    registry.register(collector)
    return _names(registry)


def test_alerts_and_dashboard_speak_of_metrics_that_are_exported() -> None:
    assert operator_metrics.QUEUE_DEPTH is not None
    exported = {name for name in _names(REGISTRY) if name.startswith("clora_operator_")} | _exported_by_engines()
    used = {name for text in _expressions() for name in re.findall(r"\bclora_[a-z_]+", text)}
    assert len(used) > 15
    assert used - exported == set()


def test_labels_that_are_asked_for_are_those_of_the_code() -> None:
    """Error names are classes of the client's."""
    from clora_operator import engine_client

    names = re.findall(r"\b[A-Z]\w+Error\b", " ".join(_expressions()))
    assert names
    for name in names:
        assert issubclass(getattr(engine_client, name), engine_client.EngineError)


@pytest.mark.parametrize("rule", _alerts(), ids=lambda rule: rule["alert"])
def test_every_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert len(rule["annotations"]["summary"]) < 100
    assert rule["annotations"]["description"].endswith(".")


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in _panels():
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_everything_optional_is_off() -> None:
    kinds = {document["kind"] for document in render()}
    assert not kinds & {"ServiceMonitor", "PrometheusRule", "ConfigMap", "NetworkPolicy"}


def test_what_is_asked_for_is_there_as_written() -> None:
    documents = render(*ALL)
    (rule,), (dashboard,) = of_kind(documents, "PrometheusRule"), of_kind(documents, "ConfigMap")
    assert [each for group in rule["spec"]["groups"] for each in group["rules"]] == _alerts()
    assert json.loads(dashboard["data"]["clora.json"])["panels"] == _panels()
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_monitors_find_the_operators_service_and_those_of_engines() -> None:
    documents = render(*ALL)
    mine, engines = (monitor["spec"] for monitor in of_kind(documents, "ServiceMonitor"))
    (service,) = of_kind(documents, "Service")
    assert mine["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert mine["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    theirs = next(m for m in workload.manifests(engine(image="x")) if m["kind"] == "Service")
    assert engines["selector"]["matchLabels"].items() <= theirs["metadata"]["labels"].items()
    assert engines["endpoints"][0]["port"] == theirs["spec"]["ports"][0]["name"]
    assert engines["namespaceSelector"] == {"any": True}
    named = of_kind(render(*ALL, 'watchNamespaces=["a"]'), "ServiceMonitor")[1]["spec"]
    assert named["namespaceSelector"] == {"matchNames": ["a"]}


def test_a_monitor_without_a_service_is_refused() -> None:
    wrong = 'metrics={"service": false, "serviceMonitor": {"enabled": true}}'
    done = helm("template", "clora", str(CHART), "--set-json", wrong)
    assert done.returncode != 0
    assert "metrics.serviceMonitor.enabled: it needs metrics.service" in done.stderr


def test_the_network_policy_is_about_the_operator_and_lets_it_reach_its_engines() -> None:
    policy = of_kind(render(*ALL), "NetworkPolicy")[0]["spec"]
    (deployment,) = of_kind(render(), "Deployment")
    assert policy["podSelector"] == deployment["spec"]["selector"]
    template = next(m for m in workload.manifests(engine(image="x")) if m["kind"] == "StatefulSet")["spec"]["template"]
    (to_engines,) = [rule for rule in policy["egress"] if "to" in rule]
    selector = to_engines["to"][0]["podSelector"]["matchLabels"]
    assert selector.items() <= template["metadata"]["labels"].items()
    assert to_engines["ports"] == [{"port": template["spec"]["containers"][0]["ports"][0]["name"]}]
    peer = '[{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]'
    restricted = render(f'networkPolicy={{"enabled": true, "metricsFrom": {peer}}}')
    (narrow,) = of_kind(restricted, "NetworkPolicy")
    assert narrow["spec"]["ingress"][1] == {"ports": [{"port": "metrics"}], "from": json.loads(peer)}


def test_engines_are_reached_by_this_operator_and_whom_it_is_told() -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    documents = render(f'networkPolicy={{"engines": {{"from": [{json.dumps(prometheus)}]}}}}')
    (deployment,) = of_kind(documents, "Deployment")
    text = _environment(deployment)["CLORA_OPERATOR_ENGINE_INGRESS_FROM"]
    operator, other = json.loads(IngressPeers(text))
    assert operator["podSelector"] == deployment["spec"]["selector"]
    assert operator["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "clora-system"}}
    assert other == prometheus
    assert "CLORA_OPERATOR_ENGINE_TENANTS_FROM" not in _environment(deployment)
    documents = render(f'networkPolicy={{"engines": {{"tenantsFrom": [{json.dumps(prometheus)}]}}}}')
    text = _environment(of_kind(documents, "Deployment")[0])["CLORA_OPERATOR_ENGINE_TENANTS_FROM"]
    assert json.loads(IngressPeers(text)) == [prometheus]
    off = render('networkPolicy={"engines": {"enabled": false}}')
    assert "CLORA_OPERATOR_ENGINE_INGRESS_FROM" not in _environment(of_kind(off, "Deployment")[0])
    assert "networkpolicies" not in json.dumps(of_kind(off, "ClusterRole"))


def _environment(deployment: dict[str, Any]) -> dict[str, str]:
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    return {entry["name"]: entry["value"] for entry in container["env"]}
