"""What the commands of the charts' hook and tests share: their questions to the API server, and waiting.

Apart from `kube`, so that the operator's own calls, and with them its rights, are all in one place.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kubernetes

from clora_operator.kube import Kube

POLL_SECONDS = 1.0
WILL_PASS = (0, 429, 500, 502, 503, 504)  # HTTP statuses worth another try; 0: no answer
_ENDED = ("Succeeded", "Failed")


class GaveUpError(Exception):
    """What is in the way, and what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Until when to try again, by a clock in seconds; `sleep` is what passes the time."""

    deadline: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def wait(self, otherwise: str) -> None:
        """Raises GaveUpError with `otherwise` once the time is over."""
        if self.clock() >= self.deadline:
            raise GaveUpError(otherwise)
        self.sleep(POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class ObjectName:
    """NAMESPACE/NAME on the command line."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> ObjectName:
        """Raises ArgumentTypeError for anything but NAMESPACE/NAME."""
        namespace, _, name = text.partition("/")
        if not namespace or not name or "/" in name:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
        return cls(namespace, name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ChartKube(Kube):
    """Raises KubeError, as Kube does."""

    def __init__(self, found: kubernetes.client.Configuration) -> None:
        super().__init__(found)
        self._apps = kubernetes.client.AppsV1Api(self._client)

    def deployment(self, of: ObjectName) -> dict[str, Any] | None:
        return self._found(self._apps.read_namespaced_deployment, of.name, of.namespace)

    def scale_to_zero(self, of: ObjectName) -> None:
        self._call(self._apps.patch_namespaced_deployment_scale, of.name, of.namespace, {"spec": {"replicas": 0}})

    def live_pods(self, namespace: str, labels: dict[str, str]) -> list[str]:
        """Names of the pods with these labels whose processes may still run."""
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        answer = self._call(self._core.list_namespaced_pod, namespace, label_selector=selector)
        return [pod["metadata"]["name"] for pod in answer["items"] if pod.get("status", {}).get("phase") not in _ENDED]
