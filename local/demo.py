"""The demo: a real control plane, the operator, and one CPU engine on this machine; three experiments on it.

    python -m local.demo up       what `make demo` runs once everything is installed
    python -m local.demo down     ends it and deletes its files

Everything listens on the loopback address and nothing needs root. What is kept: `~/.cache/clora/demo`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from local import process
from local.cache import REPOSITORY, LocalClusterError, cache_dir, exclusive, say
from local.control_plane import ControlPlane, free_port
from local.crds import install_crds
from local.demo_report import report
from local.model import NAME, model
from local.process import Process
from local.tools import tools

ENGINE = "local"
EXAMPLES = REPOSITORY / "examples" / "demo"
BIN = Path(sys.executable).parent


class Demo:
    """The demo's folder: control plane, engine storage, token, logs, and the processes that run."""

    def __init__(self) -> None:
        self.folder = cache_dir() / "demo"
        self.control_plane = ControlPlane(self.folder / "control-plane")
        self.storage = self.folder / "engine"
        self.logs = self.folder / "log"
        self._token = self.folder / "token"
        self._state = self.folder / "processes.json"

    # ---------------------------------------------------------------- up

    def up(self, laps: dict[str, float]) -> int:
        """Starts what does not run yet, applies the examples, watches them to the end, and reports."""
        self.logs.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        say("starting the control plane")
        self.control_plane.up()
        install_crds(self.control_plane.kubeconfig)
        laps["control plane"] = time.monotonic() - started
        port = self._start_engine()
        self._start_operator()
        say(f"KUBECONFIG is {self.control_plane.kubeconfig}")
        self._apply_engine(port)
        self._apply_examples()
        started = time.monotonic()
        done = subprocess.run([BIN / "clora", "watch", "--until-done"], env=self._environment(), check=False)  # noqa: S603
        laps["experiments"] = time.monotonic() - started
        if done.returncode != 0:
            say(f"error: not all experiments have succeeded; `kubectl describe lexp` and {self.logs} say why")
            self._say_how_to_go_on()
            return 1
        report(self._experiments(), self.storage, self.folder)
        say("time: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in laps.items()))
        self._say_how_to_go_on()
        return 0

    def _start_engine(self) -> int:
        state = self._read()
        port = state.get("enginePort") or free_port()
        if self._alive("engine"):
            return int(port)
        if not self._token.exists():
            descriptor = os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32))
        say(f"starting an engine with {NAME} on the CPU")
        self._start("engine", _engine_command(model(), self.storage, self._token, port))
        self._write(enginePort=port)
        return int(port)

    def _start_operator(self) -> None:
        if self._alive("operator"):
            return
        say("starting the operator")
        command = [
            str(BIN / "clora-operator"),
            "run",
            "--all-namespaces",
            "--liveness-port",
            "0",
            "--metrics-port",
            "0",
        ]
        self._start("operator", [*command, "--kubeconfig", str(self.control_plane.kubeconfig)])

    def _start(self, name: str, command: list[str]) -> None:
        keeper = [sys.executable, "-m", "local.keep", "--", *command]
        found = process.start(keeper, cwd=REPOSITORY, log=self.logs / f"{name}.log")
        self._write(**{name: asdict(found)})

    def _apply_engine(self, port: int) -> None:
        """The engine runs outside of the cluster: the resource names its endpoint, a Secret holds its token."""
        token = self._token.read_text()
        manifests: list[dict[str, Any]] = [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": f"{ENGINE}-engine-token", "namespace": "default"},
                "stringData": {"token": token},
            },
            {
                "apiVersion": "clora.dev/v1alpha1",
                "kind": "LoRAEngine",
                "metadata": {"name": ENGINE, "namespace": "default"},
                "spec": {
                    "model": {"name": f"HuggingFaceTB/{NAME}"},
                    "endpoint": f"http://127.0.0.1:{port}",
                    "tokenSecretRef": {"name": f"{ENGINE}-engine-token"},
                },
            },
        ]
        self._kubectl("apply", "--server-side", "-f", "-", text=yaml.safe_dump_all(manifests))

    def _apply_examples(self) -> None:
        found = self._experiments()
        states = [e.get("status", {}).get("state") for e in found]
        if found and all(state in ("Succeeded", "Failed") for state in states):
            say("the last run is finished: its experiments are deleted and run anew")
            self._kubectl("delete", "loraexperiments", "--all", "--namespace", "default", "--timeout=120s")
        say(f"applying {EXAMPLES.relative_to(REPOSITORY)}")
        self._kubectl("apply", "--namespace", "default", "-f", str(EXAMPLES))

    # ---------------------------------------------------------------- down

    def down(self) -> None:
        """Ends every process and deletes the folder."""
        for name in ("operator", "engine"):
            with suppress(KeyError):
                Process(**self._read()[name]).end(grace_seconds=60.0)
        self.control_plane.down(delete=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---------------------------------------------------------------- inside

    def _experiments(self) -> list[dict[str, Any]]:
        text = self._kubectl("get", "loraexperiments", "--namespace", "default", "-o", "json")
        items: list[dict[str, Any]] = json.loads(text)["items"]
        return items

    def _kubectl(self, *arguments: str, text: str | None = None) -> str:
        command = [str(tools() / "kubectl"), *arguments]
        done = subprocess.run(  # noqa: S603
            command, env=self._environment(), input=text, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise LocalClusterError(f"kubectl {arguments[0]} failed:\n{done.stderr.strip()}")
        return done.stdout

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.control_plane.kubeconfig)}

    def _say_how_to_go_on(self) -> None:
        say("\nIt all stays up until `make demo-down` (which deletes the demo's files, adapters too). Look around:")
        say(f"  export KUBECONFIG={shlex.quote(str(self.control_plane.kubeconfig))}")
        say(f"  export PATH={shlex.quote(str(BIN))}:{shlex.quote(str(tools()))}:$PATH")
        say("  kubectl get loraexperiments; kubectl describe lexp kitchen; clora metrics kitchen")

    def _alive(self, name: str) -> bool:
        known = self._read().get(name)
        return known is not None and Process(**known).alive()

    def _read(self) -> dict[str, Any]:
        return json.loads(self._state.read_bytes()) if self._state.exists() else {}

    def _write(self, **changes: object) -> None:
        self._state.write_text(json.dumps({**self._read(), **changes}))


def _engine_command(folder: Path, storage: Path, token: Path, port: int) -> list[str]:
    flags = {
        "model": folder,
        "model-name": f"HuggingFaceTB/{NAME}",
        "storage": storage,
        "token-file": token,
        "host": "127.0.0.1",
        "port": port,
        "max-experiments": 4,
        "max-rank": 16,
        "max-model-len": 1024,
        "max-num-seqs": 128,
        "kv-cache-memory": "1Gi",
        "tokens-per-microbatch": 2048,
    }
    return [str(BIN / "clora-engine"), "serve", *(f"--{name}={value}" for name, value in flags.items())]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m local.demo", description="clora's demo on this machine.")
    parser.add_argument("command", choices=["up", "down"])
    parser.add_argument("--install-seconds", type=float, default=0.0, help="taken before, for the closing line")
    parser.add_argument("--prepare-seconds", type=float, default=0.0, help="taken before, for the closing line")
    options = parser.parse_args()
    demo = Demo()
    try:
        with exclusive(cache_dir() / "demo.lock", "the demo"):
            if options.command == "down":
                demo.down()
                say("the demo has ended")
                return 0
            packages, rest = options.install_seconds, options.prepare_seconds - options.install_seconds
            return demo.up({"packages": packages, "model and control plane's programs": rest})
    except LocalClusterError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("\nleft running; `make demo` watches it again, `make demo-down` ends it")
        return 130


if __name__ == "__main__":
    sys.exit(main())
