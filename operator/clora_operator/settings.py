"""The operator's settings: one frozen dataclass, filled from flags, or from CLORA_OPERATOR_* where a flag is absent.

Leaves out everything that belongs to one engine or one experiment: that is in their specs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Annotated, Any, get_args, get_type_hints

ENVIRONMENT_PREFIX = "CLORA_OPERATOR_"


class ServiceAddressing(StrEnum):
    """How the operator reaches the engines that it runs."""

    DNS = "DNS"  # by the Service's name
    CLUSTER_IP = "ClusterIP"  # by the Service's address, in clusters without DNS


class IngressPeers(str):
    """NetworkPolicyPeers, a JSON list of objects, or nothing at all. Raises ValueError for anything else, also for an
    empty list, which to Kubernetes would mean everybody."""

    __slots__ = ()
    words = "a JSON list of NetworkPolicyPeers"

    def __new__(cls, text: str = "") -> IngressPeers:
        peers = json.loads(text) if text else None
        if text and not (isinstance(peers, list) and peers and all(isinstance(peer, dict) and peer for peer in peers)):
            raise ValueError("not a list of objects")
        return super().__new__(cls, text)


NO_POLICY = IngressPeers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Field `release_deadline_seconds` is flag --release-deadline-seconds and CLORA_OPERATOR_RELEASE_DEADLINE_SECONDS.
    Times are in seconds."""

    # The namespaces to watch; none: all of them.
    namespaces: tuple[str, ...] = ()
    # Kubeconfig to use; empty: KUBECONFIG, ~/.kube/config, or the pod's ServiceAccount.
    kubeconfig: Annotated[str, "kubeconfig to use instead of the default one"] = ""
    # Where kubelet's probe and Prometheus ask; 0 turns either off (several operators on one machine).
    liveness_port: Annotated[int, "port of /healthz; 0: off"] = 8080
    metrics_port: Annotated[int, "port of /metrics; 0: off"] = 8081
    # How engines that clora runs are reached.
    service_addressing: Annotated[ServiceAddressing, "DNS, or ClusterIP in clusters without DNS"] = (
        ServiceAddressing.DNS
    )
    # Who may reach the engines that clora runs, besides kubelet: the operator itself, Prometheus.
    engine_ingress_from: Annotated[
        IngressPeers, "NetworkPolicyPeers, a JSON list, that engines may be reached from; empty: no NetworkPolicy"
    ] = NO_POLICY
    # Who may reach their tenants' port, besides the namespaces that an engine takes experiments from: an ingress.
    engine_tenants_from: Annotated[
        IngressPeers, "further NetworkPolicyPeers, a JSON list, that engines' tenants' port may be reached from"
    ] = NO_POLICY
    # Everything is looked at again this often, whatever events were missed.
    resync_seconds: Annotated[float, "time between two passes over everything"] = 60.0
    # An engine may be silent this long before anybody is told.
    unreachable_grace_seconds: Annotated[float, "silence of an engine before it counts as unreachable"] = 10.0
    # Least time between two status writes of one resource while only progress changes.
    progress_write_seconds: Annotated[float, "least time between two writes of progress"] = 5.0
    # The same while only the queue position changes.
    queue_write_seconds: Annotated[float, "least time between two writes of a queue position"] = 30.0
    # Writes that only move something, of all experiments together: many of them are written less often each, so that
    # hundreds do not load etcd. 0: no bound.
    moving_writes_per_second: Annotated[float, "most writes a second of progress and queue positions, 0: any"] = 10.0
    # A deleted experiment waits this long for its engine's last checkpoint, then its finalizer is released anyway.
    release_deadline_seconds: Annotated[float, "longest wait for an engine when an experiment is deleted"] = 120.0
    # First wait before a failed experiment is tried again; doubles with each try, up to 5 minutes.
    retry_backoff_seconds: Annotated[float, "first wait before a failed experiment is tried again"] = 10.0
    # How long an engine may hold a request that waits for news.
    poll_seconds: Annotated[float, "length of one long poll of an engine"] = 25.0
    # Resources that are worked on at the same time.
    workers: Annotated[int, "resources that are worked on at once"] = 8
    log_level: Annotated[str, "DEBUG, INFO, WARNING or ERROR"] = "INFO"

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """One flag per setting; namespaces are --namespace (repeatable) or --all-namespaces."""
        scope = parser.add_mutually_exclusive_group()
        scope.add_argument("--namespace", "-n", action="append", default=None, help="namespace to watch (repeatable)")
        scope.add_argument("--all-namespaces", "-A", action="store_true", help="watch all namespaces (the default)")
        for item in _simple_settings():
            parser.add_argument(f"--{item.name.replace('_', '-')}", default=None, help=_help(item))

    @classmethod
    def load(cls, flags: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
        """Flags win over the environment. Raises ValueError that names the setting and the value."""
        values: dict[str, Any] = {}
        for item in _simple_settings():
            text = getattr(flags, item.name)
            if text is None:
                text = environment.get(ENVIRONMENT_PREFIX + item.name.upper())
            if text is not None:
                values[item.name] = _parse(item, text)
        namespaces: Sequence[str] | None = flags.namespace
        if namespaces is None and not flags.all_namespaces:
            listed = environment.get(ENVIRONMENT_PREFIX + "NAMESPACES", "")
            namespaces = [name.strip() for name in listed.split(",") if name.strip()]
        return cls(namespaces=tuple(dict.fromkeys(namespaces or ())), **values)

    def paced(self, unfinished: int) -> Settings:
        """With so many unfinished experiments: their writes of progress and queue positions so far apart that all
        together keep to moving_writes_per_second."""
        if self.moving_writes_per_second == 0:
            return self
        apart = unfinished / self.moving_writes_per_second
        return replace(
            self,
            progress_write_seconds=max(self.progress_write_seconds, apart),
            queue_write_seconds=max(self.queue_write_seconds, apart),
        )

    def watches(self, namespace: str) -> bool:
        return not self.namespaces or namespace in self.namespaces


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    kind: type
    default: Any
    help: str


def _simple_settings() -> list[_Setting]:
    """All settings but the namespaces."""
    hints = get_type_hints(Settings, include_extras=True)
    parts = {item.name: (get_args(hints[item.name]), item.default) for item in fields(Settings)}
    return [
        _Setting(name, kind[0], default, kind[1]) for name, (kind, default) in parts.items() if name != "namespaces"
    ]


def _help(item: _Setting) -> str:
    return f"{item.help} (default {item.default})" if item.default != "" else item.help


def _parse(item: _Setting, text: str) -> Any:
    try:
        value = item.kind(text)
        if isinstance(value, int | float) and not 0 <= value < 1e9:
            raise ValueError("out of range")
    except ValueError as error:
        if issubclass(item.kind, StrEnum):
            words = ", ".join(item.kind)
        else:
            words = getattr(item.kind, "words", f"{item.kind.__name__}, 0 or more")
        raise ValueError(f"setting {item.name} cannot be {text!r}; it takes {words}") from error
    return value
