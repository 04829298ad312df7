"""LoRAEngine -> the manifests of its Service, claim, NetworkPolicy, and the workload that makes its pods. Pure.

One pod: a StatefulSet with updateStrategy OnDelete, so that an upgrade of the operator restarts no engine. Several: a
LeaderWorkerSet, which replaces pods when its templates change, and is therefore applied only when they may go: that is
decide_workload's. The claim is owned only with whenDeleted: Delete, so that commits outlive the engine. The token's
Secret is made once, elsewhere (act), for it is random.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from clora_api import API_VERSION, GROUP
from clora_api.v1alpha1.engine import EngineSpec
from clora_operator.pod_template import (
    ENGINE_LABEL,
    LEADER,
    PORT,
    ROLE_LABEL,
    TENANT_PORT,
    Manifest,
    labels,
    leader_pod,
    only_pod,
    worker_pod,
)
from clora_operator.pod_trouble import QUEUE_LABEL, kueue_labels
from clora_operator.resources import Engine, Meta

STATEFUL_SET, LEADER_WORKER_SET = "StatefulSet", "LeaderWorkerSet"
TEMPLATE_ANNOTATION = f"{GROUP}/template"
"""Digest of the templates of an engine of several pods: on the templates, and so on the pods."""
# StatefulSets put the name into pod labels together with a hash, Services allow no dots and no leading digit.
NAME_PATTERN = re.compile(r"^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$")
NAME_LENGTH, NAME_LENGTH_OF_SEVERAL = 50, 44  # a LeaderWorkerSet's name is longer than its engine's


def name_problem(engine: Engine) -> str:
    """Why children of this name cannot exist; empty when they can."""
    several = engine.spec is not None and engine.spec.trainer.nodes > 1
    length = NAME_LENGTH_OF_SEVERAL if several else NAME_LENGTH
    if NAME_PATTERN.match(engine.meta.name) and len(engine.meta.name) <= length:
        return ""
    what = "an engine of several pods" if several else "an engine that clora runs"
    return f"metadata.name: {what} is also a Service: at most {length} of a-z, 0-9 and '-', a letter first"


def leader_worker_set_name(meta: Meta) -> str:
    """Of the LeaderWorkerSet, and of the headless Service that LeaderWorkerSets have: not the engine's own, which its
    Service has, and like no other engine's, not even an earlier one's of the same name."""
    return f"{meta.name}-{hashlib.sha256(meta.uid.encode()).hexdigest()[:5]}"


def token_secret(engine: Engine) -> tuple[str, str]:
    """Name and key of the Secret with the control API's token."""
    reference = engine.spec.token_secret_ref if engine.spec else None
    return (reference.name, reference.key) if reference else (f"{engine.meta.name}-token", "token")


def owner(meta: Meta, kind: str = "LoRAEngine") -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": meta.name,
        "uid": meta.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def manifests(
    engine: Engine,
    ingress_from: str = "",
    tenants_from: str = "",
    *,
    asleep: bool = False,
    runs_as: str = "",
    workload: bool = True,
) -> tuple[Manifest, ...]:
    """In the order in which they are to be applied. `ingress_from`, and `tenants_from` of the tenants' port, are
    settings.IngressPeers; asleep: without a pod. runs_as: the kind of the workload that has the engine's pods, if that
    is not what the spec asks for; workload: False without it."""
    spec, meta = engine.spec, engine.meta
    assert spec is not None
    assert spec.image is not None
    several = (runs_as or wanted_kind(spec)) == LEADER_WORKER_SET
    children = [_service(meta, spec, several=several)]
    if spec.storage.existing_claim is None:
        children.append(_claim(meta, spec))
    if ingress_from:
        children.append(_network_policy(meta, spec, ingress_from, tenants_from, several=several))
    if workload:
        make = _leader_worker_set if several else _stateful_set
        children.append(make(meta, spec, token_secret(engine), replicas=0 if asleep else 1))
    return tuple(children)


def empty_leader_worker_set(engine: Engine) -> Manifest:
    """Without pods: to see that its controller looks at it."""
    assert engine.spec is not None
    return _leader_worker_set(engine.meta, engine.spec, token_secret(engine), replicas=0)


def wanted_kind(spec: EngineSpec) -> str:
    """Of the workload that the spec asks for."""
    return LEADER_WORKER_SET if spec.trainer.nodes > 1 else STATEFUL_SET


def workload_name(meta: Meta, kind: str) -> str:
    return leader_worker_set_name(meta) if kind == LEADER_WORKER_SET else meta.name


def digest(children: tuple[Manifest, ...]) -> str:
    return hashlib.sha256(json.dumps(children, sort_keys=True).encode()).hexdigest()


def _metadata(meta: Meta, name: str, *, owned: bool = True) -> Manifest:
    metadata: Manifest = {"name": name, "namespace": meta.namespace, "labels": labels(meta.name)}
    if owned:
        metadata["ownerReferences"] = [owner(meta)]
    return metadata


def _service(meta: Meta, spec: EngineSpec, *, several: bool) -> Manifest:
    ports: list[Manifest] = [{"name": "control", "port": PORT, "targetPort": "control", "protocol": "TCP"}]
    if spec.serving.enabled:
        ports.append({"name": "tenants", "port": TENANT_PORT, "targetPort": "tenants", "protocol": "TCP"})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(meta, meta.name),
        "spec": {
            "selector": {ENGINE_LABEL: meta.name} | ({ROLE_LABEL: LEADER} if several else {}),
            "ports": ports,
            # a starting engine answers /v1/engine with what it is waiting for
            "publishNotReadyAddresses": True,
        },
    }


def _network_policy(meta: Meta, spec: EngineSpec, ingress_from: str, tenants_from: str, *, several: bool) -> Manifest:
    """Only these peers reach the control API, which /metrics shares its port with; only pods of namespaces whose
    experiments the engine takes, and `tenants_from`, an ingress, reach the tenants' port, if it has one; and nobody
    another port of the pod, but for the pods of the same engine, whose trainers take any. kubelet's probes come from
    the node, which no policy keeps out."""
    ingress: list[Manifest] = [{"from": json.loads(ingress_from), "ports": [{"port": PORT, "protocol": "TCP"}]}]
    if spec.serving.enabled:
        tenants = [*_tenants(spec), *json.loads(tenants_from or "[]")]
        ingress.append({"from": tenants, "ports": [{"port": TENANT_PORT, "protocol": "TCP"}]})
    if several:
        ingress.append({"from": [{"podSelector": {"matchLabels": {ENGINE_LABEL: meta.name}}}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(meta, meta.name),
        "spec": {
            "podSelector": {"matchLabels": {ENGINE_LABEL: meta.name}},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _tenants(spec: EngineSpec) -> list[Manifest]:
    """allowedNamespaces as NetworkPolicyPeers."""
    allowed = spec.allowed_namespaces
    own: Manifest = {"podSelector": {}}
    if allowed.from_ == "All":
        return [{"namespaceSelector": {}}]
    if allowed.selector is None:
        return [own]
    return [own, {"namespaceSelector": {"matchLabels": dict(allowed.selector.match_labels)}}]


def _claim_name(meta: Meta, spec: EngineSpec) -> str:
    return spec.storage.existing_claim or f"{meta.name}-storage"


def _claim(meta: Meta, spec: EngineSpec) -> Manifest:
    body: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": spec.storage.size}}}
    if spec.storage.storage_class_name:
        body["storageClassName"] = spec.storage.storage_class_name
    owned = spec.storage.when_deleted == "Delete"
    metadata = _metadata(meta, _claim_name(meta, spec), owned=owned)
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": body}


def _stateful_set(meta: Meta, spec: EngineSpec, secret: tuple[str, str], *, replicas: int) -> Manifest:
    metadata = _metadata(meta, meta.name)
    metadata["labels"] |= kueue_labels(meta.labels)
    return {
        "apiVersion": "apps/v1",
        "kind": STATEFUL_SET,
        "metadata": metadata,
        "spec": {
            "serviceName": meta.name,
            "replicas": replicas,
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": {ENGINE_LABEL: meta.name}},
            "template": _counted(meta, only_pod(meta.name, spec, secret, _claim_name(meta, spec))),
        },
    }


def _leader_worker_set(meta: Meta, spec: EngineSpec, secret: tuple[str, str], *, replicas: int) -> Manifest:
    """One group of a leader and its workers."""
    metadata = _metadata(meta, leader_worker_set_name(meta))
    metadata["labels"] |= kueue_labels(meta.labels)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": LEADER_WORKER_SET,
        "metadata": metadata,
        "spec": {
            "replicas": replicas,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"partition": 0, "maxUnavailable": 1, "maxSurge": 0},
            },
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": _group(meta, spec, secret),
        },
    }


def _group(meta: Meta, spec: EngineSpec, secret: tuple[str, str]) -> Manifest:
    group: Manifest = {
        "size": spec.trainer.nodes,
        # a leader whose container ends comes back by itself, and its workers find it again
        "restartPolicy": "None",
        "leaderTemplate": _counted(meta, leader_pod(meta.name, spec, secret, _claim_name(meta, spec))),
        "workerTemplate": _counted(meta, worker_pod(meta.name, spec, secret)),
    }
    mark = {TEMPLATE_ANNOTATION: hashlib.sha256(json.dumps(group, sort_keys=True).encode()).hexdigest()[:16]}
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        template["metadata"]["annotations"] = (template["metadata"].get("annotations") or {}) | mark
    return group


def _counted(meta: Meta, pod: Manifest) -> Manifest:
    """A pod template of an engine in Kueue's queue: with the requests that a pod gets from its limits. Kueue compares
    a template's requests, and would let one with other limits pass that its quota was not asked for."""
    if QUEUE_LABEL in meta.labels:
        for container in (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]):
            resources = container.get("resources") or {}
            if limits := resources.get("limits"):
                container["resources"] = resources | {"requests": limits | (resources.get("requests") or {})}
    return pod


def template_wanted(engine: Engine) -> str:
    """The digest of the templates that an engine of several pods is to have."""
    assert engine.spec is not None
    return template_of_pod(_group(engine.meta, engine.spec, token_secret(engine))["leaderTemplate"])


def template_of(workload: Mapping[str, Any]) -> str:
    """The digest of those that a LeaderWorkerSet has; empty where somebody has removed it."""
    return template_of_pod(workload["spec"]["leaderWorkerTemplate"].get("leaderTemplate") or {})


def template_of_pod(pod: Mapping[str, Any]) -> str:
    """The digest of those that a pod was made of; also of a template itself."""
    return str(((pod.get("metadata") or {}).get("annotations") or {}).get(TEMPLATE_ANNOTATION, ""))
