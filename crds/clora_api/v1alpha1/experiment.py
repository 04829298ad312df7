"""LoRAExperiment: one tenant, one RL or SFT run with an adapter of its own."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from clora_api.v1alpha1.base import (
    OBJECT_NAME_PATTERN,
    ApiModel,
    DecimalString,
    LabelName,
    ObjectName,
    RelativePath,
    StatusModel,
    rules,
)
from clora_api.v1alpha1.conditions import State
from clora_api.v1alpha1.tracking import Tracker

MAX_OFF_POLICY_STEPS = 16
MAX_WEIGHT = 1000
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Estimator(StrEnum):
    GRPO = "GRPO"
    REINFORCE = "Reinforce"
    SFT = "SFT"


class LossFunction(StrEnum):
    CROSS_ENTROPY = "CrossEntropy"
    IMPORTANCE_SAMPLING = "ImportanceSampling"
    PPO = "PPO"
    CISPO = "CISPO"
    DRO = "DRO"


class LossNormalization(StrEnum):
    TOKENS = "Tokens"
    SEQUENCES = "Sequences"


class TruncatedCompletions(StrEnum):
    KEEP = "Keep"
    MASK = "Mask"
    PUNISH = "Punish"


LabelKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?$", max_length=316)]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63)]


PriorityClassName = Annotated[
    str,
    Field(
        pattern=OBJECT_NAME_PATTERN,
        min_length=1,
        max_length=253,
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": f"self.matches(r'{OBJECT_NAME_PATTERN}')",
                    "message": "must be the name of a PriorityClass: lower case letters, digits, '-' and '.'",
                },
                {
                    "rule": "!self.startsWith('system-')",
                    "message": "Kubernetes keeps classes that start with 'system-' for its own pods: name another",
                },
            ]
        },
    ),
]


class EngineRef(ApiModel):
    """A LoRAEngine."""

    name: ObjectName = Field(description="Name of a LoRAEngine.")
    namespace: LabelName | None = Field(
        None,
        description="Its namespace; unset: the experiment's own. Another one's engine has to allow it by its"
        " spec.allowedNamespaces.",
    )


class EngineSelector(ApiModel):
    """Any LoRAEngine of the same namespace with these labels. Once steps are committed, the engine stays the same."""

    match_labels: dict[LabelKey, LabelValue] = Field(
        min_length=1, max_length=16, description="Labels that the engine must have."
    )


class Lora(ApiModel):
    """The adapter's shape. It cannot change after creation."""

    rank: int = Field(16, ge=1, le=512, description="Rank of the low-rank matrices; at most the engine's maxRank.")
    alpha: int = Field(32, ge=1, le=4096, description="Scale of the adapter: its output is multiplied by alpha / rank.")
    target_modules: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", min_length=1, max_length=128)]] = Field(
        ["all-linear"],
        min_length=1,
        max_length=32,
        description="Linear layers that get an adapter: name endings such as q_proj, or the one entry all-linear for"
        " every linear layer but the output head.",
    )
    seed: Seed | None = Field(
        None,
        description="Seed of the adapter's initial weights; unset: one of the experiment's own, made of its uid, so"
        " that no two experiments start alike.",
    )


class Optimizer(ApiModel):
    """AdamW, one step a training step."""

    beta1: DecimalString = Field("0.9", description="Decay of the gradient's running mean.")
    beta2: DecimalString = Field("0.95", description="Decay of the gradient's running square.")
    epsilon: DecimalString = Field("1e-8", description="Term that keeps the division finite.")
    weight_decay: DecimalString = Field("0", description="Decoupled weight decay.")
    max_grad_norm: DecimalString = Field("1.0", description="The gradient is clipped to this global norm; 0: never.")
    warmup_steps: int = Field(0, ge=0, le=10000, description="Steps over which the learning rate rises linearly.")
    schedule: Literal["Constant", "Linear"] = Field(
        "Constant", description="Learning rate after the warm-up: Constant, or Linear down to a tenth at maxSteps."
    )


class Algorithm(ApiModel):
    """How trajectories become updates."""

    model_config = rules(
        (
            "(self.estimator == 'SFT') == (self.loss == 'CrossEntropy')",
            "estimator SFT goes with loss CrossEntropy and only with it: set both, or neither",
        ),
        (
            "self.estimator != 'GRPO' || self.groupSize >= 2",
            "estimator GRPO compares within a group: set groupSize >= 2",
        ),
        (
            "self.estimator == 'GRPO' || self.maxRefillPrompts == 0",
            "maxRefillPrompts replaces groups that give GRPO no signal: leave it at 0 for other estimators",
        ),
        (
            "self.estimator != 'SFT' || self.maxOffPolicySteps == 0",
            "estimator SFT draws nothing that could be off-policy: leave maxOffPolicySteps at 0",
        ),
    )

    estimator: Estimator = Field(
        Estimator.GRPO,
        description="GRPO: rewards normalised within each prompt's group. Reinforce: rewards less the mean of the step."
        " SFT: supervised fine-tuning on demonstrations. It cannot change after creation.",
    )
    loss: LossFunction = Field(
        LossFunction.PPO,
        description="Per-token loss, with the Tinker API's meanings. CrossEntropy goes with SFT and only with it.",
    )
    group_size: int = Field(8, ge=1, le=1024, description="Trajectories drawn for each prompt (RL).")
    prompts_per_step: int = Field(
        8, ge=1, le=4096, description="Prompts of a step (RL), or demonstrations of a step (SFT)."
    )
    learning_rate: DecimalString = Field(
        "1e-4", description="Peak learning rate as a decimal string, for example '5e-4'."
    )
    clip_low: DecimalString = Field("0.8", description="Ratios below this are clipped (PPO, CISPO); a ratio, not an ε.")
    clip_high: DecimalString = Field(
        "1.2", description="Ratios above this are clipped (PPO, CISPO); a ratio, not an ε."
    )
    normalize_by_std: bool = Field(
        True, description="GRPO: divide a group's centred rewards by their standard deviation."
    )
    loss_normalization: LossNormalization = Field(
        LossNormalization.TOKENS,
        description="Tokens: every token of a step weighs the same, so that long trajectories weigh more. Sequences:"
        " every trajectory (SFT: demonstration) weighs the same, shared out over its tokens.",
    )
    epochs_per_batch: int = Field(1, ge=1, le=16, description="Times that a step trains on its trajectories.")
    minibatches: int = Field(
        1,
        ge=1,
        le=64,
        description="Parts, of whole groups, into which a step's trajectories are cut anew for each epoch, with an"
        " optimizer step after each part: epochsPerBatch times minibatches optimizer steps a step.",
    )
    max_off_policy_steps: int = Field(
        0,
        ge=0,
        le=MAX_OFF_POLICY_STEPS,
        description="Steps by which the policy that draws a trajectory may be older than the one that is trained on it."
        " 0: they are the same. With n, the next n steps are drawn while one is trained. The engine's"
        " capacity.maxOffPolicySteps is the most that it takes.",
    )
    max_importance_weight: DecimalString | None = Field(
        None,
        description="Truncated importance sampling: the loss compares with the trainer's own policy at the step's"
        " start instead of the sampler's, and weighs each token by the former's probability over the latter's, at most"
        " by this much, for example '2'. It costs a forward pass. Unset: the loss compares with the sampler's.",
    )
    kl_coefficient: DecimalString = Field(
        "0",
        description="Pull towards the adapter as it started (the base model, or what initFrom gave): so many times"
        " log(policy / start) of each token, less the step's mean, is taken from its advantage. Above 0 it costs a"
        " forward pass and host memory for a second adapter.",
    )
    entropy_coefficient: DecimalString = Field(
        "0",
        description="Push towards exploring: so many times -log(policy) of each token, less the step's mean, is added"
        " to its advantage; on average the gradient of the policy's entropy.",
    )
    max_refill_prompts: int = Field(
        0,
        ge=0,
        le=4096,
        description="GRPO: further prompts that a step draws, at most, until promptsPerStep groups have rewards that"
        " differ. 0: groups without spread are dropped.",
    )
    truncated_completions: TruncatedCompletions = Field(
        TruncatedCompletions.KEEP,
        description="What a trajectory counts that a token limit cut off. Keep: its reward, like others. Mask: nothing,"
        " as if it had not been drawn. Punish: its reward less truncationPenalty.",
    )
    truncation_penalty: DecimalString = Field("1", description="See truncatedCompletions, Punish.")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="AdamW's settings.")


EnvironmentName = Literal["WordProblems", "GSM8K", "HTTP"]


class Environment(ApiModel):
    """Where episodes are played."""

    name: EnvironmentName = Field(
        description="WordProblems: generated problems in families. GSM8K: problems with written solutions. Both offer"
        " the tools calculator and final_answer; the reward is 1 only if final_answer is called with the right answer."
        " HTTP: a container of yours that speaks clora's protocol, at arguments.url, on one of the engine's allowed"
        " hosts."
    )
    arguments: dict[Annotated[str, Field(min_length=1, max_length=63)], Annotated[str, Field(max_length=1024)]] = Field(
        default_factory=dict,
        max_length=16,
        description="Arguments of the environment. WordProblems takes families, a comma-separated list, and"
        " heldOutTemplates, how many templates of each family are for evaluation alone (default 0); it and GSM8K take"
        " malformedCalls, Answer (with an error) or End (the episode). HTTP takes url, and retries of a request that"
        " fails (0 to 5, default 2).",
    )
    max_turns: int = Field(
        3, ge=1, le=64, description="Turns of the model in an episode; it then ends with its rewards so far."
    )
    concurrency: int = Field(64, ge=1, le=4096, description="Episodes of this experiment in flight at once.")
    max_episode_tokens: int | None = Field(
        None,
        ge=16,
        le=1048576,
        description="Tokens of an episode in all: prompt, turns and answers; one that would need more is cut off."
        " Unset, or more than the engine's maxModelLen: that.",
    )
    timeout_seconds: int = Field(
        60,
        ge=1,
        le=3600,
        description="Seconds that the environment has for one answer, with all retries; a later one ends its episode"
        " alone.",
    )


class ConfigMapKey(ApiModel):
    name: ObjectName = Field(description="A ConfigMap of the experiment's namespace.")
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", min_length=1, max_length=253)] = Field(
        description="Key whose value is JSON Lines."
    )


class VolumePath(ApiModel):
    volume: LabelName = Field(description="Name of one of the engine's dataVolumes.")
    path: RelativePath = Field(description="Path within the volume, without leading slash and without '..'.")


class DataFile(VolumePath):
    held_out_path: RelativePath | None = Field(
        None,
        description="A file of the same volume with rows to evaluate on; unset: rows of path are set aside for it.",
    )


_HUB_PART = r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"  # neither '.' nor '..', nor hidden
_HUB_NAME = r"[A-Za-z0-9]+([-._][A-Za-z0-9]+|__[A-Za-z0-9]+)*"  # the hub takes neither '--' nor '..'
HubPath = Annotated[str, Field(pattern=rf"^{_HUB_PART}(/{_HUB_PART})*$", min_length=1, max_length=253)]
HUB_REPO_PATTERN = rf"^{_HUB_NAME}/{_HUB_NAME}$"


class HubFile(ApiModel):
    """A file of a public data set on the hub."""

    repo: Annotated[str, Field(pattern=HUB_REPO_PATTERN, max_length=96)] = Field(
        description="The data set's repository: openai/gsm8k. One that the engine's spec.hubDatasets allows."
    )
    revision: HubPath = Field(
        description="A commit: a run that is resumed, or repeated, must find the same rows. A tag or branch can move."
    )
    file: HubPath = Field(
        description="A JSON Lines or Parquet file of the repository: main/train-00000-of-00001.parquet."
    )
    held_out_file: HubPath | None = Field(
        None, description="A file of rows to evaluate on; unset: rows of file are set aside for it."
    )


class Data(ApiModel):
    """The prompts, or demonstrations. Exactly one source."""

    model_config = rules(
        (
            "[has(self.builtin), has(self.configMap), has(self.file), has(self.hub)].filter(x, x).size() == 1",
            "give exactly one source of data: builtin, configMap, file or hub",
        ),
    )

    builtin: Literal["Generated", "GSM8KSample"] | None = Field(
        None,
        description="Generated: the environment makes its own problems without end. GSM8KSample: the first problems of"
        " GSM8K, shipped with clora.",
    )
    config_map: ConfigMapKey | None = Field(None, description="JSON Lines in a ConfigMap of the same namespace.")
    file: DataFile | None = Field(None, description="A JSON Lines or Parquet file in one of the engine's dataVolumes.")
    hub: HubFile | None = Field(
        None,
        description="A file of a public data set on the hub, which the engine has to reach or to have in its cache.",
    )
    shuffle_seed: Seed = Field(0, description="Seed of the order in which examples come, and of generated problems.")


class Sampling(ApiModel):
    """How tokens are drawn. Truncating samplers (top-p, top-k) do not exist here: they falsify the ratios of RL."""

    temperature: DecimalString = Field("1.0", description="Sampling temperature; the trainer divides logits by it too.")
    max_tokens: int = Field(256, ge=1, le=131072, description="Tokens that the model may write in one turn.")


class Evaluation(ApiModel):
    """Accuracy on held-out examples, before the first step, after the last, and every so many steps: of one greedy
    answer to each, and of several drawn ones. The best checkpoint is the one with the highest greedy accuracy."""

    examples: int = Field(0, ge=0, le=10000, description="Held-out examples; 0 turns evaluation off.")
    every_steps: int = Field(
        0, ge=0, le=100000, description="Evaluate after each so many steps too; 0: at the ends only."
    )
    samples: int = Field(
        0,
        ge=0,
        le=256,
        description="Answers k that are drawn to each example besides the greedy one: evalPassAtK is the share of"
        " examples with at least one right answer among them, evalMeanAtK the share of right answers. 0: none.",
    )
    temperature: DecimalString = Field("1.0", description="Sampling temperature of those k answers.")


class Checkpoint(ApiModel):
    """Commits. A step exists when it is committed."""

    every: int = Field(1, ge=1, le=1000, description="Steps per commit; with more than 1, a crash takes steps back.")
    keep: int = Field(3, ge=1, le=1000, description="Commits kept besides the first, the latest and the best.")


class StopWhen(ApiModel):
    """An end before maxSteps: the experiment has succeeded once a metric of its steps has kept its bound for so many
    steps in a row."""

    model_config = rules(
        (
            "[has(self.atLeast), has(self.atMost)].filter(x, x).size() == 1",
            "give exactly one bound: atLeast or atMost",
        ),
    )

    metric: Literal["rewardMean", "evalAccuracy", "evalPassAtK", "loss", "entropy", "kl"] = Field(
        "rewardMean", description="One of the metrics in status.progress.metrics."
    )
    at_least: DecimalString | None = Field(None, description="The bound from below, for example '0.9'.")
    at_most: DecimalString | None = Field(None, description="The bound from above.")
    steps: int = Field(
        1,
        ge=1,
        le=1000,
        description="Steps in a row that must keep the bound. Steps without the metric (between evaluations) are passed"
        " over; a value that is not a number keeps no bound.",
    )


class Serving(ApiModel):
    """An OpenAI-compatible endpoint that answers with this experiment's adapter, as long as it holds a slot: while it
    trains with the latest version, and after it has succeeded with the last one."""

    enabled: bool = Field(
        True,
        description="Serve it. Its token is in a Secret of its namespace, status.serving says where it answers, and"
        " condition Served whether. After its end it keeps its slot on the engine, or takes one again, until this is"
        " turned off, the resource is deleted, or a higher priority takes the slot.",
    )


class InitFromExperiment(ApiModel):
    name: ObjectName = Field(description="A LoRAExperiment of the same namespace and engine.")
    step: int | None = Field(
        None, ge=0, le=10000000, description="Its step; unset: its last step, waiting until it has succeeded."
    )


class InitFrom(ApiModel):
    """Starting weights. Exactly one source."""

    model_config = rules(
        (
            "[has(self.experiment), has(self.file)].filter(x, x).size() == 1",
            "give exactly one source to start from: experiment or file",
        ),
        ("!has(self.file) || !self.optimizer", "a PEFT directory holds no optimizer state: leave optimizer out"),
    )

    experiment: InitFromExperiment | None = Field(None, description="Another experiment's step.")
    file: VolumePath | None = Field(None, description="A PEFT adapter directory in one of the engine's dataVolumes.")
    optimizer: bool = Field(False, description="Take over the optimizer's state too, not only the weights.")


def _immutable(field: str, optional: bool) -> tuple[str, str]:
    same = f"self.{field} == oldSelf.{field}"
    if optional:
        same = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {same})"
    return same, f"{field} cannot change after creation: create a new experiment (initFrom can continue from this one)"


class ExperimentSpec(ApiModel):
    """What a person asks for."""

    model_config = rules(
        (
            "has(self.engineRef) != has(self.engineSelector)",
            "give exactly one of engineRef and engineSelector",
        ),
        _immutable("lora", optional=False),
        ("self.algorithm.estimator == oldSelf.algorithm.estimator", "algorithm.estimator cannot change after creation"),
        _immutable("environment", optional=False),
        _immutable("data", optional=False),
        _immutable("initFrom", optional=True),
        _immutable("engineRef", optional=True),
        _immutable("engineSelector", optional=True),
    )

    engine_ref: EngineRef | None = Field(None, description="The engine that trains it, by name.")
    engine_selector: EngineSelector | None = Field(None, description="The engine that trains it, by its labels.")
    lora: Lora = Field(default_factory=Lora, description="The adapter's shape. It cannot change after creation.")
    algorithm: Algorithm = Field(default_factory=Algorithm, description="How trajectories become updates.")
    environment: Environment = Field(description="Where episodes are played. It cannot change after creation.")
    data: Data = Field(description="The prompts, or demonstrations. It cannot change after creation.")
    sampling: Sampling = Field(default_factory=Sampling, description="How tokens are drawn.")
    max_steps: int = Field(ge=1, le=1000000, description="Training steps after which the experiment has succeeded.")
    stop_when: StopWhen | None = Field(
        None, description="End with success before maxSteps, once a metric is good enough. It can change at any time."
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Accuracy on held-out examples.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="How often steps are committed.")
    init_from: InitFrom | None = Field(None, description="Starting weights. It cannot change after creation.")
    serving: Serving | None = Field(
        None,
        description="Serve the adapter over HTTP, on engines whose spec.serving is enabled. It can change at any time,"
        " also after the end.",
    )
    tracking: list[Tracker] | None = Field(
        None,
        max_length=3,
        description="Experiment trackers that get the metrics too, one of a kind at most. It can change at any time."
        " Trouble with a tracker is said by condition Tracked and stops no training.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["kind"]},
    )
    weight: int = Field(
        100,
        ge=1,
        le=MAX_WEIGHT,
        description="Its share of the engine's sampler and of its trainer: twice the weight gets twice the tokens while"
        " others wait there too. It can change at any time, and does so at once.",
    )
    priority_class_name: PriorityClassName | None = Field(
        None,
        description="A Kubernetes PriorityClass; unset: priority 0. On a full engine a higher priority takes the slot"
        " of the lowest one, unless its class has preemptionPolicy Never: the other finishes its step, commits,"
        " detaches, waits in the queue (reason Preempted) and resumes from that commit. It can change at any time.",
    )
    suspend: bool = Field(False, description="Pause at the next step's end; the slot goes to others, nothing is lost.")
    active_deadline_seconds: int | None = Field(
        None, ge=1, le=31536000, description="Seconds since the start after which an unfinished experiment fails."
    )
    backoff_limit: int = Field(
        3, ge=0, le=100, description="Errors of the experiment itself that are tried again before it fails for good."
    )
    ttl_seconds_after_finished: int | None = Field(
        None,
        ge=0,
        le=2147483647,
        description="Seconds after its end, Succeeded or Failed, after which the resource is deleted, as a Job's; 0: at"
        " once; unset: never. deletionPolicy says what becomes of its files. An experiment that starts from it"
        " (initFrom) has to be attached by then.",
    )
    deletion_policy: Literal["Retain", "Delete"] = Field(
        "Retain", description="What happens to its files in the engine's storage when the resource is deleted."
    )


# ------------------------------------------------------------------------------------------------ status


class Condition(StatusModel):
    """A condition, as in the Kubernetes API."""

    type: str = Field(max_length=316, description="Type of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    reason: str = Field(max_length=1024, description="One CamelCase word: why.")
    message: str = Field("", max_length=32768, description="A sentence for people.")
    observed_generation: int = Field(0, ge=0, description="The generation of the spec that this was said of.")
    last_transition_time: str = Field(
        max_length=64, description="When the status last changed.", json_schema_extra={"format": "date-time"}
    )


class EngineStatusRef(StatusModel):
    """Where it is attached."""

    name: str = Field(max_length=253, description="The LoRAEngine.")
    epoch: int = Field(0, ge=0, description="The life of the engine that holds the adapter.")
    adapter_version: str = Field("", max_length=128, description="The version that the sampler serves.")
    adapter_digest: str = Field("", max_length=128, description="Digest of the adapter's last commit.")


class Progress(StatusModel):
    """The latest values; history is in the engine's metrics."""

    step: int = Field(0, ge=0, description="Steps made.")
    max_steps: int = Field(0, ge=0, description="Steps asked for.")
    percent: int = Field(0, ge=0, le=100, description="Share of the steps made.")
    reward: str = Field("", max_length=32, description="Mean reward of the last step (RL).")
    phase: str = Field("", max_length=32, description="What it is doing: Rollout, Train, Publish, Commit, Evaluate.")
    metrics: dict[str, Annotated[str, Field(max_length=32)]] = Field(
        default_factory=dict, max_length=16, description="Up to 16 named values of the last step."
    )
    seconds_waited: int = Field(0, ge=0, description="Seconds spent waiting for sampler and trainer.")
    estimated_remaining_seconds: int | None = Field(
        None, ge=0, description="Seconds until the end at the present pace."
    )
    last_step_time: str | None = Field(None, max_length=64, description="When the last step ended.")


class CheckpointStatus(StatusModel):
    """The latest commit."""

    step: int = Field(ge=0, description="The step.")
    path: str = Field(max_length=1024, description="Its folder within the engine's storage.")
    digest: str = Field(max_length=128, description="Digest of its manifest.")


class BestCheckpoint(StatusModel):
    """The commit that was measured best: by accuracy on held-out examples or, without evaluation, by the mean reward of
    what was drawn with it."""

    step: int = Field(ge=0, description="The step.")
    metric: str = Field(max_length=64, description="What it was measured by: evalAccuracy or rewardMean.")
    value: str = Field(max_length=32, description="The metric's value.")


class InitFromStatus(StatusModel):
    """What initFrom.experiment was resolved to, once: it holds even when that experiment is deleted later."""

    uid: str = Field(max_length=64, description="The uid of the experiment that it starts from.")
    step: int | None = Field(None, ge=0, description="The step that it starts from; unset: the latest commit.")


class ServingStatus(StatusModel):
    """How the adapter is reached."""

    endpoint: str = Field("", max_length=512, description="Base URL for OpenAI clients; empty while it is not known.")
    secret_name: str = Field(
        max_length=253, description="The Secret, in the experiment's namespace, whose key token is the bearer token."
    )
    version: str = Field("", max_length=320, description="The version that answers; empty: none does now.")


class ExperimentStatus(StatusModel):
    """What clora reports."""

    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Accepted, Attached, Progressing, Succeeded, Failed; Served once spec.serving was enabled; Tracked"
        " once spec.tracking named a tracker.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    observed_generation: int = Field(0, ge=0, description="The generation of the spec that was last acted on.")
    state: State = Field(State.PENDING, description="One word for people, derived from the conditions.")
    engine: EngineStatusRef | None = Field(None, description="Where it is attached.")
    progress: Progress | None = Field(None, description="The latest values.")
    queue_position: int | None = Field(None, ge=1, description="Place in the queue while Queued.")
    restarts: int = Field(0, ge=0, description="Errors of the experiment that were tried again.")
    preempted_by: str | None = Field(
        None,
        max_length=253,
        description="The LoRAExperiment that took its slot, until it has one again; of another namespace, its uid.",
    )
    checkpoint: CheckpointStatus | None = Field(None, description="The latest commit.")
    best_checkpoint: BestCheckpoint | None = Field(
        None, description="The commit that was measured best; it is kept, and `clora pull --step` gets it."
    )
    init_from: InitFromStatus | None = Field(None, description="What initFrom.experiment was resolved to.")
    serving: ServingStatus | None = Field(None, description="How the adapter is reached while it is served.")
    start_time: str | None = Field(None, max_length=64, description="When it was first attached.")
    completion_time: str | None = Field(None, max_length=64, description="When it succeeded or failed.")
