"""A release's whole life beside experiments that train: upgrade, rollback, uninstall, another release.

What people made and what their engines do is never touched. The engine is the simulated one, beside the cluster.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from clora_api import FINALIZER, GROUP
from tests.cluster_fixtures import wait_until
from tests.integration.chart_fixtures import CHART, ChartCluster, chart_cluster, own_ports
from tests.integration.operator_fixtures import Cluster, EngineProcess, status

pytestmark = pytest.mark.integration

SLOW = {"stepSeconds": "0.4"}
QUICK = {"RESYNC_SECONDS": "5", "PROGRESS_WRITE_SECONDS": "0.2", "UNREACHABLE_GRACE_SECONDS": "2"}


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartCluster]:
    with chart_cluster(tmp_path_factory.mktemp("chart")) as made:
        yield made


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    made = EngineProcess(tmp_path / "engine")
    made.start()
    yield made
    made.kill()


@pytest.fixture
def tenant(charts: ChartCluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    name = request.node.name.replace("_", "-")[:50].strip("-")
    cluster = Cluster(charts.api, name)
    cluster.core.create_namespace({"metadata": {"name": name}})
    yield cluster
    cluster.core.delete_namespace(name)


def step(cluster: Cluster, name: str) -> int:
    return int(status(cluster.get(name)).get("progress", {}).get("step", 0))


def finalizers(cluster: Cluster, name: str) -> list[str]:
    return list(cluster.get(name)["metadata"].get("finalizers", []))


def trains_on(cluster: Cluster, name: str) -> None:
    before = step(cluster, name)
    cluster.wait(name, lambda o: status(o).get("progress", {}).get("step", 0) >= before + 2, "two more steps")


def workload(charts: ChartCluster, namespace: str) -> dict[str, Any]:
    """What would restart the engine's pod if it changed."""
    found = client.AppsV1Api(charts.api).read_namespaced_stateful_set("ours", namespace)
    return {
        "uid": found.metadata.uid,
        "generation": found.metadata.generation,
        "template": charts.api.sanitize_for_serialization(found.spec.template),
    }


def never_attached_twice(engine: EngineProcess, uid: str) -> bool:
    return len(engine.events("attach", uid)) == 1


def test_upgrade_rollback_uninstall_and_another_release(
    charts: ChartCluster, engine: EngineProcess, tenant: Cluster, tmp_path: Path
) -> None:
    """From a release whose experiments had no ttlSecondsAfterFinished yet."""
    place, new_field = ("--namespace=first", "--wait", "--timeout=120s"), "ttlSecondsAfterFinished"
    earlier = chart_without(tmp_path, new_field)
    charts.install("first", *own_ports(**QUICK), name="one", chart=earlier)
    assert new_field not in spec_fields(charts)
    tenant.engine(engine.endpoint)
    tenant.create("loraengines", "ours", {"model": {"name": "example/model"}, "image": "clora-engine:0.1.0"})
    uid = tenant.experiment("lives", max_steps=100_000, arguments=SLOW)
    done_uid = tenant.experiment("done", max_steps=2, deletionPolicy="Delete")
    leaver = tenant.experiment("leaves", max_steps=100_000, arguments=SLOW)
    tenant.wait_state("done", "Succeeded")
    trains_on(tenant, "lives")
    apps = client.AppsV1Api(charts.api)
    wait_until(lambda: bool(apps.list_namespaced_stateful_set(tenant.namespace).items), "the engine's StatefulSet")
    before, done = workload(charts, tenant.namespace), tenant.get("done")

    charts.helm("upgrade", "one", str(CHART), *place, *own_ports(**QUICK, WORKERS="3"))
    assert new_field in spec_fields(charts), "an upgrade brings the kinds' new fields"
    assert tenant.get("lives")["metadata"]["uid"] == uid
    trains_on(tenant, "lives")
    charts.helm("rollback", "one", *place)
    trains_on(tenant, "lives")
    assert workload(charts, tenant.namespace) == before, "no engine restarts with the operator"

    charts.uninstall("first", name="one")
    assert [finalizers(tenant, name) for name in ("lives", "done", "leaves")] == [[], [], []]
    kept = tenant.get("lives")
    assert kept["metadata"]["uid"] == uid
    assert status(kept)["state"] == "Running"
    assert "deletionTimestamp" not in kept["metadata"]
    committed = len(engine.commits(uid))
    wait_until(lambda: len(engine.commits(uid)) > committed + 1, "the engine to go on without an operator")
    assert workload(charts, tenant.namespace) == before
    tenant.delete("leaves")
    assert not tenant.exists("leaves"), "gone at once: nobody has to let go of it"

    charts.install("second", *own_ports(**QUICK), name="two")
    wait_until(lambda: finalizers(tenant, "lives") == [FINALIZER], "the new operator's finalizer")
    trains_on(tenant, "lives")
    wait_until(lambda: leaver not in engine.uids(), "the engine to be rid of what was deleted without an operator")
    again = tenant.get("lives")
    assert (again["metadata"]["uid"], status(again)["restarts"]) == (uid, 0)
    assert never_attached_twice(engine, uid)
    assert status(tenant.get("done")) == status(done), "what has ended is left alone"
    wait_until(lambda: finalizers(tenant, "done") == [FINALIZER], "the finalizer of what has ended")
    assert engine.has_files(done_uid)
    tenant.delete("done")
    tenant.wait_gone("done")
    assert not engine.has_files(done_uid), "its files go with it, as if nobody had been uninstalled"
    assert workload(charts, tenant.namespace) == before
    charts.uninstall("second", name="two")


def test_nothing_hangs_after_an_uninstall(charts: ChartCluster, engine: EngineProcess, tenant: Cluster) -> None:
    charts.install("third", *own_ports(**QUICK, RELEASE_DEADLINE_SECONDS="600"))
    tenant.engine(engine.endpoint)
    for name in ("dying", "shared", "idle"):
        tenant.experiment(name, max_steps=100_000, arguments=SLOW)
        tenant.wait_state(name, "Running")
    theirs = "example.com/theirs"
    tenant.patch("shared", {"metadata": {"finalizers": [theirs, FINALIZER]}})
    engine.kill()
    tenant.delete("dying")  # waits for the last checkpoint of an engine that is gone
    assert tenant.exists("dying")

    charts.uninstall("third")
    assert not tenant.exists("dying")
    assert finalizers(tenant, "shared") == [theirs], "others' finalizers are theirs"
    tenant.patch("shared", {"metadata": {"finalizers": None}})
    tenant.core.create_namespace({"metadata": {"name": "ends"}})
    ending = Cluster(charts.api, "ends")
    ending.experiment("in-it")
    ending.core.delete_namespace("ends")
    wait_until(lambda: _namespace_gone(ending), "a namespace with experiments to end without an operator")


def _namespace_gone(cluster: Cluster) -> bool:
    names = [item.metadata.name for item in cluster.core.list_namespace().items]
    return cluster.namespace not in names


def test_an_operator_that_does_not_end_stops_the_uninstall_and_nothing_is_lost(
    charts: ChartCluster, tenant: Cluster
) -> None:
    """As on a node that is lost: a pod of the operator's that nobody reports as ended."""
    charts.install("fourth", "--set", "uninstall.timeoutSeconds=20")
    tenant.experiment("waits")
    wait_until(lambda: finalizers(tenant, "waits") == [FINALIZER], "the operator's finalizer")
    apps = client.AppsV1Api(charts.api)
    template = apps.read_namespaced_deployment("clora", "fourth").spec.template
    pod = {
        "metadata": {"name": "lost", "labels": template.metadata.labels},
        "spec": {"containers": [{"name": "operator", "image": "never-started:1"}]},
    }
    tenant.core.create_namespaced_pod("fourth", pod)
    refused = charts.try_helm("uninstall", "clora", "--namespace=fourth", "--timeout=180s")
    assert refused.returncode != 0
    log = charts.node.log("clora-uninstall")
    assert "the operator still runs (pods lost)" in log
    assert "to keep the release: kubectl scale deployment/clora --namespace fourth --replicas=1" in log
    assert finalizers(tenant, "waits") == [FINALIZER]
    assert apps.read_namespaced_deployment("clora", "fourth").spec.replicas == 0

    tenant.core.delete_namespaced_pod("lost", "fourth", grace_period_seconds=0)
    charts.uninstall("fourth")
    assert finalizers(tenant, "waits") == []


def test_a_watched_namespace_that_is_gone_does_not_stop_the_uninstall(charts: ChartCluster, tenant: Cluster) -> None:
    tenant.core.create_namespace({"metadata": {"name": "went"}})
    charts.install("fifth", "--set", f"watchNamespaces={{went,{tenant.namespace}}}")
    tenant.experiment("stays")
    wait_until(lambda: finalizers(tenant, "stays") == [FINALIZER], "the operator's finalizer")
    tenant.core.delete_namespace("went")
    wait_until(lambda: _namespace_gone(Cluster(charts.api, "went")), "the namespace to be gone")
    charts.uninstall("fifth")
    assert finalizers(tenant, "stays") == []


def chart_without(folder: Path, field: str) -> Path:
    """clora's chart, with a LoRAExperiment that lacks an optional field of its spec."""
    chart = folder / "earlier" / "clora"
    shutil.copytree(CHART, chart)
    path = chart / "files" / "crds" / f"loraexperiments.{GROUP}.yaml"
    definition = yaml.safe_load(path.read_text())
    for version in definition["spec"]["versions"]:
        del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][field]
    path.write_text(json.dumps(definition))  # YAML too; PyYAML would write "1e-4" without its quotes
    return chart


def spec_fields(charts: ChartCluster) -> set[str]:
    found = client.ApiextensionsV1Api(charts.api).read_custom_resource_definition(f"loraexperiments.{GROUP}")
    (version,) = found.spec.versions
    return set(version.var_schema.open_apiv3_schema.properties["spec"].properties)


def test_kinds_that_go_with_the_release_go(charts: ChartCluster, tenant: Cluster) -> None:
    """With crds.keep=false. Last, for it takes every experiment along."""
    charts.install("sixth", "--set", "crds.keep=false")
    tenant.experiment("goes")
    wait_until(lambda: finalizers(tenant, "goes") == [FINALIZER], "the operator's finalizer")
    charts.uninstall("sixth")
    kinds = client.ApiextensionsV1Api(charts.api).list_custom_resource_definition
    wait_until(lambda: not kinds().items, "the kinds to be gone")
