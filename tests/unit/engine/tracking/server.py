"""A tracking server of MLflow on this machine's loopback: the calls of its REST API that a run needs, in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

API = "/api/2.0/mlflow"


@dataclass
class Server:
    """`requests`: (path, Authorization). `redirect`: where it sends whoever asks. `status`: other than 200, of all."""

    port: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)
    redirect: str = ""
    status: int = 200
    projects: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    history: dict[str, dict[int, float]] = field(default_factory=dict)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path, request.headers.get("Authorization", "")))
        if self.redirect:
            raise web.HTTPTemporaryRedirect(self.redirect + request.path_qs)
        if self.status != 200:
            return web.json_response({"error_code": "PERMISSION_DENIED", "message": "no"}, status=self.status)
        body = await request.json() if request.can_read_body else dict(request.query)
        call = getattr(self, request.path.removeprefix(API).strip("/").replace("/", "_").replace("-", "_"), None)
        if call is None:
            return web.json_response({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": request.path}, status=404)
        return web.json_response(call(body))

    def experiments_get_by_name(self, body: dict[str, Any]) -> Any:
        name = body["experiment_name"]
        if name not in self.projects:
            raise web.HTTPNotFound(
                text='{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}', content_type="application/json"
            )
        found = {"experiment_id": self.projects[name], "name": name, "lifecycle_stage": "active"}
        return {"experiment": found | {"artifact_location": "mlflow-artifacts:/1"}}

    def experiments_create(self, body: dict[str, Any]) -> Any:
        self.projects[body["name"]] = "1"
        return {"experiment_id": "1"}

    def runs_search(self, body: dict[str, Any]) -> Any:
        return {"runs": [self._run()] if self.run else []}

    def runs_create(self, body: dict[str, Any]) -> Any:
        self.run = {"tags": {t["key"]: t["value"] for t in body["tags"]}, "name": body["run_name"], "params": {}}
        self.run["status"] = "RUNNING"
        return {"run": self._run()}

    def runs_get(self, body: dict[str, Any]) -> Any:
        return {"run": self._run()}

    def runs_update(self, body: dict[str, Any]) -> Any:
        self.run["status"] = body["status"]
        return {"run_info": self._run()["info"]}

    def runs_set_tag(self, body: dict[str, Any]) -> Any:
        self.run["tags"][body["key"]] = body["value"]
        return {}

    def runs_log_batch(self, body: dict[str, Any]) -> Any:
        for metric in body.get("metrics", []):
            steps = self.history.setdefault(metric["key"], {})
            assert int(metric["step"]) not in steps, metric
            steps[int(metric["step"])] = metric["value"]
        self.run["params"] |= {p["key"]: p["value"] for p in body.get("params", [])}
        return {}

    def metrics_get_history(self, body: dict[str, Any]) -> Any:
        steps = self.history.get(body["metric_key"], {})
        row = {"key": body["metric_key"], "timestamp": 0}
        return {"metrics": [row | {"step": step, "value": value} for step, value in steps.items()]}

    def _run(self) -> Any:
        info = {"run_id": "r", "run_uuid": "r", "experiment_id": "1", "status": self.run["status"]}
        data = {
            "tags": [{"key": key, "value": value} for key, value in self.run["tags"].items()],
            "params": [{"key": key, "value": value} for key, value in self.run["params"].items()],
        }
        return {"info": info | {"run_name": self.run["name"], "lifecycle_stage": "active"}, "data": data}

    def steps(self) -> list[tuple[int, dict[str, float]]]:
        found: dict[int, dict[str, float]] = {}
        for name, steps in self.history.items():
            for step, value in steps.items():
                found.setdefault(step, {})[name] = value
        return sorted(found.items())


@asynccontextmanager
async def serving(server: Server | None = None) -> AsyncIterator[Server]:
    server = server or Server()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", server.port).start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()
