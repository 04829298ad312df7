"""The local control plane: a real API server that starts, works, survives and leaves nothing behind."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from kubernetes import client, config, watch

from local.cache import REPOSITORY, LocalClusterError
from local.control_plane import COMMANDS, ControlPlane
from tests.cluster_fixtures import writes

pytestmark = pytest.mark.integration


def test_serves_both_kinds_of_clora(kube: client.ApiClient) -> None:
    resources = client.CustomObjectsApi(kube).get_api_resources("clora.dev", "v1alpha1").resources
    assert {each.kind for each in resources} >= {"LoRAEngine", "LoRAExperiment"}


def test_deletes_a_namespace_with_what_is_in_it(kube: client.ApiClient) -> None:
    core, name = client.CoreV1Api(kube), f"gone-{uuid.uuid4().hex[:8]}"
    core.create_namespace({"metadata": {"name": name}})
    core.create_namespaced_config_map(name, {"metadata": {"name": "inside"}})
    version = core.list_namespace().metadata.resource_version
    core.delete_namespace(name)
    events = watch.Watch().stream(core.list_namespace, resource_version=version, timeout_seconds=60)
    assert any(event["type"] == "DELETED" and event["object"].metadata.name == name for event in events)


def test_collects_the_dependants_of_a_deleted_owner(kube: client.ApiClient, namespace: str) -> None:
    core = client.CoreV1Api(kube)
    owner = core.create_namespaced_config_map(namespace, {"metadata": {"name": "owner"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid}
    dependant = {"metadata": {"name": "dependant", "ownerReferences": [reference]}}
    version = core.create_namespaced_config_map(namespace, dependant).metadata.resource_version
    core.delete_namespaced_config_map("owner", namespace)
    events = watch.Watch().stream(
        core.list_namespaced_config_map, namespace, resource_version=version, timeout_seconds=60
    )
    assert any(event["type"] == "DELETED" and event["object"].metadata.name == "dependant" for event in events)


def test_audit_log_names_every_write_to_a_namespace(
    control_plane: ControlPlane, kube: client.ApiClient, namespace: str
) -> None:
    core = client.CoreV1Api(kube)
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "mine"}})
    core.patch_namespaced_config_map("mine", namespace, {"data": {"key": "value"}})
    core.read_namespaced_config_map("mine", namespace)
    mine = [event for event in writes(control_plane, namespace) if event["objectRef"].get("name") == "mine"]
    assert [(event["verb"], event["user"]["username"]) for event in mine] == [("create", "admin"), ("patch", "admin")]


def test_kubeconfig_and_keys_are_for_their_owner_alone(control_plane: ControlPlane) -> None:
    private = [*control_plane.folder.glob("*.kubeconfig"), *(control_plane.folder / "pki").glob("*.key")]
    assert len(private) > 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


def test_objects_outlive_a_killed_api_server_and_a_killed_etcd(fresh_control_plane: ControlPlane) -> None:
    with config.new_client_from_config(str(fresh_control_plane.kubeconfig)) as api:
        client.CoreV1Api(api).create_namespaced_config_map("default", {"metadata": {"name": "kept"}})
    fresh_control_plane.kill("apiserver")
    assert not fresh_control_plane.ready()
    fresh_control_plane.start("apiserver")
    fresh_control_plane.restart("etcd")
    assert fresh_control_plane.ready()
    with config.new_client_from_config(str(fresh_control_plane.kubeconfig)) as api:
        assert client.CoreV1Api(api).read_namespaced_config_map("kept", "default").metadata.name == "kept"


def test_command_is_idempotent_and_down_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "local.control_plane", *arguments, "--dir", str(folder)]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)

    cluster = ControlPlane(folder)
    try:
        first = run("up")
        assert first.returncode == 0, first.stderr
        assert first.stdout == f"export KUBECONFIG={cluster.kubeconfig}\n"
        started = cluster.processes()
        assert set(started) == set(COMMANDS)
        assert run("up").stdout == first.stdout
        assert cluster.processes() == started, "the second `up` started nothing"
        assert run("status").returncode == 0
    finally:
        down = run("down")
    assert down.returncode == 0, down.stderr
    assert not any(each.alive() for each in started.values())
    assert run("status").returncode == 1
    assert run("down").returncode == 0, "a second `down` has nothing to do"


def test_processes_die_with_the_python_that_holds_them(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, os, signal\n"
        "from local.control_plane import ControlPlane\n"
        "with ControlPlane(pathlib.Path(sys.argv[1])):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cluster")]
    subprocess.run(command, cwd=REPOSITORY, timeout=240, check=False)
    left = ControlPlane(tmp_path / "cluster").processes()
    assert set(left) == set(COMMANDS)
    assert all(each.wait(30.0) for each in left.values())


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LocalClusterError, match=f"port {port} .* is taken"):
            ControlPlane(tmp_path / "cluster", port=port).up()


def test_a_missing_build_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLORA_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(LocalClusterError, match=r"run `python -m local\.build`"):
        ControlPlane(tmp_path / "cluster").up()
