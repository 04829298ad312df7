"""From an experiment's `environment` (name and arguments) to a factory, with errors that name the field.

The table is a plain mapping that a caller extends with the environments that need something of the engine (allowed
hosts, a process for foreign code); nothing registers itself by being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from clora_engine.environments import gsm8k, word_problems
from clora_engine.environments.protocol import EnvironmentFactory
from clora_engine.errors import UserError

Builder = Callable[[Mapping[str, str]], EnvironmentFactory]

BUILTIN: Mapping[str, Builder] = MappingProxyType({"GSM8K": gsm8k.build, "WordProblems": word_problems.build})


def create(name: str, arguments: Mapping[str, str], *, builders: Mapping[str, Builder] = BUILTIN) -> EnvironmentFactory:
    """The factory of environment `name`.

    `builders` holds what this engine allows. A builder raises UserError with field `environment.arguments.<key>`.

    Raises:
        UserError: the name is not among the allowed ones (field `environment.name`), or an argument is unknown or
        wrong.
    """
    if name not in builders:
        allowed = ", ".join(sorted(builders)) or "none"
        raise UserError(
            f"environment {name!r} is not one of this engine's environments; allowed: {allowed}",
            reason="UnknownEnvironment",
            field="environment.name",
        )
    return builders[name](arguments)
