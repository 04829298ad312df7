"""Fixtures with a real Kubernetes API server.

control_plane   one for the whole test session, with clora's kinds, in a temporary folder; killed with the session
kube            kubernetes.client.ApiClient of its administrator
namespace       the name of a fresh namespace, deleted afterwards with all that is in it
fresh_control_plane   one for a single test that kills or restarts its parts
node_cluster    a control plane with a real node that runs pods; for tests marked `node`, needs root

The audit log of `control_plane` counts writes: see `writes`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ServiceException

from local.control_plane import ControlPlane
from local.crds import install_crds
from local.node import NodeCluster


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), audit=True) as cluster:
        install_crds(cluster.kubeconfig)
        yield cluster


@pytest.fixture
def fresh_control_plane(tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path / "control-plane", audit=True) as cluster:
        install_crds(cluster.kubeconfig)
        yield cluster


@pytest.fixture(scope="session")
def kube(control_plane: ControlPlane) -> Iterator[client.ApiClient]:
    with config.new_client_from_config(str(control_plane.kubeconfig)) as api:
        yield api


@pytest.fixture
def namespace(kube: client.ApiClient) -> Iterator[str]:
    """Deletion is asked for, not waited for: a namespace takes seconds to go and no test shares one."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    core = client.CoreV1Api(kube)
    core.create_namespace({"metadata": {"name": name}})
    yield name
    core.delete_namespace(name)


@contextmanager
def installed_kinds(api: client.ApiClient, folder: Path) -> Iterator[None]:
    """The kinds whose definitions are in `folder`, until the end of the block."""
    extensions = client.ApiextensionsV1Api(api)
    names = []
    for path in sorted(folder.glob("*.yaml")):
        definition = yaml.load(path.read_text(), yaml.CSafeLoader)  # a safe loader; some files are long
        names.append(definition["metadata"]["name"])
        extensions.create_custom_resource_definition(definition)

    def established() -> bool:
        found = [extensions.read_custom_resource_definition(name).status.conditions or () for name in names]
        return all(any(c.type == "Established" and c.status == "True" for c in each) for each in found)

    def some_exist() -> bool:
        found = extensions.list_custom_resource_definition(_preload_content=False)
        return any(item["metadata"]["name"] in names for item in json.loads(found.data)["items"])

    wait_until(established, f"the kinds of {folder.name}")
    yield
    for name in names:
        extensions.delete_custom_resource_definition(name)
    wait_until(lambda: not some_exist(), f"the kinds of {folder.name} to go")


def register_webhooks(
    api: client.ApiClient, definitions: Path, prefix: str, adapt: Callable[[str, dict[str, Any]], bool]
) -> ExitStack:
    """A controller's webhooks, under names that begin with `prefix`; closed, they are gone. adapt: is given each one's
    path and itself, to say where it is reached, and whether it is wanted."""
    admission, stack = client.AdmissionregistrationV1Api(api), ExitStack()
    for document in yaml.safe_load_all(definitions.read_text()):
        name = document["metadata"]["name"] = f"{prefix}-{document['metadata']['name']}"
        hooks = document["webhooks"]
        document["webhooks"] = [hook for hook in hooks if adapt(hook["clientConfig"]["service"]["path"], hook)]
        kind = "mutating" if document["kind"].startswith("Mutating") else "validating"
        getattr(admission, f"create_{kind}_webhook_configuration")(document)
        stack.callback(getattr(admission, f"delete_{kind}_webhook_configuration"), name)
    return stack


def writes(control_plane: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    """The writes to one namespace so far, in order: audit.k8s.io/v1 events (verb, user, objectRef, responseStatus)."""
    reads = ("get", "list", "watch")
    events = audit_events(control_plane)
    return [
        event
        for event in events
        if event.get("objectRef", {}).get("namespace") == namespace and event["verb"] not in reads
    ]


def audit_events(control_plane: ControlPlane) -> list[dict[str, Any]]:
    """Every write so far, and every request of a pod's account (see local/components.py)."""
    return [json.loads(line) for line in control_plane.audit_log.read_text().splitlines()]


@pytest.fixture(scope="module")
def node_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeCluster]:
    """Fails, rather than skips, where it cannot come up: whoever selects tests marked `node` wants them to run.

    One a module and not one a session: a machine has one node at a time, and some modules need their own.
    """
    with NodeCluster(tmp_path_factory.mktemp("node")) as cluster:
        install_crds(cluster.kubeconfig)
        yield cluster


@pytest.fixture(scope="module")
def node_kube(node_cluster: NodeCluster) -> Iterator[client.ApiClient]:
    with config.new_client_from_config(str(node_cluster.kubeconfig)) as api:
        yield api


@pytest.fixture
def node_namespace(node_kube: client.ApiClient) -> Iterator[str]:
    """As `namespace`, on the node: its pods are gone before the next test starts, so that they take nothing from it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    core = client.CoreV1Api(node_kube)
    core.create_namespace({"metadata": {"name": name}})
    yield name
    core.delete_namespace(name)
    wait_until(lambda: not core.list_namespaced_pod(name).items, f"the pods of {name} to end")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Polls, for what no watch tells; fails the test once the time is over. An API server too busy to answer is asked
    again."""
    deadline = time.monotonic() + seconds
    while not _holds(condition):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.1)


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except ServiceException:  # 5xx
        return False
