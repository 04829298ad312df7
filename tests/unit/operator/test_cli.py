"""The command line's own parts: safe unpacking, the lines of `watch`."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from clora_operator.cli import CliError, extract
from clora_operator.cli_watch import describe
from tests.unit.operator.factories import claimed, condition, experiment, running


def tar_of(*members: tarfile.TarInfo) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return io.BytesIO(buffer.getvalue())


def plain(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = 3
    return member


def link(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return member


def folder(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = tarfile.DIRTYPE
    return member


def test_plain_files_are_unpacked(tmp_path: Path) -> None:
    into = tmp_path / "adapter"
    into.mkdir()
    assert extract(tar_of(plain("adapter_config.json"), plain("w.safetensors")), into) == [
        "adapter_config.json",
        "w.safetensors",
    ]
    assert (into / "w.safetensors").read_bytes() == b"xxx"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("make", [plain, link, folder])
@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/b", ".."])
def test_anything_else_is_refused_and_leaves_nothing(
    tmp_path: Path, make: Callable[[str], tarfile.TarInfo], name: str
) -> None:
    into = tmp_path / "adapter"
    into.mkdir()
    with pytest.raises(CliError, match="no plain file name"):
        extract(tar_of(plain("fine"), make(name)), into)
    assert list(into.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_link_with_a_plain_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError):
        extract(tar_of(link("adapter_config.json")), tmp_path)


def test_a_tree_is_unpacked(tmp_path: Path) -> None:
    into = tmp_path / "tracking"
    into.mkdir()
    names = extract(tar_of(folder("a"), folder("a/.b c"), plain("a/.b c/d.e"), plain("f")), into, tree=True)
    assert names == ["a", "f"]
    assert (into / "a" / ".b c" / "d.e").read_bytes() == b"xxx"


@pytest.mark.parametrize("make", [plain, folder])
@pytest.mark.parametrize(
    "name",
    ["../out", "/etc/out", "..", "a/../../out", "a/..", "a//b", "a\\b", "a/\x1b[2J", "\x9b2J", "a\u202eb", "\udcff"],
)
def test_a_tree_leaves_its_folder_nowhere(tmp_path: Path, make: Callable[[str], tarfile.TarInfo], name: str) -> None:
    into = tmp_path / "tracking"
    into.mkdir()
    with pytest.raises(CliError, match="no plain file or folder"):
        extract(tar_of(plain("fine"), make(name)), into, tree=True)
    assert list(into.iterdir()) == []
    with pytest.raises(CliError, match="no plain file or folder"):
        extract(tar_of(link("fine")), into, tree=True)


def test_what_is_no_tar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="no tar"):
        extract(io.BytesIO(b"not a tar" * 100), tmp_path)


def test_lines_say_why() -> None:
    assert describe(experiment(status=running())) == "one  Running  step 0/10"
    queued = condition("Attached", "False", "Queued", message="place 1")
    assert describe(experiment(status=claimed(queued))) == "one  Queued  step 0/10  place 1"
    refused = condition("Accepted", "False", "InvalidSpec", message="spec.x: no")
    assert describe(experiment(status=claimed(refused))) == "one  Pending  step 0/10  spec.x: no"
