"""An engine without a model: the control API as clora_api.control has it, over experiments that only count steps.

For the operator's tests, where a real engine would be slow and could not be told to fail. A process of its own, so that
it can be killed: epoch and commits are kept in --storage by the engine's own Journal, which knows who may write, and a
new start resumes from them. No commit is pruned, so that tests can read them all. What else happens is written to
events.jsonl there (one object a line: at, epoch, event, uid, step): attach, loaded, leave, delete; refused, when a
newer engine has taken the experiment over.

An experiment's environment.arguments say how it behaves: stepSeconds, failAtStep, failures (how often, then it goes
on), retryable, reason, invalidField, unknownField (refused once the spec has it, as an engine of an earlier release
would), loadSeconds, and answerSeconds, by which the answer to a PUT comes later than its effect. A file faults.json in
--storage says how the whole engine misbehaves as long as it is there: {"status": 500}, {"garbage": true}, {"epoch": 1}
(its reports are of that epoch), {"hang": UID} (does not answer about that experiment).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tarfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from clora_api.control import (
    PROBLEM_BASE,
    CheckpointList,
    DesiredExperiment,
    DesiredServing,
    EngineInfo,
    ExperimentList,
    ExperimentReport,
    Phase,
    Problem,
    ReportedCheckpoint,
    ReportedProgress,
    ReportedServing,
    RunMode,
    spec_digest,
)
from clora_engine.errors import CheckpointError, StaleEpochError
from clora_engine.journal import Journal, next_epoch
from clora_engine.model_folder import BaseModel


class RefusalError(Exception):
    def __init__(self, kind: str, status: int, detail: str, field: str | None = None, reason: str = "") -> None:
        super().__init__(detail)
        self.problem = Problem(
            type=PROBLEM_BASE + kind, title=kind, status=status, detail=detail, field=field, reason=reason
        )


class Simulated:
    """One experiment."""

    def __init__(self, engine: Engine, desired: DesiredExperiment) -> None:
        self.engine, self.desired = engine, desired
        self.phase = Phase.SUSPENDED if desired.mode is RunMode.SUSPEND else Phase.PREPARING
        self.journal = engine.journal(desired.uid)
        self.committed = last_commit(self.journal)
        self.step = self.committed or 0
        self.failed_attempt = -1
        self.failure: tuple[str, str, bool] | None = None
        self.loaded = False
        self.revision = 0
        self.delete_files = False
        self.keeps_slot = False
        self.task: asyncio.Task[None] | None = None

    def argument(self, name: str, default: str) -> str:
        return self.desired.spec.environment.arguments.get(name, default)

    def commit(self) -> None:
        folder = self.journal.step_folder(self.step)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text(str(self.step))
        self.journal.append_metrics({"step": self.step, "reward_mean": self.reward})
        self.journal.commit(self.step, position=self.step, now=time.time())
        self.committed = self.step

    @property
    def reward(self) -> float:
        return self.step / self.desired.spec.max_steps

    def start_if_due(self) -> None:
        wanted = self.desired.mode is RunMode.RUN and (
            self.phase in (Phase.PREPARING, Phase.SUSPENDED)
            or (self.phase is Phase.FAILED and self.desired.attempt > self.failed_attempt)
        )
        if wanted and (self.task is None or self.task.done()):
            self.phase, self.failure = Phase.PREPARING, None
            self.changed()
            self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        self.engine.log("attach", self)
        await asyncio.sleep(float(self.argument("loadSeconds", "0")))
        try:
            await self.train()
        except StaleEpochError:  # of a newer engine on the same storage
            self.loaded = False
            self.engine.log("refused", self)

    async def train(self) -> None:
        self.journal.claim(self.desired.namespace, self.desired.name)
        self.journal.resume()
        self.committed = last_commit(self.journal)
        self.step = self.committed or 0
        if self.committed is None:
            self.commit()
        self.loaded = True
        self.engine.log("loaded", self)
        if self.phase is Phase.PREPARING:
            self.phase = Phase.RUNNING
        self.changed()
        while self.phase is Phase.RUNNING and self.desired.mode is RunMode.RUN and self.step < self.max_steps:
            await asyncio.sleep(float(self.argument("stepSeconds", "0.05")))
            if self.due_to_fail():
                self.phase, self.failed_attempt = Phase.FAILED, self.desired.attempt
                break
            self.step += 1
            self.commit()
            self.changed()
        if self.phase is Phase.RUNNING:
            self.phase = Phase.SUCCEEDED if self.step >= self.max_steps else Phase.SUSPENDED
            self.keeps_slot = self.phase is Phase.SUCCEEDED and self.desired.serving_token is not None
        self.loaded = False
        self.engine.log("leave", self)
        self.changed()

    @property
    def max_steps(self) -> int:
        return self.desired.spec.max_steps

    def due_to_fail(self) -> bool:
        at = self.argument("failAtStep", "")
        if not at or self.step + 1 != int(at) or self.desired.attempt >= int(self.argument("failures", "1000")):
            return False
        retryable = self.argument("retryable", "true") == "true"
        self.failure = (self.argument("reason", "ExperimentError"), f"step {at} went wrong", retryable)
        return True

    def changed(self) -> None:
        self.revision = self.engine.news()

    def report(self) -> ExperimentReport:
        reason, message, retryable = self.failure or ("", "", False)
        version = f"{self.desired.name}@{self.step}" if self.loaded or self.keeps_slot else ""
        committed = self.committed
        return ExperimentReport(
            uid=self.desired.uid,
            namespace=self.desired.namespace,
            name=self.desired.name,
            epoch=self.engine.epoch,
            revision=self.revision,
            phase=self.phase,
            mode=self.desired.mode,
            attempt=self.desired.attempt,
            spec_digest=spec_digest(self.desired),
            reason=reason,
            message=message,
            retryable=retryable,
            adapter_loaded=self.loaded,
            adapter_version=f"{self.desired.name}@{self.step}",
            adapter_digest=f"digest-{self.step}",
            progress=ReportedProgress(
                step=self.step,
                max_steps=self.max_steps,
                reward=self.reward,
                activity="Rollout",
                metrics={"tokensPerSecond": 100.0 + self.step},
                seconds_per_step=0.05,
            ),
            checkpoint=None
            if committed is None
            else ReportedCheckpoint(step=committed, path=f"{self.desired.uid}/steps/{committed:05d}", digest="d"),
            serving=None if self.desired.serving_token is None else ReportedServing(version=version),
            keeps_slot=self.keeps_slot,
        )

    def serve_if_due(self) -> None:
        """As the engine does, of one that has ended."""
        token, mode = self.desired.serving_token, self.desired.mode
        if self.keeps_slot and token is None:
            self.keeps_slot = False
            self.changed()
        elif token is not None and mode is RunMode.SERVE and not self.report().occupying:
            self.step, self.keeps_slot = self.committed or 0, True
            self.changed()


class Engine:
    def __init__(
        self,
        storage: Path,
        max_experiments: int,
        max_rank: int,
        max_off_policy_steps: int | None = None,
        model: str = "simulated",
    ) -> None:
        self.storage, self.max_experiments, self.max_rank = storage, max_experiments, max_rank
        self.base = BaseModel(name=model, fingerprint=model)
        self.max_off_policy_steps = max_off_policy_steps
        self.epoch = next_epoch(storage)
        self.experiments: dict[str, Simulated] = {}
        self.revision = 0
        self.waiting = asyncio.Event()

    def journal(self, uid: str) -> Journal:
        return Journal(self.storage, uid, self.epoch, self.base)

    def log(self, event: str, experiment: Simulated) -> None:
        line = {
            "at": time.time(),
            "epoch": self.epoch,
            "event": event,
            "uid": experiment.desired.uid,
            "step": experiment.step,
        }
        with (self.storage / "events.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")

    def news(self) -> int:
        self.revision += 1
        self.waiting.set()
        self.waiting = asyncio.Event()
        return self.revision

    def info(self) -> EngineInfo:
        return EngineInfo(
            epoch=self.epoch,
            ready=True,
            model=self.base.name,
            version="0",
            max_experiments=self.max_experiments,
            max_rank=self.max_rank,
            max_off_policy_steps=self.max_off_policy_steps,
            experiments=sum(e.report().occupying for e in self.experiments.values()),
            serves=True,
        )

    def listed(self) -> ExperimentList:
        items = [experiment.report() for experiment in self.experiments.values()]
        return ExperimentList(epoch=self.epoch, revision=self.revision, items=items)

    async def listed_after(self, since: int | None, seconds: float) -> ExperimentList:
        """Once there is news, or the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while since == self.revision:
                    await self.waiting.wait()
        except TimeoutError:
            pass
        return self.listed()

    def put(self, desired: DesiredExperiment) -> ExperimentReport:
        known = self.experiments.get(desired.uid)
        field = desired.spec.environment.arguments.get("invalidField")
        if field:
            raise RefusalError("invalid-spec", 422, "this cannot run here", field)
        unknown = desired.spec.environment.arguments.get("unknownField")
        if unknown in desired.spec.model_dump(by_alias=True, exclude_none=True):
            raise RefusalError("invalid-spec", 422, "there is no such field", unknown)
        if desired.spec.lora.rank > self.max_rank:
            raise RefusalError("invalid-spec", 422, f"rank is above {self.max_rank}", "lora.rank")
        if known is None and desired.committed_step is not None:
            found = last_commit(self.journal(desired.uid))
            if found is None or found < desired.committed_step:
                detail = f"step {desired.committed_step} was committed, but this engine's storage has no step of it"
                raise RefusalError("conflict", 409, detail, reason="CheckpointUnreachable")
        if known is None:
            try:
                self.journal(desired.uid).require_base()
            except CheckpointError as error:
                raise RefusalError("conflict", 409, str(error), reason=error.reason) from None
        if desired.mode is not RunMode.SUSPEND and (known is None or not known.report().occupying):
            finished = known is not None and known.phase is Phase.SUCCEEDED and desired.mode is RunMode.RUN
            if not finished and self.info().experiments >= self.max_experiments:
                raise RefusalError("capacity-exceeded", 409, f"all {self.max_experiments} slots are in use")
        if known is None:
            known = self.experiments[desired.uid] = Simulated(self, desired)
            known.phase = Phase.SUCCEEDED if desired.mode is RunMode.SERVE else known.phase
            known.changed()
        elif known.desired != desired:
            known.desired = desired
            known.changed()
        self.note_token(known)
        known.start_if_due()
        known.serve_if_due()
        return known.report()

    def serve(self, known: Simulated, serving: DesiredServing) -> ExperimentReport:
        if known.desired.serving_token != serving.serving_token:
            known.desired = known.desired.model_copy(update={"serving_token": serving.serving_token})
            known.keeps_slot = known.keeps_slot and serving.serving_token is not None
            known.changed()
        self.note_token(known)
        return known.report()

    def note_token(self, known: Simulated) -> None:
        """For the tests: serving-token/UID holds what the operator has told."""
        path = self.storage / "serving-token" / known.desired.uid
        path.parent.mkdir(exist_ok=True)
        path.write_text(known.desired.serving_token or "")

    async def delete(self, experiment: Simulated, files: bool) -> None:
        experiment.phase, experiment.keeps_slot = Phase.DELETING, False
        experiment.changed()
        if experiment.task is not None:
            await asyncio.wait([experiment.task])
        if files:
            self.delete_files(experiment.desired.uid)
        self.log("delete", experiment)
        del self.experiments[experiment.desired.uid]
        self.news()

    def begin_delete(self, uid: str, files: bool, tasks: set[asyncio.Task[None]]) -> ExperimentReport | None:
        """None where there is nothing to wait for. `tasks` holds what goes on."""
        experiment = self.experiments.get(uid)
        if experiment is None:
            if files:  # of an earlier epoch
                self.delete_files(uid)
            return None
        if experiment.phase is not Phase.DELETING:
            experiment.phase = Phase.DELETING
            task = asyncio.create_task(self.delete(experiment, files))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return experiment.report()

    def delete_files(self, uid: str) -> None:
        journal = self.journal(uid)
        owner = journal.owner()
        if owner is not None:
            journal.claim(owner.namespace, owner.name)
            journal.delete()


def last_commit(journal: Journal) -> int | None:
    return max(journal.commits(), default=None)


def create_app(engine: Engine, token_file: Path) -> FastAPI:
    app = FastAPI()
    tasks: set[asyncio.Task[None]] = set()

    @app.exception_handler(RefusalError)
    async def refused(_: Request, refusal: RefusalError) -> JSONResponse:
        return JSONResponse(refusal.problem.to_api(), refusal.problem.status, media_type="application/problem+json")

    def accepted(request: Request) -> bool:
        return request.headers.get("authorization") == f"Bearer {token_file.read_text().strip()}"

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        if request.url.path.startswith("/v1") and not accepted(request):
            return await refused(request, RefusalError("unauthorized", 401, "wrong token"))
        faults = read_faults()
        if faults.get("hang") and request.url.path.endswith(faults["hang"]):
            await asyncio.Event().wait()
        if not request.url.path.startswith("/v1") or not faults:
            answer: Response = await call_next(request)
            return answer
        if "status" in faults:
            return Response("<html>no gateway</html>", faults["status"], media_type="text/html")
        if "garbage" in faults:
            return Response('{"items": [{"uid": 7, "phase": "Dancing"}], "epoch": "x"', media_type="application/json")
        answer = await call_next(request)
        lies = "epoch" in faults and request.url.path != "/v1/engine"
        return await lying(answer, faults["epoch"]) if lies else answer

    def read_faults() -> dict[str, Any]:
        path = engine.storage / "faults.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    async def lying(answer: Any, epoch: int) -> Response:
        body = json.loads(b"".join([chunk async for chunk in answer.body_iterator]))
        for report in (body, *body.get("items", ())):
            report["epoch"] = epoch
        return JSONResponse(body, answer.status_code)

    def find(uid: str) -> Simulated:
        if uid not in engine.experiments:
            raise RefusalError("not-found", 404, f"the engine has no experiment {uid}")
        return engine.experiments[uid]

    @app.get("/healthz")
    @app.get("/readyz")
    async def healthy() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/engine")
    async def info() -> EngineInfo:
        return engine.info()

    @app.get("/v1/experiments")
    async def experiments(since: int | None = None, timeoutSeconds: float = 0.0) -> ExperimentList:
        return await engine.listed_after(since, timeoutSeconds)

    @app.put("/v1/experiments/{uid}")
    async def put(uid: str, desired: DesiredExperiment) -> ExperimentReport:
        assert uid == desired.uid
        report = engine.put(desired)
        await asyncio.sleep(float(desired.spec.environment.arguments.get("answerSeconds", "0")))
        return report

    @app.put("/v1/experiments/{uid}/serving")
    async def serve(uid: str, serving: DesiredServing) -> ExperimentReport:
        return engine.serve(find(uid), serving)

    @app.get("/v1/experiments/{uid}")
    async def get(uid: str) -> ExperimentReport:
        return find(uid).report()

    @app.delete("/v1/experiments/{uid}")
    async def delete(uid: str, response: Response, files: str = "Retain") -> ExperimentReport | None:
        report = engine.begin_delete(uid, files == "Delete", tasks)
        response.status_code = 200 if report is None else 202
        return report

    @app.get("/v1/experiments/{uid}/metrics")
    async def metrics(uid: str) -> Response:
        lines = (json.dumps(line) + "\n" for line in find(uid).journal.read_metrics())
        return Response("".join(lines), media_type="application/jsonl")

    @app.get("/v1/experiments/{uid}/checkpoints")
    async def checkpoints(uid: str) -> CheckpointList:
        report = find(uid).report()
        return CheckpointList(items=[report.checkpoint] if report.checkpoint else [])

    @app.get("/v1/experiments/{uid}/checkpoints/{step}")
    async def checkpoint(uid: str, step: int) -> Response:
        if step not in find(uid).journal.commits():
            raise RefusalError("not-found", 404, f"{uid} has no step {step}")
        buffer = BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, data in (("adapter_config.json", b"{}"), ("adapter_model.safetensors", str(step).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, BytesIO(data))
        return Response(buffer.getvalue(), media_type="application/x-tar")

    return app


async def _serve(arguments: argparse.Namespace) -> None:
    limits = (arguments.max_experiments, arguments.max_rank, arguments.max_off_policy_steps)
    engine = Engine(arguments.storage, *limits, arguments.model_name)
    if arguments.real_server:
        from tests.integration.simulated_supervisor import create_real_app

        app = create_real_app(engine, arguments.token_file)
    else:
        app = create_app(engine, arguments.token_file)
    config = uvicorn.Config(app, host=arguments.host, port=arguments.port, log_level="warning")
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--model-name", default="simulated")
    parser.add_argument("--max-experiments", type=int, default=4)
    parser.add_argument("--max-rank", type=int, default=32)
    parser.add_argument("--max-off-policy-steps", type=int, default=None)
    parser.add_argument("--real-server", action="store_true", help="the engine's own; see simulated_supervisor")
    known, _ = parser.parse_known_args()  # it stands in for `clora-engine serve`, whose other flags it needs not
    asyncio.run(_serve(known))
