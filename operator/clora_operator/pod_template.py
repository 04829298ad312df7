"""EngineSpec -> the templates of its pods: that with the API and the sampler, and those that only train. Pure.

The pods of one engine agree on the trainer's ports by these command lines. Leaves out what makes pods of templates, and
the names of Kubernetes' objects: that is workload.
"""

from __future__ import annotations

from typing import Any

from clora_api import GROUP
from clora_api.v1alpha1.engine import EngineSpec
from clora_operator.overlay import overlay

PORT = 8080
TENANT_PORT = 8000
TRAINER_PORT = 29400  # of commands to the trainer's other pods; the next one is torch.distributed's store
MANAGED = {"app.kubernetes.io/managed-by": "clora-operator"}
ENGINE_LABEL = f"{GROUP}/engine"
ROLE_LABEL = f"{GROUP}/role"
LEADER, WORKER = "leader", "worker"
CONTAINER = "engine"
GRACE_SECONDS = 120
START_SECONDS = 3600  # what an engine may take to load its model
USER = 10001
HOME = "/home/clora"
_MODELS, _STORAGE, _DATA, _TOKEN, _HUB = ("/models", "/storage", "/data", "/run/clora/token", "/run/clora/hub")

Manifest = dict[str, Any]
Secret = tuple[str, str]
"""Name and key."""


def labels(name: str) -> dict[str, str]:
    """Of everything that belongs to the engine `name`."""
    return {
        "app.kubernetes.io/name": "clora-engine",
        "app.kubernetes.io/instance": name,
        **MANAGED,
        ENGINE_LABEL: name,
    }


def only_pod(name: str, spec: EngineSpec, secret: Secret, claim: str) -> Manifest:
    """Of an engine of one pod. secret: with the control API's token; claim: of the storage."""
    return _template(spec, _api_container(spec), _volumes(spec, secret, claim), labels(name))


def leader_pod(name: str, spec: EngineSpec, secret: Secret, claim: str) -> Manifest:
    """Of an engine of several pods: that with the API, which is rank 0 of the trainer too."""
    return _template(spec, _api_container(spec), _volumes(spec, secret, claim), labels(name) | {ROLE_LABEL: LEADER})


def worker_pod(name: str, spec: EngineSpec, secret: Secret) -> Manifest:
    """Of an engine of several pods: each of those that only train. It listens for nobody whom a probe could ask for,
    ends by itself when it is of no use, and has neither the commits nor the experiments' data."""
    container = {"args": follow_arguments(spec), "resources": _resources(spec, spec.trainer.gpus)}
    return _template(spec, container, _volumes(spec, secret), labels(name) | {ROLE_LABEL: WORKER})


def _template(
    spec: EngineSpec, container: Manifest, volumes: list[tuple[Manifest, str, bool]], fixed: dict[str, str]
) -> Manifest:
    """`container` and the overlay laid on what all pods have in common; `fixed` labels survive the overlay."""
    environment = [{"name": "HOME", "value": HOME}]
    if spec.model.token_secret_ref:
        environment.append({"name": "HF_TOKEN_PATH", "value": f"{_HUB}/token"})
    common = {
        "name": CONTAINER,
        "image": spec.image,
        "env": environment,
        "volumeMounts": [
            {"name": volume["name"], "mountPath": path, "readOnly": read_only} for volume, path, read_only in volumes
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    template = {
        "metadata": {"labels": fixed},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [common | container],
            "volumes": [volume for volume, _, _ in volumes],
        },
    }
    laid = overlay(template, spec.pod_template or {})
    laid.setdefault("metadata", {}).setdefault("labels", {}).update(fixed)
    return laid


def _api_container(spec: EngineSpec) -> Manifest:
    return {
        "args": arguments(spec),
        "ports": _container_ports(spec),
        "resources": _resources(spec, spec.sampler.gpus + spec.trainer.gpus),
        # loading a large model takes long: only an engine that has answered once can be found dead
        "startupProbe": _probe("/healthz", period=5, failures=START_SECONDS // 5),
        "livenessProbe": _probe("/healthz", period=10, failures=6),
        "readinessProbe": _probe("/readyz", period=5, failures=2),
    }


def _container_ports(spec: EngineSpec) -> list[Manifest]:
    ports = [("control", PORT)] + ([("tenants", TENANT_PORT)] if spec.serving.enabled else [])
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports]


def arguments(spec: EngineSpec) -> list[str]:
    """Command line of `clora-engine serve`. The token is a file, never an argument."""
    model, sampler = spec.model, spec.sampler
    flags: dict[str, object] = {
        "model": _source(spec),
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
    if spec.trainer.nodes > 1:
        flags |= {"trainer-nodes": spec.trainer.nodes, "trainer-port": TRAINER_PORT}
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


def follow_arguments(spec: EngineSpec) -> list[str]:
    """Command line of `clora-engine follow`. Kubernetes puts in what the LeaderWorkerSet tells each pod of itself."""
    flags: dict[str, object] = {
        "leader": "$(LWS_LEADER_ADDRESS)",
        "trainer-port": TRAINER_PORT,
        "node": "$(LWS_WORKER_INDEX)",
        "trainer-nodes": spec.trainer.nodes,
        "trainer-gpus": spec.trainer.gpus,
        "model": _source(spec),
        "model-name": spec.model.name,
    }
    if spec.model.revision:
        flags["revision"] = spec.model.revision
    flags["token-file"] = f"{_TOKEN}/token"
    return ["follow", *(f"--{flag}={value}" for flag, value in flags.items())]


def _source(spec: EngineSpec) -> str:
    """Where the model's files are: a name of the hub, or a folder of the pod."""
    model = spec.model
    if not model.claim_name:
        return model.name
    return f"{_MODELS}/{model.path}" if model.path else _MODELS


def _volumes(spec: EngineSpec, secret: Secret, claim: str | None = None) -> list[tuple[Manifest, str, bool]]:
    """Volume, where it is mounted, and whether for reading only. claim: None without storage and data."""
    storage: Manifest = {"name": "storage", "persistentVolumeClaim": {"claimName": claim}}
    found = [] if claim is None else [(storage, _STORAGE, False)]
    found += [
        (_secret_volume("token", *secret), _TOKEN, True),
        ({"name": "shm", "emptyDir": {"medium": "Memory"}}, "/dev/shm", False),  # noqa: S108 - a mount of the pod
        ({"name": "tmp", "emptyDir": {}}, "/tmp", False),  # noqa: S108 - a mount of the pod
        ({"name": "home", "emptyDir": {}}, HOME, False),
    ]
    if spec.model.claim_name:
        found.append((_claim_volume("model", spec.model.claim_name), _MODELS, True))
    if spec.model.token_secret_ref:
        reference = spec.model.token_secret_ref
        found.append((_secret_volume("hub", reference.name, reference.key), _HUB, True))
    if claim is not None:
        found += [
            (_claim_volume(f"data-{volume.name}"[:63], volume.claim_name), f"{_DATA}/{volume.name}", True)
            for volume in spec.data_volumes
        ]
    return found


def _claim_volume(name: str, claim: str) -> Manifest:
    return {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}


def _secret_volume(name: str, secret: str, key: str) -> Manifest:
    source = {"secretName": secret, "items": [{"key": key, "path": "token"}], "defaultMode": 0o440}
    return {"name": name, "secret": source}


def _resources(spec: EngineSpec, gpus: int) -> Manifest:
    requests, limits = dict(spec.resources.requests), dict(spec.resources.limits)
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
