"""The process of a tracker: orders come in over stdin, answers go out over stdout (protocol.py).

It makes itself small first: low priority, bounded memory, the first to go when memory runs out, no core dumps (the key
would be in them). Its libraries get no stdin, and what they print goes nowhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from clora_engine.environments import http_addresses
from clora_engine.tracker import metrics_file, proxy
from clora_engine.tracker.mlflow_sink import MlflowSink
from clora_engine.tracker.protocol import Answer, End, Ended, Sent, Start, Trouble, Upto, line, order
from clora_engine.tracker.sink import Sink
from clora_engine.tracker.trackio_sink import TrackioSink
from clora_engine.tracker.wandb_sink import WandbSink

NICENESS = 10
MAX_DATA_BYTES = 2 << 30
ORPHAN_SECONDS = 60  # to bring to the tracker what it has, once the engine is gone
MAX_TOLD = 512  # characters of an error


def main() -> int:
    """0 when it has ended as it was told to, 1 after trouble."""
    _be_small()
    orders, answers = _own_channels()
    start = order(orders.readline())
    assert isinstance(start, Start)
    try:
        with ExitStack() as stack:
            _follow(start, _opened(start, stack), orders, answers)
    except BaseException as error:  # also SystemExit, which libraries raise
        _say(answers, Trouble(_told(error, start.key)))
        return 1
    _say(answers, Ended())
    return 0


def _follow(start: Start, sink: Sink, orders: BinaryIO, answers: BinaryIO) -> None:
    metrics, position = Path(start.folder) / "metrics.jsonl", 0
    _say(answers, Sent(sink.last))
    for data in orders:
        match order(data):
            case Upto(metrics_bytes=end):
                for step in metrics_file.read(metrics, position, end):
                    if sink.last is None or step.step > sink.last:
                        sink.add(step.step, step.seconds, step.values)
                position = end
                _say(answers, Sent(sink.last))
            case End(succeeded=succeeded):
                sink.end(succeeded)
                return
            case other:
                raise ValueError(f"{type(other).__name__} comes first or not at all")
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(ORPHAN_SECONDS)
    sink.end(None)  # the engine is gone


def _opened(start: Start, stack: ExitStack) -> Sink:
    workspace = Path.cwd()  # empty, and removed by the engine
    os.environ |= {"HOME": str(workspace), "TMPDIR": str(workspace)}
    stack.enter_context(_alone(Path(start.folder) / "tracking", start.kind))
    way_out = stack.enter_context(proxy.running(_policy(start))) if start.online else None
    if way_out is not None:
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        os.environ |= dict.fromkeys(names, way_out)
    match start.kind:
        case "WandB":
            return WandbSink(start, workspace, way_out)
        case "MLflow":
            return MlflowSink(start)
        case _:
            return TrackioSink(start)


def _policy(start: Start) -> http_addresses.HostPolicy:
    environ = {"KUBERNETES_SERVICE_HOST": start.api_server} if start.api_server else {}
    return http_addresses.policy(start.hosts, loopback=start.loopback, nodes=start.nodes, environ=environ)


@contextmanager
def _alone(folder: Path, kind: str) -> Iterator[None]:
    """Waits until no earlier process of this tracker lives: one that was replaced has some time to end."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{kind}.lock").open("a") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield


def _be_small() -> None:
    os.nice(NICENESS)
    os.umask(0o077)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    bound = MAX_DATA_BYTES if most == resource.RLIM_INFINITY else min(most, MAX_DATA_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path("/proc/self/oom_score_adj").write_text("1000")


def _own_channels() -> tuple[BinaryIO, BinaryIO]:
    """stdin and stdout, which from now on are /dev/null to everybody else and to the processes that are started."""
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    return orders, answers


def _say(answers: BinaryIO, answer: Answer) -> None:
    answers.write(line(answer))


def _told(error: BaseException, key: str | None) -> str:
    text = f"{type(error).__name__}: {error}"
    for secret in (key, json.dumps(key)[1:-1]) if key else ():
        text = text.replace(secret, "…")
    return " ".join(text.split())[:MAX_TOLD]


if __name__ == "__main__":
    sys.exit(main())
