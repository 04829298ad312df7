"""Merge patches, weights of change, conditions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clora_operator.status import clip, merge_patch, weigh

leaves = st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.lists(st.integers(), max_size=2))
trees = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(leaves, lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, max_size=3), max_leaves=8),
    max_size=4,
)


def apply(target: Any, patch: Any) -> Any:
    """RFC 7396, section 2, word for word."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply(result.get(key), value)
    return result


@given(trees, trees)
def test_a_merge_patch_leads_from_old_to_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert apply(old, merge_patch(old, new)) == new


@given(trees)
def test_no_change_is_no_patch(tree: dict[str, Any]) -> None:
    assert merge_patch(tree, tree) == {}


def status(reason: str = "Running", message: str = "", **fields: Any) -> dict[str, Any]:
    said = {"type": "Attached", "status": "True", "reason": reason, "message": message, "observedGeneration": 1}
    return {"conditions": [said], "engine": {"name": "main", "epoch": 1, "adapterVersion": "v1"}, **fields}


@pytest.mark.parametrize(
    ("new", "weight"),
    [
        (status(), "none"),
        (status("Queued"), "transition"),
        (status(message="other words"), "queue"),
        (status(progress={"step": 2}), "progress"),
        (status(checkpoint={"step": 2}), "progress"),
        (status(bestCheckpoint={"step": 2, "metric": "evalAccuracy", "value": "0.5"}), "progress"),
        (status() | {"engine": {"name": "main", "epoch": 1, "adapterVersion": "v2"}}, "progress"),
        (status() | {"engine": {"name": "main", "epoch": 2, "adapterVersion": "v1"}}, "transition"),
        (status(queuePosition=1), "transition"),
        (status(restarts=1), "transition"),
    ],
)
def test_weights(new: dict[str, Any], weight: str) -> None:
    assert weigh(status(), new) == weight


def test_a_moved_queue_position_weighs_least() -> None:
    assert weigh(status(queuePosition=3), status(queuePosition=2, message="place 2")) == "queue"


def test_clip() -> None:
    assert clip("abc", 3) == "abc"
    assert clip("abcd", 3) == "ab…"
