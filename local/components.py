"""The command line of every part of Kubernetes. Pure: nothing is started here.

Both the control plane alone (loopback, no root) and the one with a node are made of these; they differ in addresses
only. etcd listens on Unix sockets in its own folder: no port to collide with, and no other user of the machine can
write the cluster's state past the API server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SERVICE_CIDR = "10.96.0.0/16"
FIRST_SERVICE_IP = "10.96.0.1"
POD_CIDR = "10.244.0.0/24"
# Relative to the folder of the cluster, which is every component's working directory: a socket's path is limited to
# 107 bytes, a folder's is not. etcd wants a port in every address, even a socket's.
ETCD_SOCKET = "unix://etcd.sock:0"
PEER_SOCKET = "unix://peer.sock:0"


@dataclass(frozen=True)
class Site:
    """Where one cluster lives. `folder` holds pki/, etcd/, log/ and the kubeconfigs."""

    folder: Path
    kubebox: Path
    bind_address: str
    advertise_address: str
    port: int
    audit: bool = False

    @property
    def server(self) -> str:
        return f"https://{self.advertise_address}:{self.port}"

    @property
    def audit_log(self) -> Path:
        return self.folder / "log" / "audit.jsonl"

    def kubeconfig(self, client: str) -> Path:
        return self.folder / f"{client}.kubeconfig"

    def pki(self, name: str) -> str:
        return str(self.folder / "pki" / name)


# One line a request, once its answer is out: every write, and what pods' accounts read, by which one sees what an
# account needs and was refused.
_WRITES = ["create", "update", "patch", "delete", "deletecollection"]
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "RequestResponse", "verbs": _WRITES, "resources": [{"group": "clora.dev"}]},
        {"level": "Metadata", "verbs": _WRITES},
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},  # Kubernetes' own controllers
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


def etcd(site: Site) -> list[str]:
    return [
        *(str(site.kubebox), "etcd"),
        "--data-dir=etcd",
        f"--listen-client-urls={ETCD_SOCKET}",
        f"--advertise-client-urls={ETCD_SOCKET}",
        f"--listen-peer-urls={PEER_SOCKET}",
        f"--initial-advertise-peer-urls={PEER_SOCKET}",
        f"--initial-cluster=default={PEER_SOCKET}",
        "--unsafe-no-fsync",  # a machine that loses power loses a test cluster
        "--log-level=warn",
    ]


def apiserver(site: Site) -> list[str]:
    loopback = site.advertise_address.startswith("127.")
    audit = [
        f"--audit-policy-file={site.folder / 'audit-policy.json'}",
        f"--audit-log-path={site.audit_log}",
        "--audit-log-mode=blocking",  # a request that was answered is in the log
    ]
    return [
        *(str(site.kubebox), "kube-apiserver"),
        f"--etcd-servers={ETCD_SOCKET}",
        f"--bind-address={site.bind_address}",
        f"--secure-port={site.port}",
        # Endpoints of the `kubernetes` service may not be loopback; without pods nobody reads them.
        *(["--endpoint-reconciler-type=none"] if loopback else [f"--advertise-address={site.advertise_address}"]),
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--anonymous-auth=false",
        "--allow-privileged=true",
        f"--client-ca-file={site.pki('ca.crt')}",
        f"--tls-cert-file={site.pki('apiserver.crt')}",
        f"--tls-private-key-file={site.pki('apiserver.key')}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={site.pki('sa.pub')}",
        f"--service-account-signing-key-file={site.pki('sa.key')}",
        f"--kubelet-client-certificate={site.pki('admin.crt')}",
        f"--kubelet-client-key={site.pki('admin.key')}",
        "--kubelet-preferred-address-types=InternalIP",
        *(audit if site.audit else []),
    ]


def _controller_flags(site: Site, client: str) -> list[str]:
    kubeconfig = site.kubeconfig(client)
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",  # there is one of each
        "--secure-port=0",  # nobody reads their own metrics: no port to collide with
    ]


def controller_manager(site: Site) -> list[str]:
    return [
        *(str(site.kubebox), "kube-controller-manager"),
        *_controller_flags(site, "controller-manager"),
        f"--service-account-private-key-file={site.pki('sa.key')}",
        f"--root-ca-file={site.pki('ca.crt')}",
        f"--cluster-signing-cert-file={site.pki('ca.crt')}",
        f"--cluster-signing-key-file={site.pki('ca.key')}",
        "--use-service-account-credentials",
        # Controllers of clouds and of node address ranges have nothing to do here.
        "--controllers=*,-nodeipam,-node-route-controller,-service-lb-controller,-cloud-node-lifecycle-controller",
    ]


def scheduler(site: Site) -> list[str]:
    return [str(site.kubebox), "kube-scheduler", *_controller_flags(site, "scheduler")]


def kubelet(site: Site, node: str) -> list[str]:
    return [
        *(str(site.kubebox), "kubelet"),
        f"--config={site.folder / 'kubelet.json'}",
        f"--kubeconfig={site.kubeconfig('kubelet')}",
        f"--hostname-override={node}",
        f"--node-ip={site.advertise_address}",
        f"--root-dir={site.folder / 'kubelet'}",
    ]


def proxy(site: Site, node: str) -> list[str]:
    return [
        *(str(site.kubebox), "kube-proxy"),
        f"--kubeconfig={site.kubeconfig('proxy')}",
        f"--hostname-override={node}",
        f"--cluster-cidr={POD_CIDR}",
        "--proxy-mode=iptables",
        # The limits of connection tracking are the whole machine's: leave them.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        "--healthz-bind-address=127.0.0.1",
        "--metrics-bind-address=127.0.0.1",
    ]
