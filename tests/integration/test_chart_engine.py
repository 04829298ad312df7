"""charts/clora-engine on a real API server, with the operator that the other chart installs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from local.tools import tools
from tests.integration.chart_fixtures import ENGINE_CHART, ChartCluster, chart_cluster, own_ports
from tests.integration.operator_fixtures import TOKEN, Cluster, EngineProcess, condition

pytestmark = pytest.mark.integration

TENANT = "team"


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartCluster]:
    """With the operator."""
    with chart_cluster(tmp_path_factory.mktemp("chart")) as made:
        made.install("clora-system", *own_ports(RESYNC_SECONDS="5"))
        Cluster(made.api, TENANT).core.create_namespace({"metadata": {"name": TENANT}})
        yield made


@pytest.fixture
def team(charts: ChartCluster) -> Cluster:
    return Cluster(charts.api, TENANT)


def dry_run(charts: ChartCluster, *flags: str) -> subprocess.CompletedProcess[str]:
    """What `helm template` renders, through the API server's whole admission, kept nowhere."""
    manifests = charts.helm("template", "warm", str(ENGINE_CHART), "--no-hooks", "--namespace", TENANT, *flags)
    command = [str(tools() / "kubectl"), f"--kubeconfig={charts.plane.kubeconfig}", "apply", "--server-side"]
    command += ["--dry-run=server", "--validate=strict", "-f", "-"]
    return subprocess.run(command, input=manifests, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("preset", ["h200x8", "cpu"])
@pytest.mark.parametrize("spec", [{}, {"model": {"claimName": "models", "path": "a/b"}, "sampler": {"gpus": 1}}])
def test_the_api_server_takes_every_preset(charts: ChartCluster, preset: str, spec: dict[str, Any]) -> None:
    done = dry_run(charts, "--set", f"preset={preset}", f"--set-json=spec={json.dumps(spec)}")
    assert done.returncode == 0, done.stderr
    assert "loraengine.clora.dev/warm serverside-applied (server dry run)" in done.stdout


def test_what_only_the_api_server_can_refuse_is_refused_in_words(charts: ChartCluster) -> None:
    storage = {"existingClaim": "mine", "storageClassName": "fast"}
    done = dry_run(charts, f"--set-json=spec={json.dumps({'storage': storage})}")
    assert done.returncode != 0
    assert "storageClassName has no effect on an existingClaim" in done.stderr


def test_the_operator_runs_it_and_an_upgrade_waits_for_its_pod(charts: ChartCluster, team: Cluster) -> None:
    place = ("--namespace", TENANT)
    notes = charts.helm("install", "small", str(ENGINE_CHART), *place, "--set", "preset=cpu")
    assert "engineRef: {name: small}" in notes
    team.wait_reason("small", "Accepted", "SpecValid", plural="loraengines")
    changed = ("--set", "preset=cpu", "--set", "spec.sampler.maxNumSeqs=16", "--set", "test.timeoutSeconds=1")
    charts.helm("upgrade", "small", str(ENGINE_CHART), *place, *changed)
    assert team.get("small", "loraengines")["spec"]["sampler"]["maxNumSeqs"] == 16
    failed = charts.try_helm("test", "small", *place, "--timeout=60s")
    assert failed.returncode != 0, "no pod of an engine runs here"
    assert "LoRAEngine team/small is not ready: Ready=" in charts.node.log("small-test")
    charts.helm("uninstall", "small", *place)
    team.wait_gone("small", plural="loraengines")
    assert team.core.read_namespaced_persistent_volume_claim("small-storage", TENANT), "commits outlive their engine"


def test_an_engine_elsewhere_becomes_ready_and_helm_test_says_so(
    charts: ChartCluster, team: Cluster, tmp_path: Path
) -> None:
    engine = EngineProcess(tmp_path / "engine")
    engine.start()
    try:
        secret = {"metadata": {"name": "warm-token"}, "stringData": {"token": TOKEN}}
        team.core.create_namespaced_secret(TENANT, secret)
        spec = {
            "endpoint": engine.endpoint,
            "tokenSecretRef": {"name": "warm-token"},
            "model": {"name": "simulated"},
        }
        flags = ["--set=preset=", f"--set-json=spec={json.dumps(spec)}"]
        charts.helm("install", "warm", str(ENGINE_CHART), "--namespace", TENANT, *flags)
        tested = charts.helm("test", "warm", "--namespace", TENANT)
        assert "Phase:          Succeeded" in tested
        assert condition(team.get("warm", "loraengines"), "Ready")["status"] == "True"
        team.experiment("trains", max_steps=2, engineRef={"name": "warm"})
        team.wait_state("trains", "Succeeded")
    finally:
        engine.kill()
    assert "Phase:          Succeeded" in charts.helm("test", "clora", "--namespace", "clora-system")
