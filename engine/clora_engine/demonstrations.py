"""The demonstrations of a supervised step, in the model's own chat template."""

from __future__ import annotations

from functools import partial

from clora_engine import plan as planning
from clora_engine.chat import Demonstration
from clora_engine.data import demonstration
from clora_engine.errors import UserError
from clora_engine.plan import Plan
from clora_engine.rendering import encoded_apart


async def demonstrations(plan: Plan, places: range, uid: str, max_context: int) -> list[Demonstration]:
    """Those at so many places of the data, for experiment `uid`. Raises UserError for an example without one, for one
    of more than `max_context` tokens, and for more than a step can hold."""
    shown: list[Demonstration] = []
    tokens = 0
    for place in places:
        shown.append(await encoded_apart(uid, partial(_demonstration, plan, place)))
        tokens += len(shown[-1].prompt) + len(shown[-1].ids)
        if tokens > planning.MAX_STEP_TOKENS:
            raise UserError(
                f"the step's demonstrations have more than {planning.MAX_STEP_TOKENS} tokens: lower"
                " algorithm.promptsPerStep",
                field="algorithm.promptsPerStep",
            )
    if any(len(d.prompt) + len(d.ids) > max_context for d in shown):
        raise UserError(
            f"a demonstration is longer than {max_context} tokens: shorten it or leave it out", field="data"
        )
    return shown


def _demonstration(plan: Plan, place: int) -> Demonstration:
    try:
        return plan.renderer.demonstration(demonstration(plan.data.train.example(place), plan.factory))
    except ValueError as error:
        raise UserError(f"example {place} has no demonstration: {error}", field="data") from None
