"""The certificates and kubeconfigs of one local cluster.

One authority signs one serving certificate for the API server and one client certificate for every component; who a
client is stands in its subject (common name = user, organization = group). Keys are EC P-256 and never leave the
folder, which only its owner can read. Left out: rotation. Certificates live as long as such a cluster can: ten years.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_FOR = timedelta(days=3650)
# kubernetes.default and the first address of the service range are how pods name the API server.
SERVER_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


@dataclass(frozen=True)
class Client:
    """One client certificate and kubeconfig; `name` is the file's stem."""

    name: str
    user: str
    group: str | None = None


ADMIN = Client("admin", "admin", "system:masters")
CONTROLLER_MANAGER = Client("controller-manager", "system:kube-controller-manager")
SCHEDULER = Client("scheduler", "system:kube-scheduler")
PROXY = Client("proxy", "system:kube-proxy")


def node_client(node: str) -> Client:
    return Client("kubelet", f"system:node:{node}", "system:nodes")


def create(folder: Path, clients: Sequence[Client], addresses: Sequence[str]) -> None:
    """Writes `ca`, `apiserver` and one pair a client (`.crt`, `.key`) and the key of service accounts (`sa`).

    `addresses` are the IPv4 addresses by which the API server is reached. What is there already is kept as it is.
    """
    if (folder / "complete").exists():
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = _name("clora-local-authority")
    authority = _certificate(authority_name, authority_name, authority_key.public_key(), is_authority=True).sign(
        authority_key, hashes.SHA256()
    )
    _write_pair(folder, "ca", authority_key, authority)

    def issue(stem: str, subject: x509.Name, *extensions: x509.ExtensionType) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _certificate(subject, authority_name, key.public_key(), is_authority=False)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        _write_pair(folder, stem, key, builder.sign(authority_key, hashes.SHA256()))

    names = [x509.DNSName(name) for name in SERVER_NAMES]
    ips = [x509.IPAddress(IPv4Address(address)) for address in addresses]
    serving = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    issue("apiserver", _name("kube-apiserver"), x509.SubjectAlternativeName([*names, *ips]), serving)
    for client in clients:
        issue(client.name, _name(client.user, client.group), x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]))

    accounts = ec.generate_private_key(ec.SECP256R1())
    write_private(folder / "sa.key", _private_pem(accounts))
    public = accounts.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    write_private(folder / "sa.pub", public)
    write_private(folder / "complete", b"")


def write_kubeconfig(folder: Path, client: str, server: str, target: Path) -> None:
    """Writes a self-contained kubeconfig (JSON, which is YAML) with mode 0600."""

    def encoded(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    credentials = {
        "client-certificate-data": encoded(f"{client}.crt"),
        "client-key-data": encoded(f"{client}.key"),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "clora-local", "cluster": {"server": server, "certificate-authority-data": encoded("ca.crt")}}
        ],
        "users": [{"name": client, "user": credentials}],
        "contexts": [{"name": "clora-local", "context": {"cluster": "clora-local", "user": client}}],
        "current-context": "clora-local",
    }
    write_private(target, json.dumps(config, indent=1).encode())


def write_private(path: Path, content: bytes) -> None:
    """Replaces `path` by `content` in one step; it never exists with wider permissions than 0600."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
        handle.write(content)
    partial.replace(path)


def _name(common_name: str, organization: str | None = None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, is_authority: bool
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of one machine may still be set back
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )


def _write_pair(folder: Path, stem: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    write_private(folder / f"{stem}.key", _private_pem(key))
    write_private(folder / f"{stem}.crt", certificate.public_bytes(serialization.Encoding.PEM))


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
