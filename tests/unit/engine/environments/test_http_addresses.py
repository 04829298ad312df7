"""Which hosts are allowed, and which addresses never are."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest

from clora_engine.environments.http_addresses import AllowedHost, HostPolicy, is_host, policy
from clora_engine.errors import TransientError


@pytest.mark.parametrize(
    ("pattern", "url", "allowed"),
    [
        ("grader.team.svc", "http://grader.team.svc", True),
        ("grader.team.svc", "http://GRADER.team.svc:8000/path", True),
        ("grader.team.svc", "http://grader.team.svc.", True),
        ("grader.team.svc", "http://grader.team.svc.example.com", False),
        ("grader.team.svc", "http://x.grader.team.svc", False),
        ("grader.team.svc:8000", "http://grader.team.svc:8000", True),
        ("grader.team.svc:8000", "http://grader.team.svc:8001", False),
        ("grader.team.svc:443", "https://grader.team.svc", True),
        ("grader.team.svc:443", "http://grader.team.svc", False),
        ("*.team.svc", "http://grader.team.svc", True),
        ("*.team.svc", "http://a.b.team.svc", True),
        ("*.team.svc", "http://team.svc", False),
        ("*.team.svc", "http://steam.svc", False),
        ("*.team.svc:80", "http://a.team.svc", True),
    ],
)
def test_hosts(pattern: str, url: str, allowed: bool) -> None:
    assert HostPolicy((AllowedHost.parse(pattern),)).allows(urlsplit(url)) is allowed


def test_without_a_list_no_host_is_allowed() -> None:
    assert not HostPolicy().allows(urlsplit("http://grader.team.svc"))


@pytest.mark.parametrize(
    "text", ["", "*", "*.", "http://a", "a/b", "a:0", "a:99999", "a:", "A.svc", "a b", "[::1]", "-a"]
)
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        AllowedHost.parse(text)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", "loopback"),
        ("127.8.8.8", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("64:ff9b::7f00:1", "loopback"),
        ("2002:7f00:1::", "loopback"),
        ("169.254.169.254", "link-local"),
        ("::ffff:169.254.169.254", "link-local"),
        ("fe80::1", "link-local"),
        ("fe80::1%lo", "link-local"),
        ("168.63.129.16", "metadata"),
        ("100.100.100.200", "metadata"),
        ("192.0.0.192", "metadata"),
        ("fd00:ec2::254", "metadata"),
        ("0.0.0.0", "no address of a host"),
        ("::", "no address of a host"),
        ("224.0.0.1", "no address of a host"),
        ("255.255.255.255", "no address of a host"),
        ("ff02::1", "no address of a host"),
        ("10.96.0.1", "API server"),
        ("::ffff:10.96.0.1", "API server"),
        ("10.244.1.7", "one of the engine's nodes"),
        ("::ffff:10.244.1.7", "one of the engine's nodes"),
    ],
)
def test_addresses_that_are_refused(address: str, why: str) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    refusal = policy(["a"], loopback=False, nodes=["10.244.1.7"], environ=environ).refusal(address)
    assert refusal is not None
    assert why in refusal


@pytest.mark.parametrize("address", ["10.96.0.2", "192.168.1.9", "93.184.216.34", "fd12:3456::1", "2606:4700::1111"])
def test_addresses_of_others_are_not(address: str) -> None:
    assert policy([], loopback=False, environ={}).refusal(address) is None


def test_loopback_is_for_those_who_say_so() -> None:
    lenient = policy(["localhost"], loopback=True, environ={})
    assert lenient.refusal("127.0.0.1") is None
    assert lenient.refusal("::1") is None
    assert lenient.refusal("169.254.169.254") is not None


def test_the_engines_own_address_is_refused() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but the loopback")
        own = probe.getsockname()[0]
    assert policy([], loopback=True, environ={}).refusal(own) == "is the engine's own address"


@pytest.mark.parametrize("host", ["a..svc", "no-such-name.invalid"])
def test_an_api_server_that_cannot_be_kept_apart_closes_everything(host: str) -> None:
    with pytest.raises(TransientError, match="has no address, so that it cannot be kept apart"):
        policy(["a.svc"], loopback=False, environ={"KUBERNETES_SERVICE_HOST": host})
    assert not policy([], loopback=False, environ={"KUBERNETES_SERVICE_HOST": host}).allows(urlsplit("http://a.svc"))


@pytest.mark.parametrize("host", ["a", "a.svc.", "a-b.c1", "x" * 63 + ".svc", "10.1.2.3", "::1"])
def test_names_of_hosts(host: str) -> None:
    assert is_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        ".",
        "a..svc",
        "a.svc..",
        "x" * 64 + ".svc",
        "a." * 127 + "b.",
        "a\\.svc",
        "a b.svc",
        "a%00.svc",
        "a;b",
        "*.svc",
        "-a.svc",
        "a-.svc",
        "a_b.svc",
        "a.svc\n",
    ],
)
def test_what_is_no_name_of_a_host(host: str) -> None:
    assert not is_host(host)
