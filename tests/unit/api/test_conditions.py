"""The STATE column is a function of the conditions, and every reason has its place in the one list."""

from __future__ import annotations

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
