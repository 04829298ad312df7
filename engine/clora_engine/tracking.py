"""The trackers of one experiment: a process for each (tracker/), fed from metrics.jsonl, never waited for.

Only committed steps are sent, so that nothing that a tracker has is taken back. A process that fails, ends or does not
answer is killed and started again, later each time, and goes on from where its tracker is; meanwhile the report says
what is wrong. Training knows nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from clora_api.control import DesiredExperiment, ReportedTracker
from clora_api.v1alpha1.experiment import ExperimentSpec
from clora_api.v1alpha1.tracking import Tracker, TrackerKind
from clora_engine.config import EngineConfig
from clora_engine.environments.http_addresses import AllowedHost, HostPolicy
from clora_engine.errors import UserError
from clora_engine.tracker import protocol

log = logging.getLogger(__name__)

WANDB_URL = "https://api.wandb.ai"
# of each kind: its library's package, and the extra of clora that brings it
LIBRARIES = {
    TrackerKind.WANDB: ("wandb", "tracking"),
    TrackerKind.MLFLOW: ("mlflow", "tracking"),
    TrackerKind.TRACKIO: ("trackio", "trackio"),
}
START_SECONDS = 180.0  # to import its library, to wait for the process before it, and to be answered by its server
ANSWER_SECONDS = 300.0  # to bring what is committed to the tracker
END_SECONDS = 60.0  # to bring the rest to it once the experiment has left the engine
PAUSES = (5.0, 15.0, 60.0, 300.0)  # before it is started again; a core of W&B that was left alone has ended by then
PASSED_ON = ("PATH", "LANG", "PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")

_ending: set[asyncio.Task[None]] = set()  # of experiments that have left the engine


def check(spec: ExperimentSpec, config: EngineConfig) -> None:
    """Raises UserError for a tracker that this engine cannot run, or a host that it may not reach."""
    policy = HostPolicy(tuple(AllowedHost.parse(host) for host in config.tracking_hosts))
    for place, tracker in enumerate(spec.tracking or ()):
        package, extra = LIBRARIES[tracker.kind]
        if find_spec(package) is None:
            raise UserError(
                f"this engine's image has no {package}: install clora with the extra {extra}",
                field=f"tracking[{place}].kind",
            )
        url = _url(tracker)
        if tracker.mode == "Online" and not _allows(policy, url or ""):
            raise UserError(
                f"{url} is on none of the hosts that this engine lets trackers reach (LoRAEngine"
                " spec.tracking.allowedHosts): have its host added, or set mode Offline",
                field=f"tracking[{place}].url",
            )


async def all_ended(seconds: float) -> None:
    """Waits for the trackers of experiments that have left, so long at most."""
    if _ending:
        await asyncio.wait(_ending, timeout=seconds)


class Tracking:
    """The trackers of one experiment, whose files are in `folder`. `changed` is called when the report differs."""

    def __init__(self, config: EngineConfig, folder: Path, changed: Callable[[], None]) -> None:
        self._config, self._folder, self._changed = config, folder, changed
        self._trackers: dict[TrackerKind, _Fed] = {}
        self._replaced: list[_Fed] = []
        self._bytes: int | None = None  # of metrics.jsonl that are committed; None: it is not running

    def begin(self, desired: DesiredExperiment, metrics_bytes: int) -> None:
        """It runs, from a commit that covers so much of its metrics."""
        self._bytes = metrics_bytes
        self.update(desired)

    def update(self, desired: DesiredExperiment) -> None:
        """Starts, ends and replaces trackers as the spec and the keys now say."""
        if self._bytes is None:
            return
        wanted = {t.kind: self._start(t, desired) for t in desired.spec.tracking or ()}
        for kind, known in list(self._trackers.items()):
            start = wanted.get(kind)
            if known.told_to_end or start is None or not _same(start, known.start):
                known.end(None)
                self._replaced = [old for old in (*self._replaced, self._trackers.pop(kind)) if old.goes_on]
        for kind, start in wanted.items():
            if kind not in self._trackers:
                before = [old for old in self._replaced if old.start.kind == start.kind]
                self._trackers[kind] = _Fed(start, self._changed, before)
                self._trackers[kind].committed(self._bytes)

    def committed(self, metrics_bytes: int) -> None:
        """A commit covers so much of metrics.jsonl."""
        if self._bytes is not None:
            self._bytes = metrics_bytes
            for tracker in self._trackers.values():
                tracker.committed(metrics_bytes)

    def end(self, succeeded: bool | None) -> None:
        """It leaves the engine: trackers get the rest, and END_SECONDS for it. None: it may come back."""
        self._bytes = None
        for tracker in self._trackers.values():
            tracker.end(succeeded)

    async def kill(self) -> None:
        """Ends them at once."""
        self._bytes = None
        await asyncio.gather(*(tracker.kill() for tracker in (*self._trackers.values(), *self._replaced)))
        self._trackers.clear()
        self._replaced.clear()

    def report(self) -> list[ReportedTracker]:
        return [
            ReportedTracker(kind=kind.value, step=tracker.step, problem=tracker.problem)
            for kind, tracker in self._trackers.items()
        ]

    def _start(self, tracker: Tracker, desired: DesiredExperiment) -> protocol.Start:
        config = desired.spec.to_api()
        config.pop("tracking", None)
        return protocol.Start(
            kind=tracker.kind.value,
            online=tracker.mode == "Online",
            uid=desired.uid,
            project=tracker.project,
            run_name=tracker.run_name or desired.name,
            entity=tracker.entity,
            url=_url(tracker),
            key=(desired.tracking_keys or {}).get(tracker.kind),
            needs_key=tracker.secret_ref is not None,
            folder=str(self._folder),
            config={"name": desired.name, "namespace": desired.namespace, "uid": desired.uid, "spec": config},
            hosts=self._config.tracking_hosts,
            loopback=self._config.loopback_environments,
            api_server=os.environ.get("KUBERNETES_SERVICE_HOST"),
            nodes=self._config.other_nodes,
        )


class _Fed:
    """One tracker, and the task that keeps its process going, once those before it have ended. step: the last that it
    has. process: while it has one."""

    def __init__(self, start: protocol.Start, changed: Callable[[], None], before: Sequence[_Fed]) -> None:
        self.start = start
        self.step: int | None = None
        self.problem = ""
        self.process: asyncio.subprocess.Process | None = None
        self._changed = changed
        self._bytes = 0
        self._tries = 0  # in a row
        self._end: protocol.End | None = None
        self._news = asyncio.Event()
        first = [old._task for old in before]
        self._task: asyncio.Task[None] = asyncio.create_task(
            self._keep_going(first), name=f"tracker-{start.kind}-{start.uid}"
        )

    def committed(self, metrics_bytes: int) -> None:
        self._bytes = metrics_bytes
        self._news.set()

    @property
    def told_to_end(self) -> bool:
        return self._end is not None

    @property
    def goes_on(self) -> bool:
        """It has a process, or will have one again."""
        return not self._task.done()

    def end(self, succeeded: bool | None) -> None:
        if self._end is not None or self._task.done():
            return
        self._end = protocol.End(succeeded)
        self._news.set()
        _ending.add(self._task)
        late = asyncio.get_running_loop().call_later(END_SECONDS, self._give_up)
        self._task.add_done_callback(lambda _: late.cancel())
        self._task.add_done_callback(_ending.discard)

    def _give_up(self) -> None:
        self._say(f"it had not taken everything {END_SECONDS:g} s after the experiment had left")
        self._task.cancel()

    async def kill(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _keep_going(self, first: Sequence[asyncio.Task[None]]) -> None:
        if first:
            await asyncio.wait(first)
        if self.start.needs_key and self.start.key is None:
            self._say("its Secret, or the key in it, is not there")
            return
        while True:
            try:
                await self._live()
                return
            except _Failed as failed:
                self._say(str(failed))
            if self._end is not None:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended(), PAUSES[min(self._tries, len(PAUSES) - 1)])
            self._tries += 1

    async def _ended(self) -> None:
        while self._end is None:
            self._news.clear()
            await self._news.wait()

    def _say(self, problem: str, step: int | None = None) -> None:
        before = self.problem, self.step
        self.problem = problem
        self.step = self.step if step is None else step
        if problem and problem != before[0]:
            log.warning("%s of %s: %s", self.start.kind, self.start.uid, problem)
        if (problem, self.step) != before:
            self._changed()

    async def _live(self) -> None:
        """One life of its process. Returns when it has ended as it was told to; raises _Failed."""
        with tempfile.TemporaryDirectory(prefix="clora-tracker-", ignore_cleanup_errors=True) as workspace:
            await self._live_in(workspace)

    async def _live_in(self, workspace: str) -> None:
        try:
            process = self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "clora_engine.tracker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
                cwd=workspace,
                start_new_session=True,
            )
        except OSError as error:
            raise _Failed(f"its process does not start: {error}") from None
        try:
            await self._converse(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            await process.wait()

    async def _converse(self, process: asyncio.subprocess.Process) -> None:
        told = 0
        await self._ask(process, self.start, START_SECONDS)
        while True:
            self._news.clear()
            if self._bytes > told:
                told = self._bytes
                await self._ask(process, protocol.Upto(told), ANSWER_SECONDS)
            elif self._end is not None:
                await self._ask(process, self._end, END_SECONDS)
                return
            else:
                await self._until_news(process)

    async def _until_news(self, process: asyncio.subprocess.Process) -> None:
        """Or until it ends by itself."""
        ending, news = asyncio.ensure_future(process.wait()), asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait({ending, news}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done() and not self._news.is_set():
                raise _Failed(f"its process has ended with {process.returncode}")
        finally:
            ending.cancel()
            news.cancel()

    async def _ask(self, process: asyncio.subprocess.Process, order: protocol.Order, seconds: float) -> None:
        """Sends an order, and takes its answer in."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(protocol.line(order))
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            raise _Failed(f"it did not answer within {seconds:g} s") from None
        except OSError:
            answer = b""
        if not answer:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 5.0)
            raise _Failed(f"its process has ended with {process.returncode}")
        try:
            said = protocol.answer(answer)
        except msgspec.MsgspecError:
            raise _Failed("its process said what no tracker says") from None
        match said:
            case protocol.Trouble(message=message):
                raise _Failed(message)
            case protocol.Sent(step=step) if order is self.start:
                self._say(self.problem, step)  # it is over once steps are taken again
            case protocol.Sent(step=step):
                self._tries = 0
                self._say("", step)
            case protocol.Ended():
                pass


class _Failed(Exception):
    """A life of a tracker's process has ended otherwise than it was told to; the message is for people."""


def _allows(policy: HostPolicy, url: str) -> bool:
    try:
        return policy.allows(urlsplit(url))
    except ValueError:  # of a port that is no number, say
        return False


def _same(one: protocol.Start, other: protocol.Start) -> bool:
    """But for the configuration, which stays as the run began."""
    return msgspec.structs.replace(one, config={}) == msgspec.structs.replace(other, config={})


def _url(tracker: Tracker) -> str | None:
    if tracker.mode == "Offline":
        return None
    url: Any = tracker.url or (WANDB_URL if tracker.kind is TrackerKind.WANDB else None)
    return str(url).rstrip("/") if url else None
