"""`clora trajectories`: what the model was asked and wrote in a step, to be read by people."""

from __future__ import annotations

import json
from urllib.parse import urlencode

from rich.console import Console
from rich.text import Text

from clora_api.control import ReadableTrajectory, TrajectoryOrder, TrajectoryPage
from clora_operator.cli_engine import EngineAccess, find_experiment
from clora_operator.cli_text import harmless
from clora_operator.kube import Kube

MAX_LIMIT = 50  # trajectories that an engine gives at once
STYLES = {"model": "green", "environment": "yellow"}


def trajectories(
    kube: Kube,
    namespace: str,
    name: str,
    *,
    step: int | None,
    order: TrajectoryOrder,
    limit: int,
    as_json: bool,
    console: Console,
) -> int:
    """Prints up to `limit` trajectories of a step, the latest that the engine keeps if it is None. Raises
    LookupError."""
    experiment = find_experiment(kube, namespace, name)
    query = {"order": order.value, "limit": str(limit)} | ({} if step is None else {"step": str(step)})
    path = f"/v1/experiments/{experiment.meta.uid}/trajectories/text?{urlencode(query)}"
    with EngineAccess(kube, experiment).get(path) as answer:
        page = TrajectoryPage.model_validate_json(answer.read())
    if as_json:
        for item in page.items:
            print(json.dumps({"step": page.step} | item.to_api()))  # ASCII: nothing in it moves a cursor
        return 0
    console.print(_heading(name, page, order), highlight=False, markup=False)
    for item in page.items:
        console.print(readable(item), highlight=False, soft_wrap=True)
    return 0


def readable(item: ReadableTrajectory) -> Text:
    """One trajectory: a line about it, then the prompt and the turns, each under its writer's name."""
    facts = [
        f"reward {item.reward:g}",
        f"group {item.group}, member {item.member}",
        _count(item.turns, "turn"),
        *([_count(item.tool_calls, "tool call")] if item.tool_calls else []),
        *([_count(item.tool_errors, "tool error")] if item.tool_errors else []),
        *(["truncated"] if item.truncated else []),
        f"version {item.version_step}",
    ]
    text = Text()
    text.append(f"\n── {' · '.join(facts)}\n", style="bold")
    if item.error:
        text.append(f"failed: {harmless(item.error)}\n", style="red")
    text.append("prompt\n", style="bold")
    text.append(_indented(item.prompt), style="dim")
    for part in item.parts:
        text.append(f"{part.by}\n", style="bold")
        text.append(_indented(part.text), style=STYLES[part.by])
    return text


def _heading(name: str, page: TrajectoryPage, order: TrajectoryOrder) -> str:
    failed = f", {page.failed} failed" if page.failed else ""
    shown = f"{order.value.lower()} {len(page.items)}"
    return f"{name}, step {page.step}: {_count(page.total, 'trajectory')}{failed}; shown: {shown}"


def _count(number: int, what: str) -> str:
    many = what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{number} {what if number == 1 else many}"


def _indented(text: str) -> str:
    lines = harmless(text.strip("\n")).split("\n")
    return "".join(f"  {line}\n" for line in lines)
