"""Checks of an environment's arguments, which arrive as a flat mapping of strings."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from clora_engine.errors import UserError


def argument_error(key: str, message: str) -> UserError:
    """A UserError that names `environment.arguments.<key>`."""
    return UserError(message, reason="InvalidEnvironmentArgument", field=f"environment.arguments.{key}")


def refuse_unknown(environment: str, arguments: Mapping[str, str], known: Collection[str]) -> None:
    """Raises UserError for the first key that `environment` does not know."""
    for key in sorted(arguments):
        if key not in known:
            takes = f"takes {', '.join(sorted(known))}" if known else "takes no arguments"
            raise argument_error(key, f"unknown argument {key!r}: {environment} {takes}")
