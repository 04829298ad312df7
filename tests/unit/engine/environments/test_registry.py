"""From a name and arguments to a factory."""

from __future__ import annotations

import pytest

from clora_engine.environments import BUILTIN, allowed, create
from clora_engine.environments.gsm8k import build as build_gsm8k
from clora_engine.environments.http_addresses import AllowedHost, HostPolicy
from clora_engine.errors import UserError


def test_builtin_names() -> None:
    assert set(BUILTIN) == {"GSM8K", "WordProblems"}
    for name in BUILTIN:
        assert [tool.name for tool in create(name, {}).tools] == ["calculator", "final_answer"]


@pytest.mark.parametrize("name", ["gsm8k", "", "os.system", "HTTP"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(UserError, match="allowed: GSM8K, WordProblems") as caught:
        create(name, {})
    assert (caught.value.field, caught.value.reason) == ("environment.name", "UnknownEnvironment")


def test_an_engine_may_allow_fewer() -> None:
    with pytest.raises(UserError, match=r"allowed: GSM8K$"):
        create("WordProblems", {}, builders={"GSM8K": build_gsm8k})
    with pytest.raises(UserError, match="allowed: none"):
        create("WordProblems", {}, builders={})


def test_http_is_offered_where_there_are_hosts_to_reach() -> None:
    hosts = HostPolicy((AllowedHost.parse("grader.team.svc"),))
    assert set(allowed((), HostPolicy())) == {"GSM8K", "WordProblems"}
    assert set(allowed((), hosts)) == {"GSM8K", "WordProblems", "HTTP"}
    assert set(allowed(("GSM8K",), hosts)) == {"GSM8K"}
    with pytest.raises(UserError, match="none of this engine's allowed hosts"):
        create("HTTP", {"url": "http://other.svc"}, builders=allowed(("HTTP",), hosts))
