"""LoRAEngine -> the manifests of its Service, claim, NetworkPolicy and StatefulSet. Pure.

updateStrategy OnDelete: an upgrade of the operator restarts no engine. The claim is owned only with whenDeleted:
Delete, so that commits outlive the engine. The token's Secret is made once, elsewhere (act), for it is random. Leaves
out more than one node per engine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from clora_api import API_VERSION, GROUP
from clora_api.v1alpha1.engine import EngineSpec
from clora_operator.pod_trouble import kueue_labels
from clora_operator.resources import Engine, Meta

PORT = 8080
TENANT_PORT = 8000
MANAGED = {"app.kubernetes.io/managed-by": "clora-operator"}
ENGINE_LABEL = f"{GROUP}/engine"
CONTAINER = "engine"
GRACE_SECONDS = 120
START_SECONDS = 3600  # what an engine may take to load its model
# StatefulSets put the name into pod labels together with a hash, Services allow no dots and no leading digit.
NAME_PATTERN = re.compile(r"^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$")
_MODELS, _STORAGE, _DATA, _TOKEN, _HUB, _HOME = (
    "/models",
    "/storage",
    "/data",
    "/run/clora/token",
    "/run/clora/hub",
    "/home/clora",
)
_USER = 10001
_MERGE_KEYS = ("name", "mountPath")

Manifest = dict[str, Any]


def name_problem(engine: Engine) -> str:
    """Why children of this name cannot exist; empty when they can."""
    if NAME_PATTERN.match(engine.meta.name):
        return ""
    return "metadata.name: an engine that clora runs is also a Service: at most 50 of a-z, 0-9 and '-', a letter first"


def token_secret(engine: Engine) -> tuple[str, str]:
    """Name and key of the Secret with the control API's token."""
    reference = engine.spec.token_secret_ref if engine.spec else None
    return (reference.name, reference.key) if reference else (f"{engine.meta.name}-token", "token")


def labels(name: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "clora-engine",
        "app.kubernetes.io/instance": name,
        **MANAGED,
        ENGINE_LABEL: name,
    }


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
    engine: Engine, ingress_from: str = "", tenants_from: str = "", *, asleep: bool = False
) -> tuple[Manifest, ...]:
    """In the order in which they are to be applied. `ingress_from`, and `tenants_from` of the tenants' port, are
    settings.IngressPeers; asleep: without a pod."""
    spec, meta = engine.spec, engine.meta
    assert spec is not None
    assert spec.image is not None
    children = [_service(meta, spec), _stateful_set(meta, spec, token_secret(engine), replicas=0 if asleep else 1)]
    if ingress_from:
        children.insert(1, _network_policy(meta, spec, ingress_from, tenants_from))
    if spec.storage.existing_claim is None:
        children.insert(1, _claim(meta, spec))
    return tuple(children)


def digest(children: tuple[Manifest, ...]) -> str:
    return hashlib.sha256(json.dumps(children, sort_keys=True).encode()).hexdigest()


def _metadata(meta: Meta, name: str, *, owned: bool = True) -> Manifest:
    metadata: Manifest = {"name": name, "namespace": meta.namespace, "labels": labels(meta.name)}
    if owned:
        metadata["ownerReferences"] = [owner(meta)]
    return metadata


def _service(meta: Meta, spec: EngineSpec) -> Manifest:
    ports: list[Manifest] = [{"name": "control", "port": PORT, "targetPort": "control", "protocol": "TCP"}]
    if spec.serving.enabled:
        ports.append({"name": "tenants", "port": TENANT_PORT, "targetPort": "tenants", "protocol": "TCP"})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(meta, meta.name),
        "spec": {
            "selector": {ENGINE_LABEL: meta.name},
            "ports": ports,
            # a starting engine answers /v1/engine with what it is waiting for
            "publishNotReadyAddresses": True,
        },
    }


def _network_policy(meta: Meta, spec: EngineSpec, ingress_from: str, tenants_from: str) -> Manifest:
    """Only these peers reach the control API, which /metrics shares its port with; only pods of namespaces whose
    experiments the engine takes, and `tenants_from`, an ingress, reach the tenants' port, if it has one; and nobody
    another port of the pod. kubelet's probes come from the node, which no policy keeps out."""
    ingress: list[Manifest] = [{"from": json.loads(ingress_from), "ports": [{"port": PORT, "protocol": "TCP"}]}]
    if spec.serving.enabled:
        tenants = [*_tenants(spec), *json.loads(tenants_from or "[]")]
        ingress.append({"from": tenants, "ports": [{"port": TENANT_PORT, "protocol": "TCP"}]})
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


def _claim(meta: Meta, spec: EngineSpec) -> Manifest:
    body: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": spec.storage.size}}}
    if spec.storage.storage_class_name:
        body["storageClassName"] = spec.storage.storage_class_name
    owned = spec.storage.when_deleted == "Delete"
    metadata = _metadata(meta, f"{meta.name}-storage", owned=owned)
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": body}


def _stateful_set(meta: Meta, spec: EngineSpec, secret: tuple[str, str], *, replicas: int) -> Manifest:
    template = overlay(_pod_template(meta, spec, secret), spec.pod_template or {})
    template.setdefault("metadata", {}).setdefault("labels", {}).update(labels(meta.name))
    metadata = _metadata(meta, meta.name)
    metadata["labels"] |= kueue_labels(meta.labels)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "serviceName": meta.name,
            "replicas": replicas,
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": {ENGINE_LABEL: meta.name}},
            "template": template,
        },
    }


def _pod_template(meta: Meta, spec: EngineSpec, secret: tuple[str, str]) -> Manifest:
    volumes, mounts = _volumes(meta, spec, secret)
    environment = [{"name": "HOME", "value": _HOME}]
    if spec.model.token_secret_ref:
        environment.append({"name": "HF_TOKEN_PATH", "value": f"{_HUB}/token"})
    container = {
        "name": CONTAINER,
        "image": spec.image,
        "args": arguments(spec),
        "env": environment,
        "ports": _container_ports(spec),
        "resources": _resources(spec),
        "volumeMounts": mounts,
        # loading a large model takes long: only an engine that has answered once can be found dead
        "startupProbe": _probe("/healthz", period=5, failures=START_SECONDS // 5),
        "livenessProbe": _probe("/healthz", period=10, failures=6),
        "readinessProbe": _probe("/readyz", period=5, failures=2),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "metadata": {"labels": labels(meta.name)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        },
    }


def _container_ports(spec: EngineSpec) -> list[Manifest]:
    ports = [("control", PORT)] + ([("tenants", TENANT_PORT)] if spec.serving.enabled else [])
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports]


def arguments(spec: EngineSpec) -> list[str]:
    """Command line of `clora-engine serve`. The token is a file, never an argument."""
    model, sampler = spec.model, spec.sampler
    source = model.name
    if model.claim_name:
        source = f"{_MODELS}/{model.path}" if model.path else _MODELS
    flags: dict[str, object] = {
        "model": source,
        "model-name": model.name,
        "storage": _STORAGE,
        "host": "0.0.0.0",  # noqa: S104 - the pod's own address; the token guards it
        "port": PORT,
        "token-file": f"{_TOKEN}/token",
        "max-experiments": spec.capacity.max_experiments,
        "max-rank": spec.capacity.max_rank,
        "max-off-policy-steps": spec.capacity.max_off_policy_steps,
        "sampler-gpus": sampler.gpus,
        "tensor-parallel-size": sampler.tensor_parallel_size,
        "data-parallel-size": sampler.data_parallel_size,
        "max-model-len": sampler.max_model_len,
        "max-num-seqs": sampler.max_num_seqs,
        "scheduling": spec.scheduling.value,
        "trainer-gpus": spec.trainer.gpus,
        "tokens-per-microbatch": spec.trainer.tokens_per_microbatch,
        "trainer-slots": spec.trainer.slots,
        "gradient-checkpointing": str(spec.trainer.gradient_checkpointing).lower(),
        "shard-base": str(spec.trainer.shard_base).lower(),
    }
    if spec.serving.enabled:
        flags["tenant-port"] = TENANT_PORT
    if model.revision:
        flags["revision"] = model.revision
    if sampler.kv_cache_memory:
        flags["kv-cache-memory"] = sampler.kv_cache_memory
    volumes = [f"--data-volume={volume.name}={_DATA}/{volume.name}" for volume in spec.data_volumes]
    environments = [
        *(f"--environment={name}" for name in spec.environments.allowed),
        *(f"--environment-host={host}" for host in spec.environments.allowed_hosts),
        *(f"--tracking-host={host}" for host in spec.tracking.allowed_hosts),
    ]
    datasets = [f"--hub-dataset={pattern}" for pattern in spec.hub_datasets]
    return ["serve", *(f"--{flag}={value}" for flag, value in flags.items()), *volumes, *datasets, *environments]


def _volumes(meta: Meta, spec: EngineSpec, secret: tuple[str, str]) -> tuple[list[Manifest], list[Manifest]]:
    claim = spec.storage.existing_claim or f"{meta.name}-storage"
    pairs: list[tuple[Manifest, str, bool]] = [
        ({"name": "storage", "persistentVolumeClaim": {"claimName": claim}}, _STORAGE, False),
        (_secret_volume("token", *secret), _TOKEN, True),
        ({"name": "shm", "emptyDir": {"medium": "Memory"}}, "/dev/shm", False),  # noqa: S108 - a mount of the pod
        ({"name": "tmp", "emptyDir": {}}, "/tmp", False),  # noqa: S108 - a mount of the pod
        ({"name": "home", "emptyDir": {}}, _HOME, False),
    ]
    if spec.model.claim_name:
        source = {"claimName": spec.model.claim_name, "readOnly": True}
        pairs.append(({"name": "model", "persistentVolumeClaim": source}, _MODELS, True))
    if spec.model.token_secret_ref:
        reference = spec.model.token_secret_ref
        pairs.append((_secret_volume("hub", reference.name, reference.key), _HUB, True))
    for volume in spec.data_volumes:
        source = {"claimName": volume.claim_name, "readOnly": True}
        pairs.append(
            ({"name": f"data-{volume.name}"[:63], "persistentVolumeClaim": source}, f"{_DATA}/{volume.name}", True)
        )
    volumes = [volume for volume, _, _ in pairs]
    mounts = [{"name": volume["name"], "mountPath": path, "readOnly": ro} for volume, path, ro in pairs]
    return volumes, mounts


def _secret_volume(name: str, secret: str, key: str) -> Manifest:
    source = {"secretName": secret, "items": [{"key": key, "path": "token"}], "defaultMode": 0o440}
    return {"name": name, "secret": source}


def _resources(spec: EngineSpec) -> Manifest:
    requests, limits = dict(spec.resources.requests), dict(spec.resources.limits)
    gpus = spec.sampler.gpus + spec.trainer.gpus
    if gpus:
        limits["nvidia.com/gpu"] = str(gpus)
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "control"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> Manifest:
    """`over` laid on `base`: maps are merged, lists of named things (containers, volumes, env, volumeMounts) by name or
    mountPath, other lists and values are replaced, and null removes."""
    merged = dict(base)
    for key, value in over.items():
        before = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[key] = overlay(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            merged[key] = _overlay_list(before, value)
        else:
            merged[key] = value
    return merged


def _overlay_list(base: list[Any], over: list[Any]) -> list[Any]:
    key = next(
        (k for k in reversed(_MERGE_KEYS) if over and all(isinstance(i, Mapping) and k in i for i in over)), None
    )
    if key is None:
        return over
    merged = {item[key]: item for item in base if isinstance(item, Mapping) and key in item}
    for item in over:
        before = merged.get(item[key])
        merged[item[key]] = overlay(before, item) if before is not None else item
    return list(merged.values())
