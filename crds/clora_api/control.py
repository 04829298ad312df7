"""Wire types of the engine's control API: all that operator and engine share.

    GET    /v1/engine                              EngineInfo
    GET    /v1/experiments?since=N&timeoutSeconds= ExperimentList of all; long poll: answers once the revision is not N
    PUT    /v1/experiments/{uid}                   DesiredExperiment -> ExperimentReport; idempotent; 409 when full, or
                                                   when its commits are not in the engine's storage
    PUT    /v1/experiments/{uid}/serving           DesiredServing -> ExperimentReport; idempotent; 404 when the engine
                                                   does not know it, and so serves it to nobody
    GET    /v1/experiments/{uid}                   ExperimentReport
    DELETE /v1/experiments/{uid}?files=Retain      202 and ExperimentReport (phase Deleting) while its last step is made
                                                   and committed, 200 and null once it is gone; idempotent
    GET    /v1/experiments/{uid}/metrics           JSON Lines, one object a step
    GET    /v1/experiments/{uid}/trajectories?step=N  JSON Lines, one group a line
    GET    /v1/experiments/{uid}/trajectories/text?step=&order=&limit=  TrajectoryPage: as text, so many; step unset:
                                                   the latest that is kept
    GET    /v1/experiments/{uid}/checkpoints       CheckpointList
    GET    /v1/experiments/{uid}/checkpoints/{step}   the step's PEFT adapter, as a tar
    GET    /v1/experiments/{uid}/tracking          what trackers that are offline have kept, as a tar; 404 if nothing
    GET    /healthz, /readyz, /metrics             without token

An engine that is still loading its model answers all of /v1 with 503 and the problem not-ready. After a new start (a
new epoch) it knows only what it has been told since, and resumes each experiment from its commits when it is PUT again.
Errors are RFC 9457 problem documents (`Problem`).
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from clora_api.v1alpha1.base import ApiModel
from clora_api.v1alpha1.experiment import MAX_WEIGHT, ExperimentSpec
from clora_api.v1alpha1.tracking import TrackerKind

MIN_TOKEN_LENGTH, MAX_TOKEN_LENGTH = 16, 512
MAX_TRACKING_KEY_LENGTH = 4096
PROBLEM_BASE = "https://clora.dev/problems/"


class WireModel(ApiModel):
    """Operator and engine may be of neighbouring releases: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class RunMode(StrEnum):
    RUN = "Run"
    SUSPEND = "Suspend"  # finish the step, commit, give up the slot
    SERVE = "Serve"  # it has ended: train no more, hold a slot and serve the last commit, as long as there is a token


class Phase(StrEnum):
    """Where an experiment is on the engine."""

    PREPARING = "Preparing"  # validating, loading or initialising its adapter
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETING = "Deleting"


OCCUPYING = frozenset({Phase.PREPARING, Phase.RUNNING, Phase.DELETING})  # phases that hold one of maxExperiments


class InitSource(WireModel):
    """initFrom.experiment, resolved by the operator: the engine knows uids only."""

    uid: str = Field(pattern=r"^[a-zA-Z0-9-]{1,64}$")
    step: int | None = None


class DesiredExperiment(WireModel):
    """The state that the operator wants for one experiment. `attempt` grows by one for each retry of a failure, so
    that a failure which has been acted on is told from a new one."""

    uid: str = Field(pattern=r"^[a-zA-Z0-9-]{1,64}$")
    namespace: str = Field(max_length=63)
    name: str = Field(max_length=253)
    generation: int = 1
    spec: ExperimentSpec
    mode: RunMode = RunMode.RUN
    attempt: int = 0
    committed_step: int | None = None  # a commit that the operator knows of: without it nothing may start
    init_source: InitSource | None = None
    data_text: str | None = Field(None, max_length=1_048_576)  # contents of data.configMap
    # who sends it reaches this experiment's adapter on the tenants' port; unset: nobody does. Known to be told by
    # whoever told it: it is in no report, no digest and no log
    serving_token: str | None = Field(None, min_length=MIN_TOKEN_LENGTH, max_length=MAX_TOKEN_LENGTH, repr=False)
    # what spec.tracking's secretRefs hold; kept as secret as the token
    tracking_keys: dict[TrackerKind, Annotated[str, Field(min_length=1, max_length=MAX_TRACKING_KEY_LENGTH)]] | None = (
        Field(None, repr=False)
    )


class DesiredServing(WireModel):
    """Who may ask for an experiment's adapter, and its share: told apart from the spec, so that a token is revoked also
    while the spec is refused, its data are gone, or it cannot be read. serving_token: as in DesiredExperiment; weight:
    spec.weight, unset: as before."""

    serving_token: str | None = Field(None, min_length=MIN_TOKEN_LENGTH, max_length=MAX_TOKEN_LENGTH, repr=False)
    weight: int | None = Field(None, ge=1, le=MAX_WEIGHT)


def spec_digest(desired: DesiredExperiment) -> str:
    """Digest of what an experiment is to do, without what changes with its course: `mode`, `attempt`, `generation`,
    `committed_step`, and without secrets (`serving_token`, `tracking_keys`)."""
    course = {"mode", "attempt", "generation", "committed_step", "serving_token", "tracking_keys"}
    body = desired.model_dump(mode="json", by_alias=True, exclude=course, exclude_none=True)
    body["spec"].pop("suspend", None)
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class ReportedProgress(WireModel):
    """Numbers of the last step; unset until there is one."""

    step: int = 0
    max_steps: int = 0
    reward: float | None = None
    activity: str = ""  # Rollout, Train, Publish, Commit, Evaluate
    metrics: dict[str, float] = Field(default_factory=dict)
    seconds_waited: float = 0.0
    seconds_per_step: float | None = None
    last_step_time: str | None = None


class ReportedCheckpoint(WireModel):
    step: int
    path: str
    digest: str
    best: bool = False  # measured best of all that were committed


class ReportedBest(WireModel):
    """The commit that was measured best, and by what."""

    step: int
    metric: str
    value: float


class ReportedServing(WireModel):
    """Of an experiment with a serving token. version: what tenants' requests get, empty: nothing; problem: why.
    weight: spec.weight as the engine was told it last."""

    version: str = ""
    problem: str = ""
    weight: int | None = None


class ReportedTracker(WireModel):
    """One of spec.tracking. step: the last that it has taken; problem: why it takes none now."""

    kind: str
    step: int | None = None
    problem: str = ""


class ExperimentReport(WireModel):
    """What the engine says of one experiment. `revision` grows with every change."""

    uid: str
    namespace: str
    name: str
    epoch: int
    revision: int
    phase: Phase
    mode: RunMode
    attempt: int
    spec_digest: str
    reason: str = ""
    message: str = ""
    field: str | None = None  # of a spec that cannot run: the field's path
    retryable: bool = False  # of a failure
    adapter_loaded: bool = False  # the trainer holds the adapter and the sampler serves adapter_version
    adapter_version: str = ""
    adapter_digest: str = ""
    progress: ReportedProgress = ReportedProgress()
    checkpoint: ReportedCheckpoint | None = None
    best: ReportedBest | None = None
    serving: ReportedServing | None = None  # unset: nobody may ask it
    tracking: list[ReportedTracker] = Field(default_factory=list)
    keeps_slot: bool = False  # it has ended, and holds a slot because it is served

    @property
    def occupying(self) -> bool:
        """It holds one of maxExperiments."""
        return self.phase in OCCUPYING or self.keeps_slot


class ExperimentList(WireModel):
    epoch: int
    revision: int
    items: list[ExperimentReport]


class EngineInfo(WireModel):
    """What the engine is and how full."""

    epoch: int
    ready: bool
    model: str
    version: str
    max_experiments: int
    max_rank: int
    max_off_policy_steps: int | None = None  # of an experiment
    max_context: int | None = None  # tokens of a prompt and its answer
    environments: list[str] | None = None  # that experiments may name
    experiments: int  # that hold a slot
    data_volumes: list[str] = Field(default_factory=list)
    sampler_generation: int = 0
    versions: list[str] = Field(default_factory=list)  # that the sampler serves now
    serves: bool = False  # it has a port for tenants


class CheckpointList(WireModel):
    items: list[ReportedCheckpoint]


class TrajectoryOrder(StrEnum):
    FIRST = "First"  # as they were drawn
    BEST = "Best"  # by reward; failed ones left out
    WORST = "Worst"
    FAILED = "Failed"


class ReadablePart(WireModel):
    """Consecutive tokens of one writer, as text."""

    by: Literal["model", "environment"]
    text: str


class ReadableTrajectory(WireModel):
    """One trajectory, special tokens included. `member`: its place in its group."""

    group: int
    member: int
    example: int
    version_step: int
    reward: float
    turns: int
    tool_calls: int
    tool_errors: int
    truncated: bool
    error: str = ""
    prompt: str
    parts: list[ReadablePart]


class TrajectoryPage(WireModel):
    """`steps`: those whose trajectories are kept. `total` and `failed`: trajectories of this step."""

    step: int
    steps: list[int]
    total: int
    failed: int
    items: list[ReadableTrajectory]


class Problem(WireModel):
    """RFC 9457. `type` is stable; `field` names the field of the spec that is wrong."""

    type: str
    title: str
    status: int
    detail: str = ""
    field: str | None = None
    reason: str = ""


ProblemType = Literal[
    "capacity-exceeded", "invalid-spec", "not-found", "unauthorized", "conflict", "not-ready", "internal"
]
