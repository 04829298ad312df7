"""Ports that are given out are free, at every address, and so are those that follow, where several are asked for."""

from __future__ import annotations

import random
import socket

import pytest

from local.control_plane import free_port


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_port_whose_next_one_is_taken_is_not_given_out_for_two(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port(3) + 1
    order = [taken - 1, taken, taken + 1]
    monkeypatch.setattr(random, "shuffle", lambda ports: ports.__setitem__(slice(None), order))
    with socket.socket() as listener:
        listener.bind((address, taken))
        listener.listen()
        assert free_port() == taken - 1
        assert free_port(2) == taken + 1
