"""The few Kubernetes calls that the operator makes. All block: call them in a thread (`asyncio.to_thread`).

Objects go in and out as plain dicts. Leaves out watching, which is kopf's part.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import kubernetes
import kubernetes.stream
import kubernetes.watch
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from clora_api import GROUP, VERSION

FIELD_MANAGER = "clora-operator"
EXPERIMENTS = "loraexperiments"
ENGINES = "loraengines"
PLURALS = {"experiment": EXPERIMENTS, "engine": ENGINES}
_CHILDREN = {  # of engines, by kind: API group, version, plural
    "StatefulSet": ("apps", "v1", "statefulsets"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
}
_TIMEOUT = (5.0, 30.0)  # seconds to connect, to read
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"


class KubeError(Exception):
    """The API server refused; `status` is the HTTP status (0: it did not answer), `reason` the server's sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the API server answered {status}: {reason}" if status else f"the API server: {reason}")
        self.status, self.reason = status, reason


def configuration(kubeconfig: str = "") -> kubernetes.client.Configuration:
    """From the given kubeconfig, the default one, or the pod's ServiceAccount, in this order.

    Raises ConfigException where there is none.
    """
    found = kubernetes.client.Configuration()
    try:
        kubernetes.config.load_kube_config(kubeconfig or None, client_configuration=found, persist_config=False)
    except ConfigException:
        if kubeconfig:
            raise
        kubernetes.config.load_incluster_config(client_configuration=found)
    return found


def default_namespace(kubeconfig: str = "") -> str:
    """That of the kubeconfig's current context; "default" where it names none."""
    try:
        _, current = kubernetes.config.list_kube_config_contexts(kubeconfig or None)
    except ConfigException:
        return "default"
    return str((current or {}).get("context", {}).get("namespace") or "default")


class Kube:
    """Thread-safe, as the client's connection pool is."""

    def __init__(self, found: kubernetes.client.Configuration) -> None:
        self._client = kubernetes.client.ApiClient(found)
        self._core = kubernetes.client.CoreV1Api(self._client)
        self._custom = kubernetes.client.CustomObjectsApi(self._client)

    # ------------------------------------------------------------------ clora's own kinds

    def list_all(self, plural: str, namespaces: tuple[str, ...]) -> list[dict[str, Any]]:
        """All objects of one of clora's kinds in `namespaces`; none given: everywhere."""
        if not namespaces:
            answer = self._call(self._custom.list_cluster_custom_object, GROUP, VERSION, plural)
            return list(answer["items"])
        found = []
        for namespace in namespaces:
            answer = self._call(self._custom.list_namespaced_custom_object, GROUP, VERSION, namespace, plural)
            found += answer["items"]
        return found

    def get(self, plural: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self._found(self._custom.get_namespaced_custom_object, GROUP, VERSION, namespace, plural, name)

    def patch(self, plural: str, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """JSON merge patch; a resourceVersion in `body` makes a 409 of a lost race."""
        call = self._custom.patch_namespaced_custom_object
        return dict(self._call(call, GROUP, VERSION, namespace, plural, name, body, _content_type=_MERGE))

    def patch_status(self, plural: str, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The same, of the status subresource."""
        call = self._custom.patch_namespaced_custom_object_status
        return dict(self._call(call, GROUP, VERSION, namespace, plural, name, body, _content_type=_MERGE))

    def delete(self, plural: str, namespace: str, name: str, uid: str, resource_version: str) -> None:
        """Just this version of just this object: anything else is a 409 (404: there is none)."""
        options = {"preconditions": {"uid": uid, "resourceVersion": resource_version}}
        call = self._custom.delete_namespaced_custom_object
        self._call(call, GROUP, VERSION, namespace, plural, name, body=options)

    def watch(self, plural: str, namespace: str) -> Iterator[list[dict[str, Any]]]:
        """All objects of one of clora's kinds, after each change; for the command line, which may block for ever."""
        call = self._custom.list_namespaced_custom_object
        while True:
            answer = self._call(call, GROUP, VERSION, namespace, plural)
            found = {item["metadata"]["uid"]: item for item in answer["items"]}
            yield list(found.values())
            version = answer["metadata"]["resourceVersion"]
            try:
                for event in kubernetes.watch.Watch().stream(
                    call, GROUP, VERSION, namespace, plural, resource_version=version, timeout_seconds=300
                ):
                    item = event["object"]
                    found[item["metadata"]["uid"]] = item
                    if event["type"] == "DELETED":
                        del found[item["metadata"]["uid"]]
                    yield list(found.values())
            except ApiException as error:
                if error.status != 410:  # what is too old is listed again
                    raise KubeError(error.status or 0, _sentence(error)) from error

    # ------------------------------------------------------------------ what belongs to an engine or an experiment

    def config_map(self, namespace: str, name: str) -> dict[str, Any] | None:
        return self._found(self._core.read_namespaced_config_map, name, namespace)

    def secret(self, namespace: str, name: str) -> dict[str, Any] | None:
        return self._found(self._core.read_namespaced_secret, name, namespace)

    def service(self, namespace: str, name: str) -> dict[str, Any] | None:
        return self._found(self._core.read_namespaced_service, name, namespace)

    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Those with these labels, also such as are about to end."""
        answer = self._call(self._core.list_namespaced_pod, namespace, label_selector=selector)
        return list(answer["items"])

    def priority_class(self, name: str) -> dict[str, Any] | None:
        call = self._custom.get_cluster_custom_object
        return self._found(call, "scheduling.k8s.io", "v1", "priorityclasses", name)

    def namespace(self, name: str) -> dict[str, Any] | None:
        return self._found(self._core.read_namespace, name)

    def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        """With its grace period. A pod of another uid is a 409."""
        self._call(self._core.delete_namespaced_pod, name, namespace, body={"preconditions": {"uid": uid}})

    def workload(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """A StatefulSet or LeaderWorkerSet; None also where the cluster has no such kind (see `serves`)."""
        return self._found(self._custom.get_namespaced_custom_object, *_child(kind, namespace, name))

    def serves(self, kind: str) -> bool:
        """Whether the cluster has the kind, by discovery, which every account may ask."""
        group, version, plural = _CHILDREN[kind]
        found = self._found(self._custom.get_api_resources, group, version)
        return found is not None and any(resource["name"] == plural for resource in found["resources"])

    def scale_workload_to_zero(self, kind: str, namespace: str, name: str, resource_version: str) -> None:
        """Just this version of a workload: anything else is a 409."""
        body = {"metadata": {"resourceVersion": resource_version}, "spec": {"replicas": 0}}
        call, options = self._custom.patch_namespaced_custom_object, {"field_manager": FIELD_MANAGER}
        self._call(call, *_child(kind, namespace, name), body, _content_type=_MERGE, **options)

    def create_secret(self, namespace: str, body: Mapping[str, Any]) -> None:
        """Leaves one that exists alone."""
        try:
            self._call(self._core.create_namespaced_secret, namespace, body)
        except KubeError as error:
            if error.status != 409:
                raise

    def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        self._call(self._core.create_namespaced_event, namespace, body)

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """Server-side apply of a Service, PersistentVolumeClaim, NetworkPolicy, StatefulSet or LeaderWorkerSet. The
        client gives no object back for one that this creates (201), only for one that was there."""
        kind, meta = manifest["kind"], manifest["metadata"]
        name, namespace = meta["name"], meta["namespace"]
        options = {"field_manager": FIELD_MANAGER, "force": True, "_content_type": _APPLY}
        if kind in _CHILDREN:
            call = self._custom.patch_namespaced_custom_object
            self._call(call, *_child(kind, namespace, name), manifest, **options)
            return
        calls = {
            "Service": self._core.patch_namespaced_service,
            "PersistentVolumeClaim": self._core.patch_namespaced_persistent_volume_claim,
        }
        self._call(calls[kind], name, namespace, manifest, **options)

    def port_forward(self, namespace: str, pod: str, port: int) -> socket.socket:
        """A socket to a pod's port, through the API server."""
        call = self._core.connect_get_namespaced_pod_portforward
        try:
            forwarded = kubernetes.stream.portforward(call, pod, namespace, ports=str(port)).socket(port)
        except ApiException as error:
            raise KubeError(error.status or 0, _sentence(error)) from error
        forwarded.setblocking(True)
        return forwarded  # type: ignore[no-any-return]

    # ------------------------------------------------------------------

    def _call(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            answer = call(*arguments, _request_timeout=_TIMEOUT, **options)
        except ApiException as error:
            raise KubeError(error.status or 0, _sentence(error)) from error
        except HTTPError as error:
            raise KubeError(0, f"no answer ({type(error).__name__})") from error
        return self._client.sanitize_for_serialization(answer)

    def _found(self, call: Callable[..., Any], *arguments: Any) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = self._call(call, *arguments)
        except KubeError as error:
            if error.status == 404:
                return None
            raise
        return answer


def _child(kind: str, namespace: str, name: str) -> tuple[str, str, str, str, str]:
    group, version, plural = _CHILDREN[kind]
    return group, version, namespace, plural, name


def _sentence(error: ApiException) -> str:
    """The `message` of the server's Status object, without headers and noise."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
