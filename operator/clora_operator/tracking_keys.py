"""The keys of an experiment's trackers, from Secrets of its namespace that carry the label which allows it.

The label is what keeps who may name a Secret in a LoRAExperiment from sending any Secret of the namespace to a server:
the engine's token among them. Leaves out what is done with them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any

from clora_api.control import MAX_TRACKING_KEY_LENGTH
from clora_api.v1alpha1.tracking import TRACKING_LABEL, Tracker, TrackerKind, TrackingSecret
from clora_operator.resources import Experiment


@dataclass(frozen=True, slots=True)
class TrackingKeys:
    """trackers: what was read for them. keys: by kind. missing: why some are not there, a sentence for each."""

    trackers: tuple[Tracker, ...]
    keys: Mapping[TrackerKind, str] = field(repr=False)
    missing: str
    at: datetime


def needs_keys(experiment: Experiment) -> tuple[Tracker, ...]:
    """Its trackers that name a Secret, as long as it may run."""
    if experiment.spec is None or experiment.finished or experiment.meta.deleted is not None:
        return ()
    return tuple(tracker for tracker in experiment.spec.tracking or () if tracker.secret_ref is not None)


def read_keys(
    trackers: tuple[Tracker, ...], secret: Callable[[str], Mapping[str, Any] | None], now: datetime
) -> TrackingKeys:
    """Blocking. `secret`: reads one of the experiment's namespace."""
    keys: dict[TrackerKind, str] = {}
    missing = []
    for tracker in trackers:
        reference = tracker.secret_ref
        assert reference is not None
        found, why = _key(secret(reference.name), reference)
        if found is None:
            missing.append(f"spec.tracking, {tracker.kind}: {why}")
        else:
            keys[tracker.kind] = found
    return TrackingKeys(trackers, MappingProxyType(keys), "; ".join(missing), now)


def _key(secret: Mapping[str, Any] | None, reference: TrackingSecret) -> tuple[str | None, str]:
    """The key, or why there is none."""
    name = reference.name
    if secret is None:
        return None, f"there is no Secret {name} in its namespace"
    if ((secret.get("metadata") or {}).get("labels") or {}).get(TRACKING_LABEL) != "true":
        how = f"kubectl label secret {name} {TRACKING_LABEL}=true"
        return None, f"Secret {name} lacks the label by which its owner allows it: {how}"
    encoded = (secret.get("data") or {}).get(reference.key)
    if not encoded:
        return None, f"Secret {name} has no key {reference.key}"
    try:
        text = base64.b64decode(encoded).decode("ascii").strip()
    except (binascii.Error, UnicodeDecodeError):
        text = ""
    if not text or not text.isprintable() or len(text) > MAX_TRACKING_KEY_LENGTH:
        most = f"{MAX_TRACKING_KEY_LENGTH} printable ASCII characters"
        return None, f"key {reference.key} of Secret {name} holds no API key: at most {most} on one line"
    return text, ""
