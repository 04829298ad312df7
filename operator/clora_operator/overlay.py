"""A user's overlay on a manifest. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MERGE_KEYS = ("name", "mountPath")


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
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
