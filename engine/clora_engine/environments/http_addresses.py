"""Which hosts and addresses an engine talks to on behalf of tenants.

Two lists decide. Hosts by name: only those that the engine's owner allows. Addresses: never the engine's own, those of
the trainer's other nodes, loopback, link-local and metadata addresses, or that of the Kubernetes API server's Service,
whatever name leads there.
(A Service of the engine's, and the API server's own address behind its Service, are for the list of hosts and for a
NetworkPolicy.) Names are resolved first, every address is checked, and the connection goes to a checked address, so
that a name that changes its address in between (DNS rebinding) gains nothing. Private networks are not refused: that is
where a cluster's services are.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult

from clora_engine.errors import TransientError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Those beyond 169.254.0.0/16, which is refused as a whole: Azure, Alibaba, Oracle, AWS and Google over IPv6.
METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in ("168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254")
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*", re.ASCII)
_PATTERN = re.compile(r"(\*\.)?([a-z0-9]([-a-z0-9.]*[a-z0-9])?)(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """`*.` before a name allows all names below it, not the name itself; without a port, every port."""

    name: str
    below: bool
    port: int | None

    @classmethod
    def parse(cls, text: str) -> AllowedHost:
        """`grader.team.svc`, `grader.team.svc:8000` or `*.team.svc`. Raises ValueError."""
        match = _PATTERN.fullmatch(text)
        if match is None or (match[4] and not 0 < int(match[4]) < 65536):
            raise ValueError(f"{text!r} is no host: write grader.team.svc, grader.team.svc:8000 or *.team.svc")
        return cls(match[2], bool(match[1]), int(match[4]) if match[4] else None)

    def allows(self, host: str, port: int) -> bool:
        if self.port is not None and port != self.port:
            return False
        return host.endswith(f".{self.name}") if self.below else host == self.name


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """`forbidden`: further addresses that nobody may reach, and what each is. `loopback`: 127.0.0.0/8 and ::1 are
    allowed, for development on one machine."""

    hosts: tuple[AllowedHost, ...] = ()
    loopback: bool = False
    forbidden: Mapping[IPAddress, str] = field(default_factory=dict)

    def allows(self, url: SplitResult) -> bool:
        """Whether the host of an http or https URL is on the list."""
        host = (url.hostname or "").removesuffix(".")
        port = url.port or (443 if url.scheme == "https" else 80)
        return any(allowed.allows(host, port) for allowed in self.hosts)

    def refusal(self, address: str) -> str | None:
        """Why nobody may connect to an address; None if one may."""
        found = _address(address)
        if found.is_loopback:
            return None if self.loopback else "is a loopback address"
        if found.is_link_local:
            return "is a link-local address"
        if found in METADATA:
            return "is a cloud's metadata address"
        if found in self.forbidden:
            return f"is the address of {self.forbidden[found]}"
        if found.is_unspecified or found.is_multicast or found.is_reserved:
            return "is no address of a host"
        if _is_own(found):
            return "is the engine's own address"
        return None


def is_host(text: str) -> bool:
    """Whether it is a DNS name (labels of 1 to 63 letters, digits and hyphens, 253 in all) or an IP address."""
    if _NAME.fullmatch(text.removesuffix(".")):
        return True
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def policy(
    hosts: Sequence[str], *, loopback: bool, nodes: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> HostPolicy:
    """The policy of an engine; nodes: addresses of its trainer's other nodes. In a pod, KUBERNETES_SERVICE_HOST tells
    where the API server's Service is. Raises ValueError for what is no host, TransientError when that Service has no
    address: nothing is then reached."""
    forbidden = dict.fromkeys(map(_address, nodes), "one of the engine's nodes")
    server = environ.get("KUBERNETES_SERVICE_HOST")
    if hosts and server:  # without hosts no address is reached anyway
        forbidden |= dict.fromkeys(map(_address, _resolve(server)), "the Kubernetes API server's Service")
    return HostPolicy(tuple(AllowedHost.parse(host) for host in hosts), loopback, forbidden)


def _resolve(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        raise TransientError(
            f"KUBERNETES_SERVICE_HOST {host} has no address, so that it cannot be kept apart"
        ) from None


def _address(text: str) -> IPAddress:
    return _unwrapped(ipaddress.ip_address(text))


def _unwrapped(address: IPAddress) -> IPAddress:
    """The IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    inner = address.ipv4_mapped or address.sixtofour
    if inner is not None:
        return inner
    return address.teredo[1] if address.teredo else address


def _is_own(address: IPAddress) -> bool:
    """Whether this machine has the address: the kernel then answers from that very address. Nothing is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return bool(ipaddress.ip_address(probe.getsockname()[0]) == address)
    except OSError:  # no way there
        return False
