"""`make bench-operator`: what hundreds of experiments cost the operator and the API server.

    python -m benchmarks.operator_scale --out docs/benchmarks/operator.json
    python -m benchmarks.operator_scale render docs/benchmarks/operator.json > docs/benchmarks/operator.md

The operator, the API server and the engines' HTTP servers are real; training is simulated (tests/e2e/scale.py).
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report
from local.control_plane import ControlPlane
from local.crds import install_crds
from tests.e2e.scale import STEP_SECONDS, measure

PACKAGES = ("clora", "kopf", "kubernetes", "pydantic", "httpx")
CASES = ((20, 1), (200, 5), (400, 10))
WINDOW_SECONDS = 60.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    records = []
    for experiments, engines in CASES:
        with (
            redirect_stdout(io.StringIO()),  # the operator's log
            TemporaryDirectory(prefix="clora-bench-") as folder,
            ControlPlane(Path(folder) / "control-plane", audit=True) as control_plane,
        ):
            install_crds(control_plane.kubeconfig)
            figures = measure(
                control_plane,
                Path(folder),
                experiments=experiments,
                engines=engines,
                window_seconds=WINDOW_SECONDS,
            )
        records.append(figures.to_dict())
        print(json.dumps(records[-1]), file=sys.stderr, flush=True)
    headline = next(record for record in records if record["experiments"] == 200)
    headlines = {
        "attach_seconds_200": headline["attach_seconds"],
        "delete_seconds_200": headline["delete_seconds"],
        "memory_mib_200": headline["memory_mib"],
        "cpu_percent_running_200": headline["running"]["cpu_percent"],
        "calls_per_minute_running_200": headline["running"]["calls_per_minute"],
        "calls_per_minute_idle_200": headline["idle"]["calls_per_minute"],
    }
    settings = {"window_seconds": WINDOW_SECONDS, "step_seconds": STEP_SECONDS, "progress_write_seconds": 5}
    report.write(args.out, "benchmarks.operator_scale", settings, headlines, records, PACKAGES)


def render(document: Mapping[str, Any]) -> str:
    """The document as Markdown."""
    machine, settings = document["machine"], document["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    lines = [
        "# Operator at scale",
        "",
        f"    {document['command']}",
        "",
        f"{machine['cores']} cores of {machine['cpu']}, shared by operator, control plane and engines;"
        f" commit {document['commit']}; {versions}.",
        f"Every experiment makes a step in {settings['step_seconds']:g} s; the operator has its defaults (progress"
        f" is written at most every {settings['progress_write_seconds']} s). *Running* and *idle* were watched for"
        f" {settings['window_seconds']:g} s each; idle: all have succeeded. Calls are requests of the API server,"
        " CPU is of one core.",
        "",
        "| experiments × engines | all attached | all finished | all deleted | memory | CPU running"
        " | calls a minute running | CPU idle | calls a minute idle | status writes a minute idle |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in document["records"]:
        running, idle = record["running"], record["idle"]
        lines.append(
            f"| {record['experiments']} × {record['engines']} | {record['attach_seconds']} s"
            f" | {record['finish_seconds']} s | {record['delete_seconds']} s | {record['memory_mib']:.0f} MiB"
            f" | {running['cpu_percent']:.0f} % | {running['calls_per_minute']:.0f} | {idle['cpu_percent']:.1f} %"
            f" | {idle['calls_per_minute']:.0f} | {idle['status_writes_per_minute']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["render"]:
        print(render(json.loads(Path(sys.argv[2]).read_text())))
    else:
        main()
