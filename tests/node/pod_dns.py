"""Names of pods, as a cluster's DNS has them by headless Services: HOSTNAME.SUBDOMAIN.NAMESPACE.svc.cluster.local.

For the local node, which has no DNS. It listens at this machine's address, asks the API server at every question, and
knows IPv4 alone.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kubernetes import client

DOMAIN = "svc.cluster.local"
_A, _NO_ERROR, _NO_NAME = 1, 0, 3


@contextmanager
def pod_dns(kube: client.ApiClient, address: str) -> Iterator[None]:
    """Answers at `address`, port 53, until the end of the block."""
    core = client.CoreV1Api(kube)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        server.settimeout(0.2)
        ended = threading.Event()
        thread = threading.Thread(target=_serve, args=(server, core, ended))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def pod_dns_config(namespace: str, address: str) -> dict[str, object]:
    """Of a pod, whose cluster's DNS this is."""
    config = {
        "nameservers": [address],
        "searches": [f"{namespace}.{DOMAIN}", DOMAIN, "cluster.local"],
        "options": [{"name": "ndots", "value": "5"}],
    }
    return {"dnsPolicy": "None", "dnsConfig": config}


def _serve(server: socket.socket, core: client.CoreV1Api, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            question, asker = server.recvfrom(512)
        except TimeoutError:
            continue
        server.sendto(_answer(core, question), asker)


def _answer(core: client.CoreV1Api, question: bytes) -> bytes:
    labels, at = [], 12
    while length := question[at]:
        labels.append(question[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    kind, _ = struct.unpack("!HH", question[at + 1 : at + 5])
    asked = question[12 : at + 5]
    address = _address(core, ".".join(labels))
    answers = [address] if address and kind == _A else []
    code = _NO_ERROR if address else _NO_NAME
    head = question[:2] + struct.pack("!HHHHH", 0x8580 | code, 1, len(answers), 0, 0)
    # a pointer to the name asked for; class IN, five seconds
    records = [b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, 5, 4) + socket.inet_aton(one) for one in answers]
    return head + asked + b"".join(records)


def _address(core: client.CoreV1Api, name: str) -> str | None:
    if not name.endswith(f".{DOMAIN}") or name.removesuffix(f".{DOMAIN}").count(".") != 2:
        return None
    hostname, subdomain, namespace = name.removesuffix(f".{DOMAIN}").split(".")
    for pod in core.list_namespaced_pod(namespace).items:
        if (pod.spec.hostname, pod.spec.subdomain) == (hostname, subdomain) and pod.status.pod_ip:
            return str(pod.status.pod_ip)
    return None
