"""From an experiment's `environment` (name and arguments) to a factory, with errors that name the field.

The table is a plain mapping. `allowed` makes an engine's own: the built-in environments that it allows, and those that
need something of the engine (the allowed hosts); nothing registers itself by being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from clora_api.v1alpha1.engine import offered_environments
from clora_engine.environments import gsm8k, http, word_problems
from clora_engine.environments.http_addresses import HostPolicy
from clora_engine.environments.protocol import EnvironmentFactory
from clora_engine.errors import UserError

Builder = Callable[[Mapping[str, str]], EnvironmentFactory]

BUILTIN: Mapping[str, Builder] = MappingProxyType({"GSM8K": gsm8k.build, "WordProblems": word_problems.build})


def allowed(names: Sequence[str], policy: HostPolicy) -> Mapping[str, Builder]:
    """The environments that an engine with this allow-list offers."""
    everything: dict[str, Builder] = {**BUILTIN, "HTTP": partial(http.build, policy=policy)}
    return {name: everything[name] for name in offered_environments(names, http=bool(policy.hosts))}


def create(name: str, arguments: Mapping[str, str], *, builders: Mapping[str, Builder] = BUILTIN) -> EnvironmentFactory:
    """The factory of environment `name`.

    `builders` holds what this engine allows. A builder raises UserError with field `environment.arguments.<key>`.

    Raises:
        UserError: the name is not among the allowed ones (field `environment.name`), or an argument is unknown or
        wrong.
    """
    if name not in builders:
        offered = ", ".join(sorted(builders)) or "none"
        raise UserError(
            f"environment {name!r} is not one of this engine's environments; allowed: {offered}",
            reason="UnknownEnvironment",
            field="environment.name",
        )
    return builders[name](arguments)
