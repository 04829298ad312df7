"""Whether an experiment can run on an engine at all, however full that is, and what is missing where it cannot. Pure.

Placement asks it of the engine that an experiment names and of those that its labels select alike. Only what is known
of an engine counts: of one that somebody else runs, that is nothing before it has answered. Leaves out what the engine
alone can judge, and refuses by itself: an environment's arguments, data, combinations of settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clora_api.control import EngineInfo
from clora_api.v1alpha1.conditions import Reason
from clora_api.v1alpha1.engine import offered_environments
from clora_api.v1alpha1.experiment import ExperimentSpec
from clora_operator.claims import Assignment, Claim, Room
from clora_operator.resources import Engine
from clora_operator.status import clip

NAMED = 8
"""Engines whose lacks are told; of more, how many."""
MESSAGE_CHARACTERS = 1024


def limits(engine: Engine, info: EngineInfo | None) -> dict[str, Any]:
    """Fields of a Room: what an engine says of itself and, where it says nothing, what its spec asks of its pod."""
    said = {
        "max_rank": info.max_rank if info else engine.status.max_rank or None,
        "max_off_policy_steps": info.max_off_policy_steps if info else None,
        "max_context": info.max_context if info else None,
        "environments": frozenset(info.environments) if info and info.environments is not None else None,
        "data_volumes": frozenset(info.data_volumes) if info else None,
    }
    spec = engine.spec
    if spec is None or spec.endpoint is not None:
        return said
    asked = {
        "max_rank": spec.capacity.max_rank,
        "max_off_policy_steps": spec.capacity.max_off_policy_steps,
        "max_context": min(spec.sampler.max_model_len, spec.trainer.tokens_per_microbatch),
        "environments": frozenset(
            offered_environments(spec.environments.allowed, http=bool(spec.environments.allowed_hosts))
        ),
        "data_volumes": frozenset(volume.name for volume in spec.data_volumes),
    }
    return {name: asked[name] if value is None else value for name, value in said.items()}


def needs(spec: ExperimentSpec | None, *, over: bool) -> dict[str, Any]:
    """Fields of a Claim. Of a spec that cannot be read nothing is known; one that is over needs room for its adapter
    alone, to be served."""
    if spec is None or over:
        return {"rank": spec.lora.rank if spec else 0}
    files = (spec.data.file, spec.init_from.file if spec.init_from else None)
    return {
        "rank": spec.lora.rank,
        "off_policy_steps": spec.algorithm.max_off_policy_steps,
        "answer_tokens": spec.sampling.max_tokens,
        "environment": spec.environment.name,
        "data_volumes": frozenset(file.volume for file in files if file is not None),
    }


def lacks(room: Room, claim: Claim) -> tuple[str, ...]:
    """What `room` has not and `claim` needs; empty: it can run there."""
    found = []
    if _too_low(room, claim):
        found.append(f"spec.lora.rank {claim.rank} is above its maxRank {room.max_rank}")
    if room.max_off_policy_steps is not None and claim.off_policy_steps > room.max_off_policy_steps:
        found.append(
            f"spec.algorithm.maxOffPolicySteps {claim.off_policy_steps} is above its maxOffPolicySteps"
            f" {room.max_off_policy_steps}"
        )
    if room.max_context is not None and claim.answer_tokens >= room.max_context:
        found.append(
            f"spec.sampling.maxTokens {claim.answer_tokens} leaves no room in its context of {room.max_context} tokens"
        )
    if claim.environment and room.environments is not None and claim.environment not in room.environments:
        found.append(f"it does not offer environment {claim.environment}")
    if room.data_volumes is not None and (missing := sorted(claim.data_volumes - room.data_volumes)):
        found.append(f"it has no dataVolume {', '.join(missing)}")
    return tuple(found)


def unfit(rooms: Sequence[Room], claim: Claim) -> Assignment:
    """What becomes of a claim that can run in none of these, of which there is one at least."""
    ordered = sorted(rooms, key=lambda room: room.name)
    told = [f"LoRAEngine {room.name}: {', '.join(lacks(room, claim))}" for room in ordered[:NAMED]]
    if len(ordered) > NAMED:
        told.append(f"and {len(ordered) - NAMED} more engines")
    message = "; ".join(told)
    if claim.engine is None and claim.pinned is None:
        message = f"no engine that spec.engineSelector selects can run it: {message}"
    too_low = all(_too_low(room, claim) for room in rooms)
    reason = Reason.RANK_TOO_HIGH if too_low else Reason.DOES_NOT_FIT
    return Assignment(None, reason=reason, message=clip(message, MESSAGE_CHARACTERS))


def _too_low(room: Room, claim: Claim) -> bool:
    return room.max_rank is not None and claim.rank > room.max_rank
