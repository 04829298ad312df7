"""What an experiment needs of an engine, and what is said where no engine has it."""

from __future__ import annotations

from typing import Any

import pytest

from clora_api.control import EngineInfo
from clora_api.v1alpha1.conditions import Reason
from clora_engine.environments.http_addresses import AllowedHost, HostPolicy
from clora_engine.environments.registry import allowed as by_the_engine
from clora_operator.fit import NAMED, lacks, limits, needs
from clora_operator.placement import place
from tests.unit.operator.factories import engine, experiment, view
from tests.unit.operator.test_placement import admitted, by_labels, claim, room

ALL: dict[str, Any] = {
    "max_off_policy_steps": 2,
    "max_context": 4096,
    "environments": frozenset({"WordProblems"}),
    "data_volumes": frozenset({"shared"}),
}
GREEDY: list[tuple[dict[str, Any], str]] = [
    ({"rank": 64}, "spec.lora.rank 64 is above its maxRank 32"),
    ({"off_policy_steps": 3}, "spec.algorithm.maxOffPolicySteps 3 is above its maxOffPolicySteps 2"),
    ({"answer_tokens": 4096}, "spec.sampling.maxTokens 4096 leaves no room in its context of 4096 tokens"),
    ({"environment": "HTTP"}, "it does not offer environment HTTP"),
    ({"data_volumes": frozenset({"shared", "b", "a"})}, "it has no dataVolume a, b"),
]
MODEST: dict[str, Any] = {
    "environment": "WordProblems",
    "rank": 32,
    "off_policy_steps": 2,
    "answer_tokens": 4095,
    "data_volumes": frozenset({"shared"}),
}


@pytest.mark.parametrize(("asked", "message"), GREEDY)
def test_the_engine_that_is_named_and_those_that_labels_select_are_asked_the_same(
    asked: dict[str, Any], message: str
) -> None:
    small, other = room("small", **ALL), room("other", labels={"pool": "b"})
    named = place([small], [claim("a", engine="small", **asked)])["a"]
    assert named.message == f"LoRAEngine small: {message}"
    selected = place([small, other], [by_labels("a", **asked)])["a"]
    assert selected.message == f"no engine that spec.engineSelector selects can run it: LoRAEngine small: {message}"
    expected = Reason.RANK_TOO_HIGH if "rank" in asked else Reason.DOES_NOT_FIT
    assert (named.reason, selected.reason) == (expected, expected)
    assert (named.engine, selected.engine) == (None, None)
    roomy = room("roomy", capacity=1, max_rank=64, max_off_policy_steps=16, data_volumes=frozenset("ab") | {"shared"})
    assert admitted(place([room("small", capacity=9, **ALL), roomy], [by_labels("a", **asked)])) == {"a": "roomy"}
    assert lacks(small, claim("a", **MODEST)) == ()
    assert lacks(room(max_rank=None), claim("a", **asked)) == ()  # nothing is known of it


def test_one_that_holds_a_slot_keeps_it_whatever_its_spec_asks_for_now() -> None:
    held = claim("a", pinned="main", holds=True, off_policy_steps=9)
    assert admitted(place([room(**ALL)], [held])) == {"a": "main"}
    unheard = claim("a", pinned="main", attached=True, off_policy_steps=9)  # by an operator that has just started
    assert place([room(ready=False, **ALL)], [unheard])["a"].reason is Reason.WAITING_FOR_ENGINE


def test_what_each_engine_lacks_is_said_of_so_many() -> None:
    of = by_labels("a", rank=64, off_policy_steps=3)
    rooms = [room("b", max_rank=64, max_off_policy_steps=2), room("a", max_rank=32, max_off_policy_steps=2)]
    found = place(rooms, [of])["a"]
    assert found.reason is Reason.DOES_NOT_FIT
    assert found.message.index("LoRAEngine a: spec.lora.rank 64") < found.message.index("LoRAEngine b: spec.algorithm")
    many = place([room(f"e{i:02}", **ALL) for i in range(40)], [by_labels("a", answer_tokens=10**6)])["a"]
    assert f"LoRAEngine e{NAMED - 1:02}: " in many.message
    assert f"LoRAEngine e{NAMED:02}" not in many.message
    assert many.message.endswith(f"and {40 - NAMED} more engines")
    assert len(place([room("x" * 60 + str(i)) for i in range(9)], [by_labels("a", rank=64)])["a"].message) <= 1024


def test_what_an_engine_says_outranks_its_spec_and_nothing_is_made_up() -> None:
    spec: dict[str, Any] = {
        "capacity": {"maxRank": 64, "maxOffPolicySteps": 4},
        "sampler": {"maxModelLen": 8192},
        "trainer": {"tokensPerMicrobatch": 2048},
        "dataVolumes": [{"name": "shared", "claimName": "c"}],
    }
    ours = engine(image="i", **spec)
    asked = {
        "max_rank": 64,
        "max_off_policy_steps": 4,
        "max_context": 2048,
        "environments": frozenset({"WordProblems", "GSM8K"}),
        "data_volumes": frozenset({"shared"}),
    }
    assert limits(ours, None) == asked
    info = view().info
    assert info is not None
    runs = info.model_copy(update={"max_off_policy_steps": 2, "max_context": 512, "data_volumes": ["old"]})
    said = {"max_rank": 32, "max_off_policy_steps": 2, "max_context": 512, "data_volumes": frozenset({"old"})}
    assert limits(ours, runs) == asked | said
    runs = runs.model_copy(update={"environments": ["HTTP"]})
    assert limits(ours, runs)["environments"] == {"HTTP"}
    theirs = engine(endpoint="http://engine", tokenSecretRef={"name": "t"})
    assert set(limits(theirs, None).values()) == {None}
    earlier = EngineInfo.model_validate({k: v for k, v in info.to_api().items() if k != "maxContext"})
    assert limits(theirs, earlier)["max_context"] is None


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        ({}, {"WordProblems", "GSM8K"}),
        ({"allowedHosts": ["grader"]}, {"WordProblems", "GSM8K", "HTTP"}),
        ({"allowed": ["GSM8K"], "allowedHosts": ["grader"]}, {"GSM8K"}),
        ({"allowed": ["HTTP"]}, {"HTTP"}),
    ],
)
def test_an_allow_list_of_environments_means_what_it_means_to_the_engine(
    asked: dict[str, Any], offered: set[str]
) -> None:
    assert limits(engine(image="i", environments=asked), None)["environments"] == offered
    policy = HostPolicy(tuple(map(AllowedHost.parse, asked.get("allowedHosts", ()))))
    assert set(by_the_engine(asked.get("allowed", ()), policy)) == offered


def test_what_a_spec_needs() -> None:
    of = experiment(
        lora={"rank": 8, "alpha": 8},
        algorithm={"maxOffPolicySteps": 3},
        sampling={"maxTokens": 77},
        data={"file": {"volume": "rows", "path": "a.jsonl"}},
        initFrom={"file": {"volume": "adapters", "path": "a"}},
    )
    assert needs(of.spec, over=False) == {
        "rank": 8,
        "off_policy_steps": 3,
        "answer_tokens": 77,
        "environment": "WordProblems",
        "data_volumes": frozenset({"rows", "adapters"}),
    }
    assert needs(of.spec, over=True) == {"rank": 8}  # to be served
    assert needs(None, over=False) == {"rank": 0}
