"""`make bench-trainer`: how fast many tenants train, in one pass, in turn, and one at a time with PEFT.

    python -m benchmarks.trainer [--rounds 3] [--quick] --out docs/benchmarks/trainer.json
    python -m benchmarks.trainer render docs/benchmarks/trainer.json > docs/benchmarks/trainer.md

Every case is run once a round by every contender in turn, so that whatever else the machine does strikes all alike;
ratios are taken within a round. PEFT trains one tenant after another, with nothing in common: N tenants take N times
what one takes, which is measured. Speeds are tokens forward and backward, prompts included, per second of wall time.
With a GPU, the shapes of Qwen3-4B follow in bfloat16 with random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks import report, trainer_savings
from benchmarks.report import Spread
from benchmarks.trainer_contenders import (
    PROMPT,
    ROW,
    TENANTS,
    TOKENS_PER_MICROBATCH,
    Clora,
    Peft,
    products_seconds,
    seconds,
    swap_seconds,
)
from benchmarks.trainer_table import render
from clora_engine.lora import Layout, ModuleShape, rank_bucket
from clora_engine.trainer_cost import Choice, choose
from local.model import model as small_model

PACKAGES = ("clora", "torch", "transformers", "peft")
HEADLINE = "SmolLM2-135M float32"
HEADLINE_TOKENS = 256  # per tenant, of over_peft_serial_n8
SIZES = (64, 128, 256, 512, 1024, 2048)
MOST_TOKENS = 4096  # in one case: beyond, a pass is long enough for any number of tenants
QWEN3_4B = Qwen3Config(
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    attn_implementation="sdpa",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A base model and where it runs. `cases`: tenants and tokens of each."""

    name: str
    path: Path | None  # None: Qwen3-4B's shapes, random weights
    dtype: torch.dtype
    device: torch.device
    rank: int
    cases: tuple[tuple[int, int], ...]
    tokens_per_microbatch: int = TOKENS_PER_MICROBATCH
    most_products: int = 512  # tokens for which plain products are measured: beyond, they take as long for each

    def load(self) -> Any:
        if self.path is not None:
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype, local_files_only=True)
            return model.to(self.device)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                return Qwen3ForCausalLM(QWEN3_4B)
        finally:
            torch.set_default_dtype(before)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few and small cases, one round: does it run?")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    rounds = 1 if args.quick else args.rounds
    records: list[dict[str, Any]] = []
    for subject in _subjects(quick=args.quick):
        records += _subject(subject, rounds, quick=args.quick)
    records += [_savings(quick=args.quick), _modelled_swap()]
    settings = {
        "threads": args.threads, "rounds": rounds, "row_tokens": ROW, "prompt_tokens": PROMPT,
        "tokens_per_microbatch": TOKENS_PER_MICROBATCH,
    }  # fmt: skip
    report.write(args.out, "benchmarks.trainer", settings, _headlines(records), records, PACKAGES)


def _subjects(*, quick: bool) -> list[Subject]:
    sizes, counts = ((64,), (1, 2, 8)) if quick else (SIZES, (1, 2, 4, 8))
    cases = tuple((n, t) for t in sizes for n in counts if n * t <= MOST_TOKENS)
    cpu = torch.device("cpu")
    subjects = [Subject(HEADLINE, small_model(), torch.float32, cpu, 16, cases)]
    if torch.cuda.is_available():
        large = tuple((n, t) for t in (256, 1024, 4096) for n in (1, 2, 4, 8))
        name = "Qwen3-4B shapes bfloat16"
        subjects.append(Subject(name, None, torch.bfloat16, torch.device("cuda"), 32, large, 32768, 16384))
    return subjects


def _subject(subject: Subject, rounds: int, *, quick: bool) -> list[dict[str, Any]]:
    of = partial(Clora.of, rank=subject.rank, tokens_per_microbatch=subject.tokens_per_microbatch)
    fused, swap = of(subject.load(), slots=TENANTS), of(subject.load(), slots=1)
    peft = Peft.of(subject.load(), rank=subject.rank)
    on = partial(seconds, device=subject.device)
    smallest = min(t for _, t in subject.cases)
    on(fused.together, TENANTS, smallest)
    on(swap.in_turn, 2, smallest)
    on(peft.step, smallest)
    taken: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for round_ in range(rounds):
        for n, t in subject.cases:
            case = taken[n, t]
            case["fused"].append(on(fused.together, n, t))
            case["swap"].append(on(swap.in_turn, n, t))
            case["peft"].append(on(peft.step, t) if n == 1 else n * taken[1, t]["peft"][-1])
            speeds = " ".join(f"{name} {n * t / times[-1]:.0f}" for name, times in case.items())
            print(f"{subject.name} round {round_ + 1} N={n} t={t}: {speeds} tok/s", file=sys.stderr, flush=True)
    shapes = [(m.in_features, m.out_features) for m in fused.trainer.store.state("tenant-0").layout.modules]
    products = {
        tokens: products_seconds(shapes, tokens, subject.dtype, subject.device)
        for tokens in {min(n * t, subject.most_products) for n, t in subject.cases}
    }
    records = []
    for (n, t), case in taken.items():
        tokens = min(n * t, subject.most_products)
        records.append(_record(subject, n, t, case, products[tokens] * n * t / tokens))
    records.append(_swap(subject, swap, taken, repeats=4 if quick else 20))
    choice = choose(swap.trainer, TENANTS)
    return [*records, *_auto(subject, choice, taken)]


def _record(subject: Subject, n: int, t: int, case: dict[str, list[float]], products: float) -> dict[str, Any]:
    def ratio(numerator: str, denominator: str) -> dict[str, float]:
        return asdict(Spread.of([a / b for a, b in zip(case[numerator], case[denominator], strict=True)]))

    return {
        "case": "throughput",
        "model": subject.name,
        "tenants": n,
        "tokens": t,
        "tokens_per_second": {name: asdict(Spread.of([n * t / s for s in times])) for name, times in case.items()},
        "fused_over_swap": ratio("swap", "fused"),
        "fused_over_peft": ratio("peft", "fused"),
        "swap_over_peft": ratio("peft", "swap"),
        "fused_share_of_products": asdict(Spread.of([products / s for s in case["fused"]])),
    }


def _swap(
    subject: Subject, swap: Clora, taken: dict[tuple[int, int], dict[str, list[float]]], repeats: int
) -> dict[str, Any]:
    """A swap with nothing beside it: on a CPU it is a copy within memory and overlaps nothing."""
    times, moved = swap_seconds(swap.trainer, repeats)
    spread = Spread.of([1000 * s for s in times])
    shares = {
        str(t): round(spread.median / 1000 / (Spread.of(case["swap"]).median / n), 4)
        for (n, t), case in taken.items()
        if n == 2
    }
    return {
        "case": "swap",
        "model": subject.name,
        "device": subject.device.type,
        "milliseconds": asdict(spread),
        "bytes": moved,
        "gigabytes_per_second": round(moved / spread.median / 1e6, 1),
        "share_of_step_by_tokens": shares,
    }


def _auto(
    subject: Subject, choice: Choice, taken: dict[tuple[int, int], dict[str, list[float]]]
) -> list[dict[str, Any]]:
    """Auto's choice for calls that wait at the same time, against always joining and never joining them."""
    records = []
    for (n, t), case in taken.items():
        if n > 1:
            joined = n <= choice.slots and t < choice.join_below and n * t <= subject.tokens_per_microbatch
            auto = case["fused" if joined else "swap"]
            records.append(
                {
                    "case": "auto",
                    "model": subject.name,
                    "tenants": n,
                    "tokens": t,
                    "slots": choice.slots,
                    "join_below": choice.join_below,
                    "chosen": "fused" if joined else "swap",
                    "over_fused": asdict(Spread.of([b / a for a, b in zip(auto, case["fused"], strict=True)])),
                    "over_swap": asdict(Spread.of([b / a for a, b in zip(auto, case["swap"], strict=True)])),
                    "over_peft": asdict(Spread.of([b / a for a, b in zip(auto, case["peft"], strict=True)])),
                }
            )
    return records


def _savings(*, quick: bool) -> dict[str, Any]:
    prompts, group = (2, 4) if quick else (8, 8)
    batch = trainer_savings.sampled_groups(small_model(), prompts=prompts, group=group)
    subject = Subject(HEADLINE, small_model(), torch.float32, torch.device("cpu"), 16, ())
    saved, plain = (trainer_savings.measure(subject.load(), batch, share=share) for share in (True, False))
    return {
        "case": "savings",
        "model": HEADLINE,
        "prompts": prompts,
        "group": group,
        "plain_tokens": saved.plain_tokens,
        "computed_tokens": saved.tokens,
        "token_ratio": round(saved.plain_tokens / saved.tokens, 3),
        "seconds": round(saved.seconds, 3),
        "plain_seconds": round(plain.seconds, 3),
        "time_ratio": round(plain.seconds / saved.seconds, 3),
        "loss_difference": abs(saved.loss - plain.loss),
    }


def _modelled_swap(tokens: int = 8192) -> dict[str, Any]:
    """Arithmetic, not a measurement: Qwen3-4B, rank 32, over PCIe 5."""
    c = QWEN3_4B
    width, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    linear = [
        *((c.hidden_size, width), (c.hidden_size, kv), (c.hidden_size, kv), (width, c.hidden_size)),
        *((c.hidden_size, c.intermediate_size), (c.hidden_size, c.intermediate_size)),
        (c.intermediate_size, c.hidden_size),
    ]
    modules = tuple(
        ModuleShape(f"{layer}.{n}", *pair) for layer in range(c.num_hidden_layers) for n, pair in enumerate(linear)
    )
    one_way = 3 * Layout(modules, rank_bucket(32)).numel * 4  # weights and both moments
    bytes_per_second, flops_per_second = 55e9, 0.4 * 989e12  # PCIe 5 x16 in one direction; H100/H200 bf16 at 40 %
    parameters = sum(m.in_features * m.out_features for m in modules)
    step = tokens * 4 * parameters / flops_per_second  # forward, and the gradient of the inputs; the base is frozen
    swap = one_way / bytes_per_second  # in and out at the same time: PCIe is full duplex
    return {
        "case": "modelled swap",
        "model": "Qwen3-4B rank 32, PCIe 5 x16",
        "tokens": tokens,
        "bytes_each_way": one_way,
        "swap_milliseconds": round(1000 * swap, 1),
        "step_milliseconds": round(1000 * step, 1),
        "share_without_overlap": round(swap / (swap + step), 4),
        "share_with_overlap": round(max(0.0, swap - step) / max(swap, step), 4),
    }


def _headlines(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians, of the model HEADLINE."""
    mine = [r for r in records if r["model"] == HEADLINE]
    many = [r for r in mine if r["case"] == "throughput" and r["tenants"] > 1]
    eight = [r for r in mine if r["case"] == "auto" and r["tenants"] == TENANTS and r["tokens"] <= HEADLINE_TOKENS]
    (savings,) = (r for r in mine if r["case"] == "savings")
    return {
        "fused_over_swap_best": max(r["fused_over_swap"]["median"] for r in many),
        "over_peft_serial_n8": max(eight, key=lambda r: r["tokens"])["over_peft"]["median"],
        "savings_token_ratio": savings["token_ratio"],
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["render"]:
        print(render(json.loads(Path(sys.argv[2]).read_text())))
    else:
        main()
