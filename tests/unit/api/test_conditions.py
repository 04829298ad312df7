"""The STATE column is a function of the conditions, and every reason has its place in the one list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from clora_api.v1alpha1.conditions import ExperimentCondition, Reason, State, derive_state


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ({}, State.PENDING),
        ({"Accepted": ("False", "InvalidSpec")}, State.PENDING),
        ({"Attached": ("False", "WaitingForInit")}, State.PENDING),
        ({"Attached": ("False", "Queued")}, State.QUEUED),
        ({"Attached": ("False", "Attaching")}, State.ATTACHING),
        ({"Attached": ("True", "EngineConfirmed")}, State.ATTACHING),
        ({"Attached": ("True", "EngineConfirmed"), "Progressing": ("True", "Running")}, State.RUNNING),
        ({"Attached": ("Unknown", "EngineUnreachable"), "Progressing": ("True", "Running")}, State.UNKNOWN),
        ({"Attached": ("True", "Suspending"), "Progressing": ("True", "Running")}, State.SUSPENDED),
        ({"Attached": ("False", "Suspended")}, State.SUSPENDED),
        ({"Attached": ("False", "Detached"), "Succeeded": ("True", "Completed")}, State.SUCCEEDED),
        ({"Attached": ("Unknown", "EngineUnreachable"), "Failed": ("True", "DeadlineExceeded")}, State.FAILED),
    ],
)
def test_state(conditions: dict[str, tuple[str, str]], state: State) -> None:
    assert derive_state(conditions) is state


def test_reasons_and_types_are_camel_case_and_unique() -> None:
    names = [member.value for kind in (Reason, ExperimentCondition) for member in kind]
    assert all(name.isalnum() and name[0].isupper() for name in names)
    assert len(set(Reason)) == len(list(Reason))


ENGINE = Path(__file__).resolve().parents[3] / "engine" / "clora_engine"


def test_every_reason_with_which_the_engine_ends_an_experiment_is_listed() -> None:
    """Those of its UserErrors, which alone are final; all others are tried again, and end as BackoffLimitExceeded."""
    trees = [ast.parse(path.read_text()) for path in sorted(ENGINE.rglob("*.py"))]
    found = {reason for tree in trees for reason in final_reasons(tree)}
    assert {"InvalidSpec", "InvalidData", "PromptTooLong"} <= found, "they are no longer found where they stand"
    assert found <= set(Reason)


def final_reasons(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            assert "UserError" not in map(ast.unparse, node.bases), f"{node.name}: look for its reasons too"
            if node.name == "UserError":
                yield from (word for one in node.body if isinstance(one, ast.Assign) for word in words(one.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("UserError"):
            for reason in (keyword.value for keyword in node.keywords if keyword.arg == "reason"):
                assert words(reason), f"line {node.lineno}: write the reason out where the error is made"
                yield from words(reason)


def words(node: ast.expr) -> list[str]:
    found = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return [word for word in found if isinstance(word, str)]
