"""Where a rank is: its command line, its network interface, and its copy of the model."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from clora_engine.errors import EngineError
from clora_engine.trainer_base import fingerprint
from clora_engine.trainer_place import FileMeeting, Place, PortMeeting, interface_of
from tests.numerics.tiny import tiny_model


@pytest.mark.parametrize(
    "place",
    [
        Place(threads=2),
        Place(threads=1, rank=1, processes=2, node_processes=2, meeting=FileMeeting(Path("/x/y"))),
        Place(
            threads=1,
            rank=5,
            processes=8,
            node_processes=4,
            meeting=PortMeeting("10.0.0.1", 29401, "fd00::2"),
            model="/models/a",
            spill_directory="/tmp",
        ),
    ],
)
def test_a_place_is_what_its_command_line_says(place: Place) -> None:
    parser = argparse.ArgumentParser()
    Place.add_arguments(parser)
    assert Place.of(parser.parse_args(place.arguments())) == place


def test_a_rank_has_a_number_on_its_node() -> None:
    place = Place(rank=6, processes=8, node_processes=4)
    assert (place.node, place.local_rank) == (1, 2)


def test_the_interface_of_an_address() -> None:
    assert FileMeeting(Path("/x/y")).interface() == "lo"
    assert interface_of("127.0.0.2") == interface_of("::1") == interface_of("::ffff:127.0.0.1") == "lo"
    with pytest.raises(EngineError, match=r"no network interface of this node has the address 192\.0\.2\.1"):
        PortMeeting("192.0.2.2", 1, "192.0.2.1").interface()


def test_a_fingerprint_tells_other_weights() -> None:
    model, other = tiny_model(), tiny_model()
    assert fingerprint(model) == fingerprint(other)
    assert fingerprint(model) != fingerprint(tiny_model(dtype=torch.bfloat16))
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
    assert fingerprint(model) != fingerprint(other)
