"""The engine's vocabulary: what passes between rollouts, trainer, sampler and journal. Read this first.

Everything here is immutable data. Structs that cross a process boundary (engine <-> trainer) are msgspec Structs and
travel as msgpack; nothing is pickled. Token ids and log-probs are kept exactly as the sampler gave them from end to
end: nothing is re-tokenized.

Legend of shape suffixes in tensor names, used throughout the engine:

====  ==========================================================
_B    rows of a micro-batch (a row: one prompt and its completions)
_L    positions of a row, padded to the longest of its micro-batch
_T    completion tokens (flattened over rows)
_V    vocabulary
_P    parameters of one adapter, flattened
_R    LoRA rank
_I/O  input and output features of one linear layer
====  ==========================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

# --------------------------------------------------------------------------------------------- adapters


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and start of one adapter. `target_modules` follows PEFT: "all-linear", a list of name suffixes, or a regex
    (one string) matched against the whole module name."""

    rank: int
    alpha: int
    target_modules: str | tuple[str, ...] = "all-linear"
    seed: int = 0


class AdamParams(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW (Loshchilov and Hutter, 2019) for one optim_step; `grad_clip_norm` 0 means no clipping."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 1.0


# --------------------------------------------------------------------------------------------- training batches


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What follows a prompt, token by token; all lists have one length T.

    ids         the tokens, those of the model and those of tools alike
    weights     loss weight of each token; 0 for tokens the model did not write
    logprobs    the sampler's log-probs at the sampling temperature (0.0 where weights is 0; unused by CrossEntropy)
    advantages  per token (unused by CrossEntropy)
    """

    ids: list[int]
    weights: list[float]
    logprobs: list[float]
    advantages: list[float]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its completions, in one attention row: the prompt is computed once, no completion sees another."""

    prompt: list[int]
    completions: list[Completion]


LossName = Literal["CrossEntropy", "ImportanceSampling", "PPO", "CISPO", "DRO"]


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A per-token loss, summed over tokens and divided by `denominator` (the caller's, so that it is the same however
    a batch is cut). Names, thresholds and meanings as in the Tinker API: clip thresholds are absolute ratios, 0.8 and
    1.2, not an epsilon. `temperature` divides the logits, as the sampler did."""

    name: LossName
    denominator: float
    temperature: float = 1.0
    clip_low: float = 0.8
    clip_high: float = 1.2
    beta: float = 0.05  # DRO only


class ForwardBackwardResult(msgspec.Struct, frozen=True, kw_only=True):
    """loss: the summed loss over `denominator`. metrics: named means over the trained tokens (entropy, ratio, kl,
    clip_share; natural units, KL in nats). tokens: positions computed for it, prompts and padding included;
    plain_tokens: as many would be computed without padding with a row for every trained completion. adapters: computed
    together in its pass, itself included. seconds: wall-clock, of the whole pass."""

    loss: float
    metrics: dict[str, float]
    tokens: int
    plain_tokens: int
    adapters: int
    seconds: float


class OptimResult(msgspec.Struct, frozen=True, kw_only=True):
    """step: the adapter's optimizer steps so far. skipped: the gradient was not finite and nothing was changed."""

    step: int
    grad_norm: float
    skipped: bool
    seconds: float


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """parameters: trainable scalars. host_bytes: what the adapter's state takes in the AdapterStore."""

    parameters: int
    host_bytes: int
    step: int


# --------------------------------------------------------------------------------------------- sampling


@dataclass(frozen=True, slots=True)
class Version:
    """An immutable snapshot of an adapter that the sampler can serve."""

    experiment: str
    step: int

    def __str__(self) -> str:
        return f"{self.experiment}@{self.step}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy. `stop_token_ids` end a sample and are part of its ids."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """ids and log-probs of the sampled tokens (at the sampling temperature); `truncated`: max_tokens or the context
    ended it rather than a stop token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    truncated: bool


# --------------------------------------------------------------------------------------------- rollouts


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One finished episode. `ids` follow the prompt; `mask` is 1 where the model wrote the token. `error` names what
    failed this trajectory alone (an environment's time-out, say); such a trajectory carries no training signal."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float
    turns: int
    truncated: bool = False
    tool_calls: int = 0
    tool_errors: int = 0
    error: str = ""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All trajectories of one prompt, drawn under one version. `index` is the prompt's place in its step; log-probs are
    those at `temperature`."""

    index: int
    example: int  # position in the shuffled data
    version_step: int
    prompt: list[int]
    trajectories: list[Trajectory]
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What a person sees of a step; values are finite floats, seconds are wall-clock seconds."""

    step: int
    values: dict[str, float] = field(default_factory=dict)
