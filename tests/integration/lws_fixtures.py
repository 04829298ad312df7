"""The controller of LeaderWorkerSets beside a control plane: its kinds, its webhooks, and itself as a process.

It runs on this machine, with the administrator's rights, and the API server reaches its webhooks by an address.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from local import pki
from local.build_controllers import CRDS, LWS, PROGRAM, WEBHOOKS, built
from local.control_plane import ControlPlane, free_port
from local.process import start
from tests.cluster_fixtures import installed_kinds, register_webhooks, wait_until


@contextmanager
def lws_kinds(api: client.ApiClient) -> Iterator[None]:
    """Its kinds, until the end of the block."""
    with installed_kinds(api, built(LWS) / CRDS):
        yield


@contextmanager
def lws_controller(kubeconfig: Path, api: client.ApiClient, folder: Path, address: str = "127.0.0.1") -> Iterator[None]:
    """It works until the end of the block. Its kinds must be there. address: of this machine, as the API server sees
    it."""
    certificates, webhooks, health = folder / "certificates", free_port(), free_port()
    pki.create(certificates, (), [address])
    for kind in ("crt", "key"):
        shutil.copy(certificates / f"apiserver.{kind}", certificates / f"tls.{kind}")
    configuration = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "webhook": {"host": address, "port": webhooks, "certDir": str(certificates)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
    }
    (folder / "configuration.json").write_text(json.dumps(configuration))
    command = [str(built(LWS) / PROGRAM), f"--config={folder / 'configuration.json'}"]
    command += [f"--kubeconfig={kubeconfig}"]
    log = folder / "lws.log"
    process = start(command, cwd=folder, log=log, dies_with_parent=True)
    with ExitStack() as stack:
        stack.callback(lambda: print(log.read_text()[-4000:]))  # shown with a test that has failed
        stack.callback(process.end)
        wait_until(lambda: _listens(address, webhooks), "LWS's webhooks")
        authority = base64.b64encode((certificates / "ca.crt").read_bytes()).decode()
        stack.enter_context(_register_webhooks(api, f"https://{address}:{webhooks}", authority))
        yield


def _register_webhooks(api: client.ApiClient, url: str, authority: str) -> ExitStack:
    """Those for pods see LWS's own pods only, as in its chart."""

    def adapt(path: str, hook: dict[str, Any]) -> bool:
        hook["clientConfig"] = {"url": f"{url}{path}", "caBundle": authority}
        if "pod" in path:
            ours = {"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}
            hook["objectSelector"] = {"matchExpressions": [ours]}
        return "disaggregatedset" not in path

    return register_webhooks(api, built(LWS) / WEBHOOKS, "lws", adapt)


def _listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@pytest.fixture(scope="module")
def lws(
    control_plane: ControlPlane, kube: client.ApiClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """LWS in the session's control plane, while the module's tests run."""
    with lws_kinds(kube), lws_controller(control_plane.kubeconfig, kube, tmp_path_factory.mktemp("lws")):
        yield
