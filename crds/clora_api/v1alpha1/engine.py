"""LoRAEngine: one warm server with one frozen base model, a sampler and a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, WithJsonSchema

from clora_api.v1alpha1.base import ApiModel, LabelName, ObjectName, RelativePath, StatusModel, rules
from clora_api.v1alpha1.experiment import MAX_OFF_POLICY_STEPS, Condition, EnvironmentName, LabelKey, LabelValue

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([kKMGTPE]i?|m)?$", max_length=32)]


MAX_TRAINER_SLOTS = 64
MAX_TRAINER_GPUS = 8
MAX_TRAINER_NODES = 64
TrainerSlots = Annotated[
    Annotated[int, Field(ge=1, le=MAX_TRAINER_SLOTS)] | Literal["Auto"],
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "x-kubernetes-validations": [
                {
                    "rule": f"type(self) == int ? self >= 1 && self <= {MAX_TRAINER_SLOTS} : self == 'Auto'",
                    "message": f"must be Auto or a number from 1 to {MAX_TRAINER_SLOTS}",
                }
            ],
        }
    ),
]


class Scheduling(StrEnum):
    FAIR_SHARE = "FairShare"
    SHORTEST_REMAINING = "ShortestRemaining"


class SecretKey(ApiModel):
    name: ObjectName = Field(description="A Secret of the engine's namespace.")
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", min_length=1, max_length=253)] = Field(
        "token", description="Key within the Secret."
    )


class Model(ApiModel):
    """The frozen base model."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", min_length=1, max_length=253)] = Field(
        description="Name of the model, as on the hub: Qwen/Qwen3-4B-Instruct-2507."
    )
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]+$", max_length=253)] | None = Field(
        None, description="Revision on the hub."
    )
    claim_name: ObjectName | None = Field(
        None, description="A PersistentVolumeClaim that holds the model's files; unset: they come from the hub."
    )
    path: RelativePath | None = Field(None, description="Folder of the model within the claim.")
    token_secret_ref: SecretKey | None = Field(None, description="Hub token for gated models.")


class Capacity(ApiModel):
    """How many tenants fit."""

    max_experiments: int = Field(8, ge=1, le=256, description="Experiments attached at once.")
    max_per_namespace: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Of these, experiments of one namespace; the others of it wait. Unset: no limit.",
    )
    max_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = Field(
        32, description="Highest LoRA rank; every slot of the sampler is this large."
    )
    max_off_policy_steps: int = Field(
        2,
        ge=0,
        le=MAX_OFF_POLICY_STEPS,
        description="Highest algorithm.maxOffPolicySteps of an experiment. The sampler sets aside so many slots, and"
        " two more, for each of maxExperiments.",
    )


class NamespaceSelector(ApiModel):
    match_labels: dict[LabelKey, LabelValue] = Field(
        min_length=1, max_length=16, description="Labels that a namespace must have."
    )


class AllowedNamespaces(ApiModel):
    """Whose experiments the engine takes. Its own namespace's always."""

    model_config = rules(
        ("(self.from == 'Selector') == has(self.selector)", "from Selector goes with a selector and only with it"),
    )

    from_: Literal["Same", "All", "Selector"] = Field(
        "Same",
        alias="from",
        description="Same: experiments of the engine's own namespace. All: of every namespace. Selector: of namespaces"
        " with these labels too, which the operator must be allowed to read. Who is let in may read the dataVolumes.",
    )
    selector: NamespaceSelector | None = Field(None, description="The namespaces, by their labels.")


class Sampler(ApiModel):
    """vLLM with multi-LoRA."""

    gpus: int = Field(4, ge=0, le=64, description="GPUs that sample; 0: the CPU.")
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="GPUs that share one copy of the model.")
    data_parallel_size: int = Field(4, ge=1, le=64, description="Copies of the model.")
    max_model_len: int = Field(8192, ge=128, le=1048576, description="Longest prompt and answer together, in tokens.")
    max_num_seqs: int = Field(256, ge=1, le=4096, description="Sequences decoded in one batch.")
    kv_cache_memory: Quantity | None = Field(
        None,
        description="Memory of the KV cache of each copy, 4Gi for example; unset: what a GPU has left, or an eighth of"
        " the memory on a CPU.",
    )


class Trainer(ApiModel):
    """The swap-based trainer."""

    model_config = rules(
        (
            "!self.shardBase || self.gpus > 1 || self.nodes > 1",
            "shardBase spreads the model over several GPUs: set gpus to 2 or more, or nodes",
        )
    )

    gpus: int = Field(
        4,
        ge=0,
        le=MAX_TRAINER_GPUS,
        description="GPUs that train, each with a part of every batch; 0: the CPU. Of several nodes, those of each.",
    )
    nodes: int = Field(
        1,
        ge=1,
        le=MAX_TRAINER_NODES,
        description="Pods that train. Above 1 the engine is a LeaderWorkerSet (leaderworkerset.x-k8s.io/v1, to be"
        " installed beforehand) of so many pods: the first has the API and the sampler too, and each has gpus GPUs that"
        " train.",
    )
    shard_base: bool = Field(
        False,
        description="Spreads the base model over the trainer's GPUs (FSDP2), of all nodes, instead of copying it to"
        " each: slower, for models that do not fit into one.",
    )
    tokens_per_microbatch: int = Field(16384, ge=128, le=1048576, description="Positions computed in one pass.")
    slots: TrainerSlots = Field(
        "Auto",
        description="Adapters on the trainer's device at once. Training calls of as many experiments that wait at the"
        " same time are computed in one pass, each with its own loss and optimizer. 1: always one after the other, bit"
        " for bit reproducible. Auto: what a measurement at the engine's start says, and only calls that are faster"
        " together.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Computes decoder layers again in the backward pass: a third more work for far less memory."
    )


class Storage(ApiModel):
    """Where commits live. The claim outlives the engine unless whenDeleted says otherwise."""

    model_config = rules(
        (
            "!(has(self.existingClaim) && has(self.storageClassName))",
            "storageClassName has no effect on an existingClaim",
        ),
    )

    size: Quantity = Field("100Gi", description="Size of the claim.")
    storage_class_name: ObjectName | None = Field(None, description="Storage class; unset: the cluster's default.")
    existing_claim: ObjectName | None = Field(None, description="A claim of the engine's namespace to use instead.")
    when_deleted: Literal["Retain", "Delete"] = Field(
        "Retain", description="What happens to the claim with the engine."
    )


class DataVolume(ApiModel):
    name: LabelName = Field(description="Name by which experiments refer to it.")
    claim_name: ObjectName = Field(description="A PersistentVolumeClaim of the engine's namespace, mounted read-only.")


HostPattern = Annotated[
    str,
    Field(pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?(:[1-9][0-9]{0,4})?$", min_length=1, max_length=253),
]


HubDatasets = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/(\*|[A-Za-z0-9][A-Za-z0-9._-]*)$", min_length=3, max_length=96),
]


class Environments(ApiModel):
    """What experiments may play in."""

    allowed: list[EnvironmentName] = Field(
        default_factory=list,
        max_length=16,
        description="Environments that experiments may name; empty: all of them, HTTP only if allowedHosts names any.",
    )
    allowed_hosts: list[HostPattern] = Field(
        default_factory=list,
        max_length=64,
        description="Hosts that the environment HTTP may reach: grader.team.svc, with a port grader.team.svc:8000, or"
        " all names below one, *.team.svc. The engine's own address, link-local and metadata addresses and the API"
        " server's Service are never reached, whatever name leads there.",
    )


def offered_environments(allowed: Sequence[str], *, http: bool) -> tuple[str, ...]:
    """Names of the environments that an engine offers. `allowed` is its allow-list; without any, all are offered, HTTP
    only if there are hosts that it may reach (`http`)."""
    return tuple(allowed) or tuple(name for name in sorted(get_args(EnvironmentName)) if http or name != "HTTP")


class EngineTracking(ApiModel):
    """What the trackers of experiments may do (their spec.tracking)."""

    allowed_hosts: list[HostPattern] = Field(
        default_factory=list,
        max_length=64,
        description="Hosts that trackers may send metrics and keys to: api.wandb.ai, with a port mlflow.team.svc:5000,"
        " or all names below one, *.team.svc; empty: trackers write files only. The engine's own address, link-local"
        " and metadata addresses and the API server's Service are never reached, whatever name leads there.",
    )


class EngineServing(ApiModel):
    """A second port, on which tenants reach the adapters of their own experiments and nothing else."""

    enabled: bool = Field(
        False,
        description="Open the port: experiments may be served (their spec.serving). The sampler then holds two more"
        " versions for each of maxExperiments. The change takes effect with the engine's next pod.",
    )
    endpoint: Annotated[str, Field(pattern=r"^https?://[^?#\s]+$", max_length=512)] | None = Field(
        None,
        description="Base URL at which tenants reach the port, for example https://models.example.com/v1 of an ingress;"
        " unset: the engine's Service. An engine that somebody else runs needs it.",
    )


class Resources(ApiModel):
    """Requests and limits of the engine's container, besides GPUs."""

    requests: dict[str, Quantity] = Field(default_factory=dict, max_length=16, description="Requests.")
    limits: dict[str, Quantity] = Field(default_factory=dict, max_length=16, description="Limits.")


class EngineSpec(ApiModel):
    """What a platform team asks for. The defaults describe a node with 8 H200."""

    model_config = rules(
        (
            "!has(self.endpoint) || has(self.tokenSecretRef)",
            "an endpoint needs tokenSecretRef: the Secret with its token",
        ),
        (
            "has(self.endpoint) || has(self.image)",
            "give an image to run, or the endpoint of an engine that runs already",
        ),
        (
            "!has(self.endpoint) || !has(self.scaleDownAfterSeconds)",
            "scaleDownAfterSeconds is for engines that clora runs: leave it out with an endpoint",
        ),
        (
            "!has(self.endpoint) || self.trainer.nodes == 1",
            "trainer.nodes is for engines that clora runs: leave it out with an endpoint",
        ),
        (
            "!has(self.endpoint) || !self.serving.enabled || has(self.serving.endpoint)",
            "say where tenants reach an engine that somebody else runs: give serving.endpoint",
        ),
        (
            "has(self.endpoint) == has(oldSelf.endpoint)",
            "an engine cannot turn from endpoint to image or back: create another",
        ),
    )

    model: Model = Field(description="The frozen base model.")
    capacity: Capacity = Field(default_factory=Capacity, description="How many tenants fit.")
    sampler: Sampler = Field(default_factory=Sampler, description="vLLM with multi-LoRA.")
    trainer: Trainer = Field(default_factory=Trainer, description="The swap-based trainer.")
    scheduling: Scheduling = Field(
        Scheduling.FAIR_SHARE,
        description="Whose turn it is at the sampler and at the trainer while several experiments wait. FairShare: all"
        " at once, by their weights. ShortestRemaining: the experiment with the least work left over its weight first,"
        " so that equal ones end one after another instead of all last; nobody waits for ever.",
    )
    allowed_namespaces: AllowedNamespaces = Field(
        default_factory=AllowedNamespaces,
        description="Whose experiments the engine takes, by engineRef.namespace. Its token stays in its own namespace.",
    )
    drain: bool = Field(
        False,
        description="Nothing new is attached; what is attached finishes its step, commits, detaches and waits (reason"
        " EngineDraining). Once condition Drained is True, a pod whose template is out of date is replaced, old one"
        " first. When it is false again, experiments go on from their commits.",
    )
    scale_down_after_seconds: int | None = Field(
        None,
        ge=60,
        le=2592000,
        description="After condition Idle was True for so long the engine sleeps: its pod goes, and with it the GPUs,"
        " while its storage and token stay. An experiment that may run on it wakes it, and waits until the model is"
        " loaded. More than a load takes is a good choice. Unset: it never sleeps.",
    )
    storage: Storage = Field(default_factory=Storage, description="Where commits live.")
    data_volumes: list[DataVolume] = Field(
        default_factory=list,
        max_length=32,
        description="Claims that experiments may read from, by name.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    hub_datasets: list[HubDatasets] = Field(
        default_factory=list,
        max_length=64,
        description="Public data sets of the hub that experiments may have the engine download: openai/gsm8k, or all of"
        " one owner, openai/*. Empty: none. An engine keeps at most 8 GiB of them.",
    )
    environments: Environments = Field(
        default_factory=Environments, description="Environments, and hosts, that experiments may use."
    )
    tracking: EngineTracking = Field(
        default_factory=EngineTracking, description="What the trackers of experiments may do."
    )
    serving: EngineServing = Field(
        default_factory=EngineServing, description="A port on which tenants reach their adapters."
    )
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(None, description="Image of the engine.")
    resources: Resources = Field(default_factory=Resources, description="Requests and limits besides GPUs.")
    pod_template: dict[str, Any] | None = Field(
        None,
        description="Overlay on the engine's pod template (metadata, spec), merged as by server-side apply: node"
        " selectors, tolerations, volumes, environment variables. Of an engine of several pods, on each.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/?#\s]+$", max_length=512)] | None = Field(
        None, description="URL of an engine that somebody else runs; clora then creates no workload."
    )
    token_secret_ref: SecretKey | None = Field(
        None, description="Secret with the control API's bearer token; made by clora for engines that it runs."
    )


class EngineStatus(StatusModel):
    """What clora reports."""

    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Accepted, Ready, WorkloadCurrent, Drained (once spec.drain was true), Idle (with"
        " spec.scaleDownAfterSeconds).",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    observed_generation: int = Field(0, ge=0, description="The generation of the spec that was last acted on.")
    epoch: int = Field(0, ge=0, description="The present life of the engine.")
    model: str = Field("", max_length=253, description="The model that it serves.")
    experiments: int = Field(0, ge=0, description="Experiments attached.")
    capacity: int = Field(0, ge=0, description="Experiments that fit.")
    max_rank: int = Field(0, ge=0, description="Highest rank that fits.")
    endpoint: str = Field("", max_length=512, description="URL of its control API.")
