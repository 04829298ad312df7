"""A server of W&B on this machine's loopback: the calls of its API that a run's metrics need, in memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Server:
    """`requests`: (path, Authorization). `rows`: of the run's history, by their place. `over`:
    it has ended. `status`: other than 200, of all."""

    port: int = 0
    status: int = 200
    requests: list[tuple[str, str]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    over: bool = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/sdk/otel"):  # what the library tells of itself; a server need not take it
            raise web.HTTPNotFound
        self.requests.append((request.path, request.headers.get("Authorization", "")))
        if self.status != 200:
            return web.json_response({"errors": [{"message": "no"}]}, status=self.status)
        data = await request.read()
        if request.path.startswith("/upload/"):
            return web.Response()
        body = json.loads(data)
        if request.path == "/graphql":
            return web.json_response({"data": self._graphql(body["query"], body.get("variables") or {})})
        return web.json_response(self._stream(body))

    def _graphql(self, query: str, variables: dict[str, Any]) -> Any:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "team"}}
        if "ServerFeaturesQuery" in query:
            return {"serverInfo": {"features": []}}
        if "RunResumeStatus" in query:
            return {"model": project | {"bucket": self._known() if self.run else None}}
        if "UpsertBucket" in query:
            inserted, self.run = not self.run, self.run or variables
            bucket = {"id": "b", "name": variables["name"], "displayName": "d", "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket | {"historyLineCount": len(self.rows)}, "inserted": inserted}}
        assert "CreateRunFiles" in query, query
        files = [{"name": f, "uploadUrl": f"http://127.0.0.1:{self.port}/upload/{f}"} for f in variables["files"]]
        return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}

    def _known(self) -> Any:
        last = [json.dumps(self.rows[max(self.rows)])] if self.rows else []
        counts = {"logLineCount": 0, "historyLineCount": len(self.rows), "eventsLineCount": 0}
        told = {"historyTail": json.dumps(last), "eventsTail": "[]", "summaryMetrics": "{}", "config": "{}"}
        return {"id": "b", "name": self.run["name"], "displayName": "d", "tags": [], "notes": ""} | counts | told

    def _stream(self, body: dict[str, Any]) -> Any:
        history = body.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        for place, text in enumerate(history["content"], start=history["offset"]):
            row = json.loads(text)
            assert self.rows.setdefault(place, row)["_step"] == row["_step"], "another step in its place"
        self.over = self.over or bool(body.get("complete"))
        return {}

    def steps(self) -> list[tuple[int, dict[str, float]]]:
        rows = [row for _, row in sorted(self.rows.items())]
        return [(row["_step"], {n: v for n, v in row.items() if not n.startswith("_")}) for row in rows]


@asynccontextmanager
async def serving(server: Server | None = None) -> AsyncIterator[Server]:
    server = server or Server()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{tail:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()
