"""Certificates say who their holder is, are signed by the cluster's own authority, and are for their owner's eyes."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from local import pki

CLIENTS = [pki.ADMIN, pki.node_client("node-7")]


def _certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def _subject(certificate: x509.Certificate, oid: x509.ObjectIdentifier) -> list[str | bytes]:
    return [attribute.value for attribute in certificate.subject.get_attributes_for_oid(oid)]


def test_clients_are_users_of_groups_and_signed_by_the_authority(tmp_path: Path) -> None:
    pki.create(tmp_path, CLIENTS, ["127.0.0.1"])
    authority = _certificate(tmp_path / "ca.crt")
    for name, user, group in (("admin", "admin", "system:masters"), ("kubelet", "system:node:node-7", "system:nodes")):
        certificate = _certificate(tmp_path / f"{name}.crt")
        certificate.verify_directly_issued_by(authority)
        assert _subject(certificate, NameOID.COMMON_NAME) == [user]
        assert _subject(certificate, NameOID.ORGANIZATION_NAME) == [group]
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH], "a client cannot pose as the API server"


def test_server_is_valid_for_its_addresses_and_in_cluster_names(tmp_path: Path) -> None:
    pki.create(tmp_path, CLIENTS, ["127.0.0.1", "10.96.0.1"])
    certificate = _certificate(tmp_path / "apiserver.crt")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "10.96.0.1"]
    assert "kubernetes.default.svc" in names.get_values_for_type(x509.DNSName)


def test_nothing_is_readable_by_others_and_a_second_call_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    pki.create(folder, CLIENTS, ["127.0.0.1"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    pki.create(folder, CLIENTS, ["127.0.0.1"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_an_interrupted_creation_starts_over(tmp_path: Path) -> None:
    pki.create(tmp_path, CLIENTS, ["127.0.0.1"])
    (tmp_path / "complete").unlink()
    (tmp_path / "admin.crt").unlink()
    pki.create(tmp_path, CLIENTS, ["127.0.0.1"])
    _certificate(tmp_path / "admin.crt").verify_directly_issued_by(_certificate(tmp_path / "ca.crt"))


def test_kubeconfig_holds_all_it_needs_with_mode_0600(tmp_path: Path) -> None:
    pki.create(tmp_path, CLIENTS, ["127.0.0.1"])
    target = tmp_path / "admin.kubeconfig"
    target.write_text("{}")
    target.chmod(0o644)
    pki.write_kubeconfig(tmp_path, "admin", "https://127.0.0.1:1234", target)
    config = json.loads(target.read_bytes())
    assert config["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:1234"
    assert str(tmp_path) not in target.read_text(), "no path: the file can be moved"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
