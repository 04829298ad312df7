"""What kopf watches for us. A handler puts the object into the cache and wakes the reconciler, no more.

Registered by a function on a registry of its own: no import has side effects. Plain event handlers, so that kopf keeps
neither finalizers nor annotations on anybody's resources.
"""

from __future__ import annotations

import asyncio
from typing import Any

import kopf
import kubernetes

from clora_api import GROUP, VERSION
from clora_operator.kube import ENGINES, EXPERIMENTS, configuration
from clora_operator.pod_template import ENGINE_LABEL
from clora_operator.reconciler import Reconciler
from clora_operator.resources import Key, Kind


def register(registry: kopf.OperatorRegistry, reconciler: Reconciler, kubeconfig: str) -> None:
    def seen(kind: Kind, event: kopf.RawEvent) -> None:
        body: Any = event["object"]
        gone = event["type"] == "DELETED"
        key = reconciler.cache.remove(kind, body) if gone else reconciler.cache.put(kind, body)
        reconciler.wake(key)

    @kopf.on.event(GROUP, VERSION, EXPERIMENTS, registry=registry)
    async def experiment(event: kopf.RawEvent, **_: Any) -> None:
        seen("experiment", event)

    @kopf.on.event(GROUP, VERSION, ENGINES, registry=registry)
    async def engine(event: kopf.RawEvent, **_: Any) -> None:
        seen("engine", event)

    @kopf.on.event("apps", "v1", "statefulsets", labels={ENGINE_LABEL: kopf.PRESENT}, registry=registry)
    async def stateful_set(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        reconciler.wake(Key("engine", namespace or "", labels[ENGINE_LABEL]))

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return connection_info(await asyncio.to_thread(configuration, kubeconfig))

    @kopf.on.probe(registry=registry)
    async def synced(**_: Any) -> bool:
        return reconciler.synced.is_set()


def connection_info(found: kubernetes.client.Configuration) -> kopf.ConnectionInfo:
    """kopf's credentials, the same as the client's own. A login asks anew, for tokens expire."""
    # the client's releases name the key differently
    header = found.get_api_key_with_prefix("BearerToken") or found.get_api_key_with_prefix("authorization") or ""
    scheme, _, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
        server=found.host,
        ca_path=found.ssl_ca_cert,
        insecure=not found.verify_ssl,
        username=found.username or None,
        password=found.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=found.cert_file,
        private_key_path=found.key_file,
    )
