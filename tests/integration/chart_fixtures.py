"""What the tests of the charts share: a cluster without clora's kinds and with a node of processes, and helm."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kubernetes import client, config

from local.cache import REPOSITORY
from local.control_plane import ControlPlane, free_port
from local.tools import tools
from tests.integration.process_node import ProcessNode

CHART = REPOSITORY / "charts" / "clora"
ENGINE_CHART = REPOSITORY / "charts" / "clora-engine"


@dataclass(frozen=True)
class ChartCluster:
    """A control plane that the chart brings clora's kinds to, and the node that runs what the chart starts."""

    plane: ControlPlane
    api: client.ApiClient
    node: ProcessNode

    def try_helm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(tools() / "helm"), f"--kubeconfig={self.plane.kubeconfig}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    def helm(self, *arguments: str) -> str:
        done = self.try_helm(*arguments)
        assert done.returncode == 0, done.stderr + self.node.log("clora")
        return done.stdout

    def install(self, namespace: str, *flags: str, name: str = "clora", chart: Path = CHART) -> str:
        """Waits until the operator is ready. Its port is its own: processes share this machine's."""
        place = ["--namespace", namespace, "--create-namespace", "--wait", "--timeout=120s", "--take-ownership"]
        return self.helm("install", name, str(chart), *place, *own_ports(), *flags)

    def uninstall(self, namespace: str, *flags: str, name: str = "clora") -> str:
        return self.helm("uninstall", name, "--namespace", namespace, "--wait", "--timeout=120s", *flags)


def own_ports(**settings: str) -> list[str]:
    """Of the operator; with further settings, CLORA_OPERATOR_X for X."""
    values = {"LIVENESS_PORT": str(free_port()), "METRICS_PORT": "0", **settings}
    env = [{"name": f"CLORA_OPERATOR_{name}", "value": value} for name, value in values.items()]
    return [f"--set-json=env={json.dumps(env)}"]


@contextmanager
def chart_cluster(folder: Path) -> Iterator[ChartCluster]:
    with (
        ControlPlane(folder / "cluster", audit=True) as plane,
        config.new_client_from_config(str(plane.kubeconfig)) as api,
        ProcessNode(plane, folder / "node") as node,
    ):
        yield ChartCluster(plane, api, node)
