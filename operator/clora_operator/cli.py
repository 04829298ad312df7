"""`clora`, also `kubectl clora`: what kubectl cannot show well. Watching, logs, metrics, trajectories, comparing, and
pulling an adapter or the files of trackers.

Leaves out everything that kubectl does (apply, describe, delete).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from kubernetes.config.config_exception import ConfigException
from rich.console import Console
from rich.table import Table

from clora_api.control import TrajectoryOrder
from clora_operator.cli_compare import compare
from clora_operator.cli_engine import EngineAccess, find_experiment
from clora_operator.cli_logs import logs
from clora_operator.cli_text import harmless
from clora_operator.cli_trajectories import MAX_LIMIT, trajectories
from clora_operator.cli_watch import watch
from clora_operator.kube import Kube, KubeError, configuration, default_namespace

METRIC_COLUMNS = ("step", "reward_mean", "loss", "entropy", "kl", "grad_norm", "tokens_per_second", "step_seconds")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][-A-Za-z0-9._]*")
_PART = r"(?!\.\.?(?:/|$))[^/\\]+"
PLAIN_PATH = re.compile(rf"{_PART}(?:/{_PART})*")  # below where it is


class CliError(Exception):
    """Told to the user as it is; exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all well, 1 an experiment that was watched has failed, 2 the command could not be done."""
    arguments = _parser().parse_args(argv)
    try:
        kube = Kube(configuration(arguments.kubeconfig))
        namespace = arguments.namespace or default_namespace(arguments.kubeconfig)
        return int(arguments.run(kube, namespace, arguments))
    except LookupError as error:
        print(f"clora: {error.args[0] if error.args else error}", file=sys.stderr)  # a KeyError's text is quoted
        return 2
    except (CliError, KubeError, ConfigException, OSError) as error:
        print(f"clora: {error}", file=sys.stderr)
        return 2
    except (HTTPException, ValueError) as error:  # an answer that breaks off, or is none of an engine's
        print(f"clora: the engine's answer cannot be read: {harmless(str(error))[:300]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--kubeconfig", default="", help="kubeconfig to use instead of the default one")
    common.add_argument("-n", "--namespace", default="", help="namespace (default: that of the kubeconfig's context)")
    parser = argparse.ArgumentParser(prog="clora", description="Watch clora's experiments and fetch what they made.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    watching = commands.add_parser("watch", parents=[common], help="show experiments and how they get on")
    watching.add_argument("names", nargs="*", metavar="NAME", help="experiments (default: all of the namespace)")
    watching.add_argument("--until-done", action="store_true", help="end when all have succeeded or failed")
    watching.set_defaults(run=_watch)

    metrics = commands.add_parser("metrics", parents=[common], help="show an experiment's metrics, a line a step")
    metrics.add_argument("name", metavar="NAME")
    metrics.add_argument("--json", action="store_true", help="JSON Lines, as they are when stdout is no terminal")
    metrics.set_defaults(run=_metrics)

    logging = commands.add_parser("logs", parents=[common], help="show an experiment's steps, a line each")
    logging.add_argument("name", metavar="NAME")
    logging.add_argument("-f", "--follow", action="store_true", help="go on until it has succeeded or failed")
    logging.set_defaults(run=_logs)

    reading = commands.add_parser("trajectories", parents=[common], help="show what was asked and written in a step")
    reading.add_argument("name", metavar="NAME")
    reading.add_argument("--step", type=_positive, default=None, help="step (default: the latest that is kept)")
    which = reading.add_mutually_exclusive_group()
    for order in (TrajectoryOrder.BEST, TrajectoryOrder.WORST, TrajectoryOrder.FAILED):
        which.add_argument(
            f"--{order.value.lower()}",
            action="store_const",
            const=order,
            dest="order",
            help="those that failed"
            if order is TrajectoryOrder.FAILED
            else f"those with the {order.value.lower()} reward",
        )
    reading.add_argument("--limit", type=_positive, default=3, help="how many (default: 3, at most 50)")
    reading.add_argument("--json", action="store_true", help="JSON Lines, a trajectory each")
    reading.set_defaults(run=_trajectories, order=TrajectoryOrder.FIRST)

    comparing = commands.add_parser("compare", parents=[common], help="show experiments beside each other")
    comparing.add_argument("names", nargs="+", metavar="NAME")
    comparing.add_argument("--metric", default="reward_mean", help="what is compared (default: reward_mean)")
    comparing.add_argument("--plot", type=Path, default=None, metavar="FILE", help="also draw it: .png, .svg or .pdf")
    comparing.set_defaults(run=_compare)

    pull = commands.add_parser(
        "pull", parents=[common], help="download an adapter as a PEFT folder, or trackers' files"
    )
    pull.add_argument("name", metavar="NAME")
    pull.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")
    what = pull.add_mutually_exclusive_group()
    what.add_argument("--step", type=int, default=None, help="committed step (default: the latest)")
    what.add_argument("--tracking", action="store_true", help="instead: what its trackers have kept in mode Offline")
    pull.set_defaults(run=_pull)
    return parser


def _watch(kube: Kube, namespace: str, arguments: argparse.Namespace) -> int:
    return watch(kube, namespace, arguments.names, until_done=arguments.until_done, console=Console())


def _logs(kube: Kube, namespace: str, arguments: argparse.Namespace) -> int:
    return logs(kube, namespace, arguments.name, follow=arguments.follow)


def _trajectories(kube: Kube, namespace: str, arguments: argparse.Namespace) -> int:
    return trajectories(
        kube,
        namespace,
        arguments.name,
        step=arguments.step,
        order=arguments.order,
        limit=min(arguments.limit, MAX_LIMIT),
        as_json=arguments.json,
        console=Console(),
    )


def _compare(kube: Kube, namespace: str, arguments: argparse.Namespace) -> int:
    return compare(kube, namespace, arguments.names, metric=arguments.metric, plot_to=arguments.plot, console=Console())


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _metrics(kube: Kube, namespace: str, arguments: argparse.Namespace) -> int:
    experiment = find_experiment(kube, namespace, arguments.name)
    with EngineAccess(kube, experiment).get(f"/v1/experiments/{experiment.meta.uid}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    console = Console()
    if arguments.json or not console.is_terminal:
        print(*lines, sep="\n")
    else:
        console.print(_table([json.loads(line) for line in lines]))
    return 0


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    columns = [name for name in METRIC_COLUMNS if any(name in row for row in rows)]
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        values = (row.get(name, "") for name in columns)
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    return table


def _pull(kube: Kube, namespace: str, arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CliError(f"{folder} is not an empty folder: name a new one")
    experiment = find_experiment(kube, namespace, arguments.name)
    access = EngineAccess(kube, experiment)
    if arguments.tracking:
        with access.get(f"/v1/experiments/{experiment.meta.uid}/tracking") as answer:
            folder.mkdir(parents=True, exist_ok=True)
            names = extract(answer, folder, tree=True)
        print(f"trackers of {arguments.name}: {', '.join(str(folder / name) for name in names)}")
        return 0
    step = arguments.step
    if step is None:
        with access.get(f"/v1/experiments/{experiment.meta.uid}/checkpoints") as answer:
            steps = [item["step"] for item in json.load(answer)["items"]]
        if not steps:
            raise CliError(f"{arguments.name} has not committed a step yet")
        step = max(steps)
    folder.mkdir(parents=True, exist_ok=True)
    with access.get(f"/v1/experiments/{experiment.meta.uid}/checkpoints/{step}") as answer:
        names = extract(answer, folder)
    print(f"step {step} of {arguments.name}: {', '.join(str(folder / name) for name in names)}")
    return 0


def extract(stream: Any, folder: Path, *, tree: bool = False) -> list[str]:
    """Unpacks a tar of plain files, without folders, links or paths, into `folder`; returns their names.

    tree: of files and folders below each other; the names are those of the uppermost.

    Raises CliError, and leaves `folder` as it was, for a tar that holds anything else.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    known = member.isfile() or (tree and member.isdir())
                    plain = (PLAIN_PATH if tree else PLAIN_NAME).fullmatch(member.name)
                    if not (known and plain and member.name.isprintable()):
                        kind = "file or folder below it" if tree else "file name"
                        raise CliError(f"the engine's answer holds {member.name!r}, which is no plain {kind}")
                    tar.extract(member, beside, filter="data")
        except tarfile.TarError as error:
            raise CliError(f"the engine's answer is no tar: {error}") from error
        names = sorted(path.name for path in Path(beside).iterdir())
        for name in names:
            (Path(beside) / name).replace(folder / name)
    return names


if __name__ == "__main__":
    raise SystemExit(main())
