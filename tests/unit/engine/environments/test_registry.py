"""From a name and arguments to a factory."""

from __future__ import annotations

import pytest

from clora_engine.environments import BUILTIN, create
from clora_engine.environments.gsm8k import build as build_gsm8k
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
