"""`make bench-sampler`: how fast many tenants sample, against one after the other, stock vLLM, and no LoRA at all.

    python -m benchmarks.sampler [--rounds 3] --out docs/benchmarks/sampler.json
    python -m benchmarks.sampler render docs/benchmarks/sampler.json > docs/benchmarks/sampler.md

Every case is run once a round by every contender in turn, so that whatever else the machine does strikes all alike;
speeds are compared within a round. Stock vLLM, several times slower, runs in the first round alone. All speeds are
sampled tokens per second of wall time, prefill included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks import report, roofline
from benchmarks.report import Spread
from benchmarks.sampler_contenders import (
    RANK,
    TENANTS,
    Prompts,
    clora,
    seconds,
    seconds_serial,
    stock,
    without_lora,
)
from benchmarks.sampler_publish import PublishResult
from benchmarks.sampler_publish import measure as measure_publish
from benchmarks.sampler_table import render
from clora_engine.adapter_files import BaseShapes
from clora_engine.sampler_config import SamplerConfig, engine_args
from clora_engine.types import SamplingParams
from local.model import model as small_model
from tests import isolation_run
from tests.sampler_fixtures import make_model

THREADS = 2
PROMPT, TOKENS = 32, 64  # half as many prompt tokens as sampled ones, as in rollouts whose groups share a prompt
MOST_ROWS_OF_STOCK = 32  # beyond, vLLM's stock LoRA takes minutes for a case
MOST_SERIAL = 4  # requests of a tenant; beyond, the serial time is the single tenant's of the same round, times N
MAX_SEQS = 128
MAX_MODEL_LEN = 512
CASES = [(n, r) for n in (1, 2, 4, 8) for r in (2, 4, 16)]
HEADLINE = "SmolLM2-135M float32"


@dataclass(frozen=True, slots=True)
class Model:
    """shares_cores: with threads that sleep while they wait, as in an engine whose trainer has the same cores.
    more_rounds: than the headlines' model; fewer, where they take long."""

    name: str
    path: Path
    dtype: torch.dtype
    shares_cores: bool = False
    more_rounds: int = 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a model's name, or part of it")
    parser.add_argument("--cases", default="", help="such as 1x4,8x4: tenants x requests; one tenant first")
    parser.add_argument("--isolation-requests", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    scratch = Path(mkdtemp(prefix="clora-bench-"))
    try:
        _run(args, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(args: argparse.Namespace, scratch: Path) -> None:
    small, tiny = small_model(), make_model(scratch / "tiny")
    # without instructions for it, vLLM's products of bfloat16 take ten times as long as float32's
    with_bfloat16 = torch.cpu._is_avx512_bf16_supported()
    models = [
        Model(HEADLINE, small, torch.float32),
        Model("SmolLM2-135M bfloat16", small, torch.bfloat16, more_rounds=-1),
        Model("tiny float32", tiny, torch.float32, more_rounds=2),
        Model("SmolLM2-135M float32, sleeping threads", small, torch.float32, shares_cores=True, more_rounds=-1),
    ]
    cases = [_case(text) for text in args.cases.split(",") if text] or CASES
    records: list[dict[str, Any]] = []
    publishing: PublishResult | None = None
    for model in models:
        if args.only in model.name and (model.dtype is not torch.bfloat16 or with_bfloat16):
            model_cases = [case for case in cases if case[1] == 4] if model.shares_cores else cases
            found, published = asyncio.run(_model(model, model_cases, max(1, args.rounds + model.more_rounds), scratch))
            records += found
            publishing = publishing or published
    if args.isolation_requests:
        isolation = isolation_run.run(tiny, scratch / "isolation", requests=args.isolation_requests)
        records.append({"case": "isolation"} | asdict(isolation))
    if publishing is not None:
        records.append({"case": "publish", "model": HEADLINE} | asdict(publishing))
    settings = {
        "threads": THREADS, "rank": RANK, "slots": TENANTS + 2, "prompt_tokens": PROMPT, "tokens": TOKENS,
        "rounds": args.rounds,
    }  # fmt: skip
    report.write(args.out, "benchmarks.sampler", settings, _headlines(records), records)


async def _model(
    model: Model, cases: Sequence[tuple[int, int]], rounds: int, scratch: Path
) -> tuple[list[dict[str, Any]], PublishResult | None]:
    rates = roofline.measure(model.dtype, THREADS)
    base, sizes, products = _sizes(model)
    config = _config(model, scratch)
    prompts = Prompts(base.vocabulary, PROMPT)
    params = SamplingParams(temperature=1.0, max_tokens=TOKENS, stop_token_ids=())
    taken: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(clora(config))
        bare = await stack.enter_async_context(without_lora(config))
        plain = await stack.enter_async_context(stock(config, scratch / model.name.replace(" ", "-")))
        for contender in (ours, bare, plain):
            await seconds(contender, [0], 2, prompts, params)
        for round_ in range(rounds):
            for n, r in cases:
                tenants = list(range(n))
                case = taken[n, r]
                case["clora"].append(await seconds(ours, tenants, r, prompts, params))
                case["base"].append(await seconds(bare, tenants, r, prompts, params))
                if n == 1 or r > MOST_SERIAL:
                    case["serial"].append(n * taken[1, r]["clora"][-1])
                else:
                    case["serial"].append(await seconds_serial(ours, tenants, r, prompts, params))
                if n * r <= MOST_ROWS_OF_STOCK and round_ == 0:
                    case["stock"].append(await seconds(plain, tenants, r, prompts, params))
                _say(model, round_, n, r, case)
        published = await measure_publish(ours, model.path, prompts, rounds) if model.name == HEADLINE else None
    records = []
    prefill_budget = engine_args(config, base.suffixes).max_num_batched_tokens
    assert prefill_budget is not None
    for (n, r), case in taken.items():
        run = {"rows": n * r, "prompt": PROMPT, "tokens": TOKENS, "prefill_budget": prefill_budget}
        bounds = Bounds(
            roofline.run_seconds(sizes, rates, adapters=n, **run),
            roofline.run_seconds(sizes, rates, adapters=0, **run),
            roofline.products_seconds(sizes, rates, products, adapters=n, **run),
        )
        records.append(_record(model, rates, n, r, case, bounds))
    return records, published


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least seconds of a case: by the roofline, with and without adapters; with the library's products for so many
    rows."""

    roofline: float
    roofline_of_base: float
    products: float


def _record(
    model: Model, rates: roofline.Rates, n: int, r: int, case: dict[str, list[float]], bounds: Bounds
) -> dict[str, Any]:
    tokens = n * r * TOKENS

    def ratio(numerator: str) -> dict[str, float] | None:
        pairs = zip(case[numerator], case["clora"], strict=False)  # stock vLLM runs in the first round alone
        ratios = [a / b for a, b in pairs]
        return asdict(Spread.of(ratios)) if ratios else None

    return {
        "case": "throughput",
        "model": model.name,
        "tenants": n,
        "requests": r,
        "tokens_per_second": {
            name: asdict(Spread.of([tokens / s for s in times])) for name, times in case.items() if times
        },
        "roofline_tokens_per_second": round(tokens / bounds.roofline, 1),
        "speedup_serial": ratio("serial"),
        "speedup_stock": ratio("stock"),
        "share_of_base": ratio("base"),
        "share_of_roofline": asdict(Spread.of([bounds.roofline / s for s in case["clora"]])),
        "base_share_of_roofline": asdict(Spread.of([bounds.roofline_of_base / s for s in case["base"]])),
        "share_of_products": asdict(Spread.of([bounds.products / s for s in case["clora"]])),
        "gigabytes_per_second": round(rates.bytes_per_second / 1e9, 1),
        "gigaflops": round(rates.flops_per_second / 1e9, 1),
    }


def _headlines(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians, of the model HEADLINE."""
    at = {(r["tenants"], r["requests"]): r for r in records if r.get("model") == HEADLINE and r["case"] == "throughput"}
    found: dict[str, float] = {}
    if (1, 4) in at:
        found["n1_share_of_base"] = at[1, 4]["share_of_base"]["median"]
    if (8, 4) in at:
        found["n8_share_of_roofline"] = at[8, 4]["share_of_roofline"]["median"]
        found["speedup_serial_n8_r4"] = at[8, 4]["speedup_serial"]["median"]
        found["share_of_base_n8_r4"] = at[8, 4]["share_of_base"]["median"]
    for record in records:
        if record["case"] == "isolation":
            found["isolation_mismatches"] = record["mismatches"]
        if record["case"] == "publish":
            found["publish_gap_p99_steps"] = record["gap_growth_p99_steps"]["median"]
    return found


def _config(model: Model, scratch: Path) -> SamplerConfig:
    return SamplerConfig(
        model=model.path,
        versions_root=Path("/dev/shm") / scratch.name,  # noqa: S108  a tmpfs, as in an engine
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_SEQS,
        max_lora_rank=RANK,
        slots=TENANTS + 2,
        kv_cache_bytes=1 << 30,
        threads=THREADS,
        shares_cores=model.shares_cores,
    )


def _case(text: str) -> tuple[int, int]:
    tenants, requests = text.split("x")
    return int(tenants), int(requests)


def _sizes(model: Model) -> tuple[BaseShapes, roofline.Sizes, roofline.Products]:
    base = BaseShapes.of_model(model.path)
    config = AutoConfig.from_pretrained(model.path)
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    sizes = roofline.Sizes.of(base, RANK, config.hidden_size, kv, model.dtype)
    return base, sizes, roofline.Products(base, config.hidden_size, model.dtype)


def _say(model: Model, round_: int, n: int, r: int, case: dict[str, list[float]]) -> None:
    speeds = " ".join(f"{name} {n * r * TOKENS / taken[-1]:.0f}" for name, taken in case.items() if taken)
    print(f"{model.name} round {round_ + 1} N={n} r={r}: {speeds} tok/s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["render"]:
        print(render(json.loads(Path(sys.argv[2]).read_text())))
    else:
        main()
