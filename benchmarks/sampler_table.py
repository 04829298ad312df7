"""The table of docs/benchmarks/sampler.md, from sampler.json alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from benchmarks import report
from benchmarks.report import Spread

MEANING = {
    "n1_share_of_base": "one tenant, 4 requests: speed against the same requests without LoRA",
    "n8_share_of_roofline": "eight tenants, 4 requests each: share of the computed bound",
    "speedup_serial_n8_r4": "eight tenants, 4 requests each: against one tenant after the other",
    "share_of_base_n8_r4": "the same against as many requests without LoRA",
    "isolation_mismatches": "answers that differ from what their version alone says",
    "publish_gap_p99_steps": "growth of the others' 99th percentile token gap while versions are published,"
    " in decode steps",
}


def render(document: dict[str, Any]) -> str:
    """Markdown."""
    return "\n".join([*_head(document), *_throughput(document), *_publish(document), *_isolation(document)])


def _head(document: dict[str, Any]) -> Iterator[str]:
    settings = document["settings"]
    yield from report.title("Sampler benchmark", document)
    yield report.origin(document)
    yield (
        f"Adapters of rank {settings['rank']} on all linear layers, {settings['slots']} slots, prompts of"
        f" {settings['prompt_tokens']} tokens (none repeated), {settings['tokens']} tokens sampled for each,"
        f" {settings['threads']} threads. Medians of {settings['rounds']} interleaved rounds (one less for bfloat16 and"
        " sleeping threads, two more for the tiny model, one for stock vLLM), smallest and largest in parentheses."
        " Speeds are compared within a round; bounds are measured once, as the best of several tries."
    )
    yield ""
    yield (
        "*Serial* is the same work, one tenant after the other; for 1 tenant, and for 16 requests each, it is the speed"
        " of a single tenant in the same round. *Stock vLLM* is its own LoRA kernel, *no LoRA* the base model with LoRA"
        " switched off; both run with the settings that clora gives vLLM on a CPU (eager, no chunked prefill, the same"
        " KV cache and threads)."
    )
    yield ""
    yield from report.headline_rows("headline (SmolLM2-135M, float32)", document, MEANING)


def _throughput(document: dict[str, Any]) -> Iterator[str]:
    records = [r for r in document["records"] if r["case"] == "throughput"]
    for model, group in groupby(records, key=lambda r: r["model"]):
        cases = list(group)
        yield ""
        yield f"## {model}"
        yield ""
        yield (
            f"Measured here: {cases[0]['gigabytes_per_second']} GB/s, {cases[0]['gigaflops']} GFLOP/s. Speeds are"
            " sampled tokens per second, prefill included. The bound is the roofline; the last column compares with"
            " what the matrix products alone take at so many rows."
        )
        yield ""
        yield (
            "| tenants × requests | clora | serial | stock vLLM | no LoRA | bound | × serial | × stock | of no LoRA"
            " | of bound | no LoRA of its bound | of products |"
        )
        yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
        for case in sorted(cases, key=lambda c: (c["requests"], c["tenants"])):
            speed = case["tokens_per_second"]
            names = ("clora", "serial", "stock", "base")
            speeds = [f"{speed[name]['median']:.0f}" if name in speed else "" for name in names]
            keys = (
                "speedup_serial",
                "speedup_stock",
                "share_of_base",
                "share_of_roofline",
                "base_share_of_roofline",
                "share_of_products",
            )
            ratios = [str(Spread(**case[key])) if case[key] else "" for key in keys]
            cells = [*speeds, f"{case['roofline_tokens_per_second']:.0f}", *ratios]
            yield f"| {case['tenants']} × {case['requests']} | " + " | ".join(cells) + " |"


def _publish(document: dict[str, Any]) -> Iterator[str]:
    for record in document["records"]:
        if record["case"] != "publish":
            continue
        yield ""
        yield f"## Publishing ({record['model']})"
        yield ""
        yield (
            f"Seven tenants with four requests each decode while an eighth publishes, with a pause of a"
            f" second after each ({record['publishes']} publishes). Milliseconds."
        )
        yield ""
        yield "| | |"
        yield "|---|---|"
        for key, meaning in (
            ("step", "decode step"),
            ("gap_p50", "token gap, median, nobody publishes"),
            ("gap_p50_publishing", "… while versions are published"),
            ("gap_p99", "token gap, 99th percentile, nobody publishes"),
            ("gap_p99_publishing", "… while versions are published"),
            ("gap_growth_p50_steps", "growth of the median, in decode steps"),
            ("gap_growth_p99_steps", "growth of the 99th percentile, in decode steps"),
            ("publish_idle", "a publish, nobody decodes"),
            ("publish_busy", "a publish, the others decode"),
            ("optim_step_to_first_token_idle", "optim_step to the new version's first token, nobody decodes"),
            ("optim_step_to_first_token_busy", "… while the others decode"),
        ):
            yield f"| {meaning} | {Spread(**record[key])} |"


def _isolation(document: dict[str, Any]) -> Iterator[str]:
    for record in document["records"]:
        if record["case"] == "isolation":
            yield ""
            yield "## Isolation (tiny model, float32)"
            yield ""
            yield "| | |"
            yield "|---|---|"
            for key, value in record.items():
                if key != "case" and not isinstance(value, list):
                    yield f"| {key.replace('_', ' ')} | {value:g} |"
