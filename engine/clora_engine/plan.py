"""From an experiment's spec to what its loop works with; everything that can be wrong with a spec is found here.

The schema has checked shapes and bounds already. What only the engine can know is checked here, before the experiment
gets a slot: rank against capacity, environment arguments, data, the model's chat template, paths below their roots.
Every error is a UserError that names the field.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel

from clora_api.control import DesiredExperiment
from clora_api.v1alpha1.base import number
from clora_api.v1alpha1.experiment import Data as DataSpec
from clora_api.v1alpha1.experiment import Estimator, ExperimentSpec, LossNormalization, VolumePath
from clora_engine import data, environments, tracking
from clora_engine.advantages import Scoring, Shape
from clora_engine.chat import Renderer
from clora_engine.config import EngineConfig
from clora_engine.environments import http_addresses
from clora_engine.environments.protocol import EnvironmentFactory
from clora_engine.errors import UserError
from clora_engine.types import AdamParams, LoraConfig, SamplingParams

IMMUTABLE = ("lora", "environment", "data", "init_from")

MAX_STEP_TOKENS = 1 << 24
"""That the trajectories of a step may have: the engine holds them, at some 200 bytes each, for all experiments."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked spec. `init_folder`: a PEFT directory to start from, below a data volume."""

    spec: ExperimentSpec
    lora: LoraConfig
    factory: EnvironmentFactory
    renderer: Renderer
    data: data.Data
    init_folder: Path | None

    @property
    def supervised(self) -> bool:
        return self.spec.algorithm.estimator is Estimator.SFT

    @property
    def samples(self) -> bool:
        """Whether it draws any tokens: supervised fine-tuning does so only to evaluate."""
        return not self.supervised or bool(self.data.held_out)

    @property
    def drawing(self) -> tuple[object, ...]:
        """All that decides what is drawn for a step: plans in which it is equal draw the same."""
        spec, algorithm = self.spec, self.spec.algorithm
        rules = (algorithm.prompts_per_step, algorithm.group_size, algorithm.max_refill_prompts, self.scoring)
        ahead = (algorithm.max_off_policy_steps, spec.max_steps)
        return spec.environment, spec.data, spec.evaluation.examples, spec.sampling, algorithm.estimator, rules, ahead

    @property
    def temperature(self) -> float:
        return number(self.spec.sampling.temperature)

    @property
    def scoring(self) -> Scoring:
        """What a trajectory counts."""
        algorithm = self.spec.algorithm
        return Scoring(truncated=algorithm.truncated_completions, penalty=number(algorithm.truncation_penalty))

    @property
    def shape(self) -> Shape:
        """How advantages become a batch."""
        algorithm = self.spec.algorithm
        more = number(algorithm.kl_coefficient) > 0 or number(algorithm.entropy_coefficient) > 0
        sequences = algorithm.loss_normalization is LossNormalization.SEQUENCES
        return Shape(by_sequences=sequences, keep_flat=more)

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            max_tokens=self.spec.sampling.max_tokens,
            stop_token_ids=self.renderer.stop_token_ids,
        )

    def remaining_tokens(self, step: int, per_step: float | None) -> int:
        """Tokens of work that are left after `step`, of so many a step; before anything is known of that, what the
        spec allows to sample, or, for demonstrations, a completion each."""
        algorithm = self.spec.algorithm
        if per_step is None:
            episodes = algorithm.prompts_per_step * algorithm.group_size
            turns = episodes * self.spec.environment.max_turns
            per_step = (algorithm.prompts_per_step if self.supervised else turns) * self.spec.sampling.max_tokens
        return round(max(0, self.spec.max_steps - step) * per_step)

    def adam(self, step: int) -> AdamParams:
        """AdamW's settings for step `step` (from 1): linear warm-up, then constant or linear down to a tenth."""
        optimizer = self.spec.algorithm.optimizer
        rate = number(self.spec.algorithm.learning_rate)
        if optimizer.warmup_steps:
            rate *= min(1.0, step / optimizer.warmup_steps)
        if optimizer.schedule == "Linear":
            rate *= 1.0 - 0.9 * min(1.0, (step - 1) / self.spec.max_steps)
        return AdamParams(
            learning_rate=rate,
            beta1=number(optimizer.beta1),
            beta2=number(optimizer.beta2),
            eps=number(optimizer.epsilon),
            weight_decay=number(optimizer.weight_decay),
            grad_clip_norm=number(optimizer.max_grad_norm),
        )


# Few, and not those of the engine's files: a plan reads data, waits for a container or the hub, and holds its rows.
_builders = ThreadPoolExecutor(max_workers=2, thread_name_prefix="plan")


async def built(desired: DesiredExperiment, config: EngineConfig, tokenizer: Any) -> Plan:
    """`build`, as one of two at a time."""
    return await asyncio.get_running_loop().run_in_executor(_builders, build, desired, config, tokenizer)


def build(desired: DesiredExperiment, config: EngineConfig, tokenizer: Any) -> Plan:
    """Checks a desired experiment against this engine. Blocking: it reads data, and asks an HTTP environment to
    describe itself. Raises UserError, or TransientError when that environment does not answer."""
    spec = desired.spec
    check(spec, config)
    factory = environments.create(spec.environment.name, spec.environment.arguments, builders=_environments(config))
    renderer = Renderer(tokenizer, factory.tools)
    if spec.environment.max_turns > 1:
        renderer.check_appends()
    supervised = spec.algorithm.estimator is Estimator.SFT
    return Plan(
        spec=spec,
        lora=_lora(spec, desired.uid),
        factory=factory,
        renderer=renderer,
        data=data.load(
            _source(spec.data, desired.data_text, config),
            factory,
            seed=spec.data.shuffle_seed,
            held_out=spec.evaluation.examples,
            chat=supervised,
        ),
        init_folder=_init_folder(spec, config),
    )


def _environments(config: EngineConfig) -> Mapping[str, environments.Builder]:
    hosts = http_addresses.policy(
        config.environment_hosts, loopback=config.loopback_environments, nodes=config.other_nodes
    )
    return environments.allowed(config.environments, hosts)


def max_context(spec: ExperimentSpec, config: EngineConfig) -> int:
    """Positions that an episode may have, its prompt included."""
    return min(config.max_context, spec.environment.max_episode_tokens or config.max_context)


def check_change(before: ExperimentSpec, after: ExperimentSpec) -> None:
    """Raises UserError when an experiment would become another one."""
    for field in IMMUTABLE:
        if getattr(before, field) != getattr(after, field):
            raise UserError(f"{to_camel(field)} cannot change: create a new experiment", field=to_camel(field))
    if before.algorithm.estimator != after.algorithm.estimator:
        raise UserError("algorithm.estimator cannot change", field="algorithm.estimator")


def check(spec: ExperimentSpec, config: EngineConfig) -> None:
    """What can be checked without reading anything. Raises UserError."""
    tracking.check(spec, config)
    if spec.lora.rank > config.max_rank:
        raise UserError(
            f"lora.rank {spec.lora.rank} is above this engine's maxRank {config.max_rank}",
            reason="RankTooHigh",
            field="lora.rank",
        )
    context = max_context(spec, config)
    algorithm = spec.algorithm
    groups = algorithm.prompts_per_step + algorithm.max_refill_prompts
    longest = context if spec.environment.max_turns > 1 else min(context, spec.sampling.max_tokens)
    if algorithm.estimator is not Estimator.SFT and groups * algorithm.group_size * longest > MAX_STEP_TOKENS:
        raise UserError(
            f"a step of {groups} prompts (algorithm.promptsPerStep and maxRefillPrompts) x groupSize"
            f" {algorithm.group_size} x {longest} tokens may have more than {MAX_STEP_TOKENS} tokens: lower them, or"
            " environment.maxEpisodeTokens",
            field="algorithm.promptsPerStep",
        )
    if spec.sampling.max_tokens >= context:
        raise UserError(
            f"sampling.maxTokens {spec.sampling.max_tokens} leaves no room in a context of {context}",
            field="sampling.maxTokens",
        )
    if not 0.01 <= number(spec.sampling.temperature) <= 2.0:
        raise UserError("sampling.temperature must be between 0.01 and 2", field="sampling.temperature")
    low, high = number(spec.algorithm.clip_low), number(spec.algorithm.clip_high)
    if not low <= 1.0 <= high:
        raise UserError(
            f"algorithm.clipLow {low} and clipHigh {high} are ratios around 1: clipLow <= 1 <= clipHigh",
            field="algorithm.clipLow",
        )
    _check_algorithm(spec, config)


def _check_algorithm(spec: ExperimentSpec, config: EngineConfig) -> None:
    algorithm = spec.algorithm
    if algorithm.max_importance_weight is not None and number(algorithm.max_importance_weight) <= 0:
        raise UserError(
            "algorithm.maxImportanceWeight 0 would take every token's weight: leave it out, or set 1 or more",
            field="algorithm.maxImportanceWeight",
        )
    if algorithm.estimator is Estimator.SFT:
        unfit = {
            "klCoefficient": number(algorithm.kl_coefficient) > 0,
            "entropyCoefficient": number(algorithm.entropy_coefficient) > 0,
            "maxImportanceWeight": algorithm.max_importance_weight is not None,
        }
        for name in (name for name, given in unfit.items() if given):
            raise UserError(
                f"algorithm.{name} is for estimators that sample: leave it out for SFT", field=f"algorithm.{name}"
            )
    if algorithm.max_off_policy_steps > config.max_off_policy_steps:
        raise UserError(
            f"algorithm.maxOffPolicySteps {algorithm.max_off_policy_steps} is above this engine's"
            f" capacity.maxOffPolicySteps {config.max_off_policy_steps}",
            field="algorithm.maxOffPolicySteps",
        )
    for name in ("beta1", "beta2"):
        if not 0.0 <= number(getattr(spec.algorithm.optimizer, name)) < 1.0:
            raise UserError(f"algorithm.optimizer.{name} must be below 1", field=f"algorithm.optimizer.{name}")


def _lora(spec: ExperimentSpec, uid: str) -> LoraConfig:
    """Without a seed, one of the uid's: each experiment has its own, and the same one whenever it is planned anew."""
    modules, seed = spec.lora.target_modules, spec.lora.seed
    return LoraConfig(
        rank=spec.lora.rank,
        alpha=spec.lora.alpha,
        target_modules="all-linear" if modules == ["all-linear"] else tuple(modules),
        seed=_seed_of(uid) if seed is None else seed,
    )


def _seed_of(uid: str) -> int:
    """Below 2^31, as those that a spec may name."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:4]) >> 1


def _source(spec: DataSpec, text: str | None, config: EngineConfig) -> data.Source:
    if spec.builtin is not None:
        return data.Builtin(spec.builtin)
    if spec.config_map is not None:
        if text is None:
            raise UserError("the ConfigMap's contents were not sent along", field="data.configMap")
        return data.Inline(text, f"ConfigMap {spec.config_map.name}, key {spec.config_map.key}")
    if spec.hub is not None:
        if not {spec.hub.repo, spec.hub.repo.partition("/")[0] + "/*"}.intersection(config.hub_datasets):
            raise UserError(
                f"{spec.hub.repo} is none of the data sets that this engine may download (LoRAEngine spec.hubDatasets);"
                " put the file into a dataVolume",
                field="data.hub.repo",
            )
        return data.HubFile(spec.hub.repo, spec.hub.revision, spec.hub.file, spec.hub.held_out_file)
    assert spec.file is not None, "exactly one source: the schema's rule"
    volume, root = spec.file.volume, _volume(spec.file, config, "data.file.volume")
    aside = spec.file.held_out_path
    held_out = data.File(root / aside, root, f"{volume}/{aside}") if aside is not None else None
    return data.File(root / spec.file.path, root, f"{volume}/{spec.file.path}", held_out)


def _init_folder(spec: ExperimentSpec, config: EngineConfig) -> Path | None:
    if spec.init_from is None or spec.init_from.file is None:
        return None
    source = spec.init_from.file
    root = _volume(source, config, "initFrom.file.volume")
    try:
        folder = (root / source.path).resolve()
        found = folder.is_relative_to(root.resolve()) and (folder / "adapter_config.json").is_file()
    except (OSError, RuntimeError, ValueError):  # a name that is too long, a link to itself, a zero byte
        found = False
    if not found:
        raise UserError(
            f"{source.volume}/{source.path} is no PEFT adapter directory within its volume",
            reason="InitFromNotFound",
            field="initFrom.file.path",
        )
    return folder


def _volume(source: VolumePath, config: EngineConfig, field: str) -> Path:
    root = config.data_volumes.get(source.volume)
    if root is None:
        known = ", ".join(sorted(config.data_volumes)) or "none"
        raise UserError(f"this engine has no dataVolume {source.volume!r}; it has: {known}", field=field)
    return root
