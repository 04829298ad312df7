"""Kueue's controller beside a control plane: its kinds, its webhooks, and itself as a process of this machine.

It makes and rotates its own certificates, as in its default installation. Only the Service of its webhooks is another:
one without pods, which leads the API server to this machine.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from local.build_controllers import CRDS, KUEUE, PROGRAM, WEBHOOKS, built
from local.control_plane import ControlPlane, free_port
from local.process import start
from tests.cluster_fixtures import installed_kinds, register_webhooks, wait_until

NAMESPACE = "kueue-system"
SERVICE, SECRET = "kueue-webhook-service", "kueue-webhook-server-cert"
GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
FLAVOR = "any-node"
FRAMEWORKS = ("pod", "statefulset", "leaderworkerset.x-k8s.io/leaderworkerset")
PATHS = ("kueue-x-k8s-io", "pod", "statefulset", "leaderworkerset")
"""What the paths of the webhooks of Kueue's own kinds and of those frameworks have in them."""
CONVERTED = ("localqueues", "clusterqueues", "workloads", "cohorts", "multikueueclusters")


@contextmanager
def kueue_controller(kubeconfig: Path, api: client.ApiClient, folder: Path) -> Iterator[None]:
    """It works until the end of the block. LWS's kinds must be there."""
    core, port, health, certificates = client.CoreV1Api(api), free_port(), free_port(), folder / "certificates"
    with ExitStack() as stack:
        stack.enter_context(installed_kinds(api, built(KUEUE) / CRDS))
        core.create_namespace({"metadata": {"name": NAMESPACE}})
        stack.callback(core.delete_namespace, NAMESPACE)
        core.create_namespaced_secret(NAMESPACE, {"metadata": {"name": SECRET}})
        service = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
        core.create_namespaced_service(NAMESPACE, {"metadata": {"name": SERVICE}, "spec": service})
        _convert(api, port)
        configuration = {
            "apiVersion": f"config.{GROUP}/{VERSION}",
            "kind": "Configuration",
            "namespace": NAMESPACE,
            "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(certificates)},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": True, "webhookServiceName": SERVICE, "webhookSecretName": SECRET},
            "integrations": {"frameworks": list(FRAMEWORKS)},
            "featureGates": {"VisibilityOnDemand": False},
        }
        (folder / "configuration.json").write_text(json.dumps(configuration))
        command = [str(built(KUEUE) / PROGRAM), f"--config={folder / 'configuration.json'}"]
        command += [f"--kubeconfig={kubeconfig}"]
        log = folder / "kueue.log"
        stack.enter_context(_register_webhooks(api, port))
        process = start(command, cwd=folder, log=log, dies_with_parent=True)
        stack.callback(lambda: print(log.read_text()[-4000:]))  # shown with a test that has failed
        stack.callback(process.end)
        wait_until(lambda: bool(core.read_namespaced_secret(SECRET, NAMESPACE).data), "Kueue's certificates")
        _mount(core, certificates)
        wait_until(lambda: _made_flavor(api), "Kueue's webhooks")
        yield
        # while Kueue is there to take its finalizers off
        custom = client.CustomObjectsApi(api)
        custom.delete_cluster_custom_object(GROUP, VERSION, "resourceflavors", FLAVOR)
        wait_until(lambda: not _there(custom, "clusterqueues"), "the cluster queues to go")
        wait_until(lambda: not _there(custom, "resourceflavors"), "the flavor to go")


def _there(custom: client.CustomObjectsApi, plural: str) -> list[dict[str, Any]]:
    return list(custom.list_cluster_custom_object(GROUP, VERSION, plural)["items"])


def _mount(core: client.CoreV1Api, folder: Path) -> None:
    """As kubelet mounts the Secret."""
    folder.mkdir()
    for name, data in core.read_namespaced_secret(SECRET, NAMESPACE).data.items():
        (folder / name).write_bytes(base64.b64decode(data))


def _made_flavor(api: client.ApiClient) -> bool:
    """Not while Kueue's webhooks do not answer."""
    flavor = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "ResourceFlavor", "metadata": {"name": FLAVOR}}
    try:
        client.CustomObjectsApi(api).create_cluster_custom_object(GROUP, VERSION, "resourceflavors", flavor)
    except ApiException as error:
        if error.status == 500:
            return False
        raise
    return True


def _convert(api: client.ApiClient, port: int) -> None:
    """As Kueue's own patches of its kinds: their versions are converted by its webhook."""
    extensions = client.ApiextensionsV1Api(api)
    service = {"namespace": NAMESPACE, "name": SERVICE, "path": "/convert", "port": port}
    webhook = {"clientConfig": {"service": service}, "conversionReviewVersions": ["v1"]}
    body = {"spec": {"conversion": {"strategy": "Webhook", "webhook": webhook}}}
    for plural in CONVERTED:
        extensions.patch_custom_resource_definition(f"{plural}.{GROUP}", body)


def _register_webhooks(api: client.ApiClient, port: int) -> ExitStack:
    """Those of the frameworks that are on; namespaces that are Kueue's or the cluster's are left alone, as in its
    chart. Kueue puts its certificate in."""
    names = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", NAMESPACE]}

    def adapt(path: str, hook: dict[str, Any]) -> bool:
        hook["clientConfig"] = {"service": {"namespace": NAMESPACE, "name": SERVICE, "path": path, "port": port}}
        if "kueue-x-k8s-io" not in path:
            hook["namespaceSelector"] = {"matchExpressions": [names]}
        return any(part in path for part in PATHS)

    return register_webhooks(api, built(KUEUE) / WEBHOOKS, "kueue", adapt)


class Queue:
    """A ClusterQueue with a quota of GPUs, and the LocalQueue `research` of one namespace that leads to it."""

    def __init__(self, api: client.ApiClient, namespace: str, gpus: int) -> None:
        self._custom, self.namespace = client.CustomObjectsApi(api), namespace
        self._api_version = f"{GROUP}/{VERSION}"
        body = {
            "apiVersion": self._api_version,
            "kind": "ClusterQueue",
            "metadata": {"name": namespace},
            "spec": {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [self._resources(gpus)],
            },
        }
        self._custom.create_cluster_custom_object(GROUP, VERSION, "clusterqueues", body)
        local = {
            "apiVersion": self._api_version,
            "kind": "LocalQueue",
            "metadata": {"name": "research"},
            "spec": {"clusterQueue": namespace},
        }
        self._custom.create_namespaced_custom_object(GROUP, VERSION, namespace, "localqueues", local)

    @staticmethod
    def _resources(gpus: int) -> dict[str, Any]:
        quota = {"cpu": "1000", "memory": "100Ti", "nvidia.com/gpu": str(gpus)}
        resources = [{"name": name, "nominalQuota": value} for name, value in quota.items()]
        return {"coveredResources": list(quota), "flavors": [{"name": FLAVOR, "resources": resources}]}

    def set_gpus(self, gpus: int) -> None:
        body = {"spec": {"resourceGroups": [self._resources(gpus)]}}
        self._custom.patch_cluster_custom_object(GROUP, VERSION, "clusterqueues", self.namespace, body)

    def workloads(self) -> list[dict[str, Any]]:
        listed = self._custom.list_namespaced_custom_object(GROUP, VERSION, self.namespace, "workloads")
        return list(listed["items"])

    def delete(self) -> None:
        self._custom.delete_cluster_custom_object(GROUP, VERSION, "clusterqueues", self.namespace)


def priority_class(api: client.ApiClient, name: str, value: int) -> None:
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "WorkloadPriorityClass", "metadata": {"name": name}}
    client.CustomObjectsApi(api).create_cluster_custom_object(
        GROUP, VERSION, "workloadpriorityclasses", body | {"value": value}
    )


@pytest.fixture(scope="module")
def kueue(
    control_plane: ControlPlane, kube: client.ApiClient, lws: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Kueue in the session's control plane, while the module's tests run."""
    with kueue_controller(control_plane.kubeconfig, kube, tmp_path_factory.mktemp("kueue")):
        yield
