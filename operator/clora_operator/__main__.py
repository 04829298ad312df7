"""`clora-operator`: `run` (settings, logging, the reconciler, and kopf as its watcher), and the commands of the charts'
hook and tests."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import kopf
import prometheus_client
from kubernetes.config.config_exception import ConfigException

from clora_operator import release_finalizers, wait_ready
from clora_operator.chart_kube import ChartKube, GaveUpError, Patience
from clora_operator.handlers import register
from clora_operator.kube import Kube, configuration
from clora_operator.reconciler import Reconciler
from clora_operator.settings import Settings

log = logging.getLogger("clora_operator")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after SIGTERM or SIGINT, 1 after an error, 2 for settings that cannot be."""
    flags = _parser().parse_args(argv)
    code: int = flags.command(flags)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="clora-operator", description="clora's Kubernetes operator.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    running = commands.add_parser("run", help="watch LoRAEngines and LoRAExperiments and carry them out")
    Settings.add_flags(running)
    running.set_defaults(command=_run)
    about = "before an uninstall: stop the operator and take its finalizer off every LoRAExperiment; nothing is deleted"
    releasing = commands.add_parser("release-finalizers", help=about, description=about)
    release_finalizers.add_flags(releasing)
    releasing.set_defaults(command=_release)
    about = "wait until the operator's Deployment is available or a LoRAEngine is ready"
    waiting = commands.add_parser("wait-ready", help=about, description=about)
    wait_ready.add_flags(waiting)
    waiting.set_defaults(command=_wait)
    return parser


def _run(flags: argparse.Namespace) -> int:
    try:
        settings = Settings.load(flags, os.environ)
        _log_to_stderr(settings.log_level)
    except ValueError as error:
        print(f"clora-operator: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(run(settings))
    except ConfigException as error:
        print(f"clora-operator: no access to a cluster: {error}", file=sys.stderr)
        return 1
    except Exception:
        log.exception("the operator ends")
        return 1
    return 0


def _release(flags: argparse.Namespace) -> int:
    def release(kube: ChartKube, patience: Patience) -> None:
        count = release_finalizers.release(kube, tuple(flags.namespace), flags.deployment, patience)
        log.info("experiments released: %d", count)

    return _chart_command(flags, release)


def _wait(flags: argparse.Namespace) -> int:
    def wait(kube: ChartKube, patience: Patience) -> None:
        if flags.engine is not None:
            wait_ready.wait_for_engine(kube, flags.engine, patience)
        else:
            wait_ready.wait_for_deployment(kube, flags.deployment, patience)
        log.info("ready")

    return _chart_command(flags, wait)


def _chart_command(flags: argparse.Namespace, command: Callable[[ChartKube, Patience], None]) -> int:
    _log_to_stderr("INFO")
    try:
        patience = Patience(deadline=time.monotonic() + flags.timeout_seconds)
        command(ChartKube(configuration(flags.kubeconfig)), patience)
    except (GaveUpError, ConfigException) as error:
        print(f"clora-operator: {error}", file=sys.stderr)
        return 1
    return 0


def _log_to_stderr(level: str) -> None:
    """Raises ValueError for a level that does not exist."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    for noisy in ("httpx", "httpcore", "kubernetes", "urllib3.connectionpool", "kopf.objects", "kopf.activities"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


async def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT, which kopf handles. Raises what ended the reconciler or the watch."""
    reconciler = Reconciler(Kube(configuration(settings.kubeconfig)), settings, lambda: datetime.now(UTC))
    registry = kopf.OperatorRegistry()
    register(registry, reconciler, settings.kubeconfig)
    metrics_server = None
    if settings.metrics_port:
        metrics_server, _ = prometheus_client.start_http_server(settings.metrics_port)
    host = f"http://0.0.0.0:{settings.liveness_port}/healthz" if settings.liveness_port else None
    try:
        async with asyncio.TaskGroup() as group:
            reconciling = group.create_task(reconciler.run(), name="reconciler")
            # kopf looks for the kinds once, when it starts, and gives up on an API server that does not answer
            await reconciler.synced.wait()
            await kopf.operator(
                registry=registry,
                settings=_kopf_settings(),
                standalone=True,
                clusterwide=not settings.namespaces,
                namespaces=settings.namespaces,
                liveness_endpoint=host,
            )
            reconciling.cancel()
    finally:
        await reconciler.close()
        if metrics_server is not None:
            metrics_server.shutdown()


def _kopf_settings() -> kopf.OperatorSettings:
    """kopf watches; it posts no events of its own and keeps nothing on the resources."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    return settings


if __name__ == "__main__":
    raise SystemExit(main())
