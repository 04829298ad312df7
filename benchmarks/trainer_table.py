"""The tables of docs/benchmarks/trainer.md, from trainer.json alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, product
from typing import Any

from benchmarks import report
from benchmarks.report import Spread

MEANING = {
    "fused_over_swap_best": "one pass for all tenants against one after the other: the best case",
    "over_peft_serial_n8": "eight tenants of 256 tokens each (64 with --quick), as Auto has it: against PEFT in turn",
    "savings_token_ratio": "tokens with a row for every completion over tokens computed, on sampled groups",
}


def render(document: dict[str, Any]) -> str:
    """Markdown."""
    parts = (_head, _throughput, _auto, _swap, _savings)
    return "\n".join(line for part in parts for line in part(document))


def _head(document: dict[str, Any]) -> Iterator[str]:
    settings = document["settings"]
    yield from report.title("Trainer benchmark", document)
    yield report.origin(document)
    yield (
        f"A tenant's step is a batch forward and backward and an AdamW step, on a LoRA of its own on all linear layers."
        f" Batches are rows of {settings['row_tokens']} tokens, {settings['prompt_tokens']} of them prompt, with"
        f" nothing to share. {settings['threads']} threads; medians of {settings['rounds']} interleaved rounds,"
        " smallest and largest in parentheses; ratios within a round."
    )
    yield ""
    yield (
        "*Fused*: all tenants in one pass. *Swap*: one slot, tenants in turn. *PEFT*: transformers, PEFT and"
        " torch.optim.AdamW, one tenant after the other; N tenants take N times the time of one, which is measured."
    )
    yield ""
    yield from _left_out(document)
    yield (
        "Auto's table is measured. That each wrong choice loses is shown by a test"
        " (tests/unit/engine/test_trainer_cost.py) whose passes are real and whose clock is simulated."
    )
    yield ""
    yield from report.headline_rows("headline (SmolLM2-135M, float32)", document, MEANING)


def _left_out(document: dict[str, Any]) -> Iterator[str]:
    """The cells of each model's grid that were not measured."""
    records = [r for r in document["records"] if r["case"] == "throughput"]
    for model, group in groupby(records, key=lambda r: r["model"]):
        measured = {(r["tokens"], r["tenants"]) for r in group}
        sizes, counts = ({place[n] for place in measured} for n in range(2))
        missing = [f"{tenants} × {tokens}" for tokens, tenants in sorted({*product(sizes, counts)} - measured)]
        if missing:
            most = max(tokens * tenants for tokens, tenants in measured)
            yield (
                f"Left out ({model}): {', '.join(missing)} tenants × tokens, for beyond {most} tokens in a case a pass"
                " is long enough for any number of tenants."
            )
            yield ""


def _throughput(document: dict[str, Any]) -> Iterator[str]:
    records = [r for r in document["records"] if r["case"] == "throughput"]
    for model, group in groupby(records, key=lambda r: r["model"]):
        yield ""
        yield f"## {model}"
        yield ""
        yield (
            "Tokens per second, forward and backward. *Of products*: what the frozen layers' matrix products alone take"
            " for as many tokens, as a share of the fused step."
        )
        yield ""
        yield (
            "| tenants × tokens | fused | swap | PEFT | fused over swap | fused over PEFT | swap over PEFT"
            " | of products |"
        )
        yield "|---|---|---|---|---|---|---|---|"
        for case in sorted(group, key=lambda r: (r["tokens"], r["tenants"])):
            speeds = [f"{case['tokens_per_second'][name]['median']:.0f}" for name in ("fused", "swap", "peft")]
            keys = ("fused_over_swap", "fused_over_peft", "swap_over_peft", "fused_share_of_products")
            cells = [*speeds, *(str(Spread(**case[key])) for key in keys)]
            yield f"| {case['tenants']} × {case['tokens']} | " + " | ".join(cells) + " |"


def _auto(document: dict[str, Any]) -> Iterator[str]:
    records = [r for r in document["records"] if r["case"] == "auto"]
    for model, group in groupby(records, key=lambda r: r["model"]):
        cases = list(group)
        yield ""
        yield f"## Auto's choice ({model})"
        yield ""
        slots, below = cases[0]["slots"], cases[0]["join_below"]
        yield f"Measured at its start, Auto takes {slots} slots and joins calls below {below} tokens."
        yield ""
        yield "| tenants × tokens | Auto | over always fused | over always in turn |"
        yield "|---|---|---|---|"
        for case in sorted(cases, key=lambda r: (r["tokens"], r["tenants"])):
            cells = [case["chosen"], str(Spread(**case["over_fused"])), str(Spread(**case["over_swap"]))]
            yield f"| {case['tenants']} × {case['tokens']} | " + " | ".join(cells) + " |"


def _swap(document: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "## Swap"
    for record in document["records"]:
        if record["case"] == "swap":
            on = "a copy within memory, which overlaps nothing" if record["device"] == "cpu" else "over the bus"
            shares = ", ".join(f"{100 * s:.1f} % at {t}" for t, s in record["share_of_step_by_tokens"].items())
            yield ""
            yield (
                f"{record['model']}, one slot: {record['bytes'] / 1e6:.0f} MB out and in take"
                f" {Spread(**record['milliseconds'])} ms ({record['gigabytes_per_second']} GB/s), {on}. Share of a"
                f" tenant's step, by its tokens: {shares}."
            )
        if record["case"] == "modelled swap":
            yield ""
            yield (
                f"Modelled, not measured ({record['model']}): {record['bytes_each_way'] / 1e6:.0f} MB each way take"
                f" {record['swap_milliseconds']} ms, a step of {record['tokens']} tokens"
                f" {record['step_milliseconds']} ms: {100 * record['share_without_overlap']:.1f} % of the time without"
                f" overlap, {100 * record['share_with_overlap']:.1f} % with it."
            )


def _savings(document: dict[str, Any]) -> Iterator[str]:
    for record in document["records"]:
        if record["case"] == "savings":
            yield ""
            yield f"## Shared prompts and merged twins ({record['model']})"
            yield ""
            yield (
                f"{record['prompts']} word problems answered {record['group']} times each by the untrained model:"
                f" {record['plain_tokens']} tokens with a row for every answer, {record['computed_tokens']} computed"
                f" (ratio {record['token_ratio']:g}); {record['plain_seconds']:g} s without the savings,"
                f" {record['seconds']:g} s with them (ratio {record['time_ratio']:g}). The losses differ by"
                f" {record['loss_difference']:.1e}."
            )
