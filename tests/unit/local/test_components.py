"""Command lines: what differs between the control plane alone and the node, and what must never differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from local import components, node_config

LOOPBACK = components.Site(Path("/c"), Path("/bin/kubebox"), "127.0.0.1", "127.0.0.1", 6000)
NODE = components.Site(Path("/c"), Path("/bin/kubebox"), "0.0.0.0", node_config.NODE_IP, node_config.PORT)


@pytest.mark.parametrize("site", [LOOPBACK, NODE])
def test_every_request_is_authenticated_and_authorized(site: components.Site) -> None:
    command = components.apiserver(site)
    assert "--anonymous-auth=false" in command
    assert "--authorization-mode=Node,RBAC" in command


def test_etcd_has_no_port() -> None:
    addresses = [flag for flag in components.etcd(LOOPBACK) if "url" in flag or "cluster=" in flag]
    assert len(addresses) == 5
    assert all("unix://" in flag and "http" not in flag for flag in addresses)


def test_loopback_is_not_advertised() -> None:
    assert "--endpoint-reconciler-type=none" in components.apiserver(LOOPBACK)
    assert f"--advertise-address={node_config.NODE_IP}" in components.apiserver(NODE)


def test_audit_log_is_written_only_on_request() -> None:
    assert not any("audit" in flag for flag in components.apiserver(LOOPBACK))
    audited = components.Site(Path("/c"), Path("/bin/kubebox"), "127.0.0.1", "127.0.0.1", 6000, audit=True)
    assert f"--audit-log-path={audited.audit_log}" in components.apiserver(audited)
