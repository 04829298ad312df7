"""Images are archives that container runtimes import, the same bytes each time."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

from local import image


def _members(archive: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: member for member in tar}


def _content(archive: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.extractfile(name)
        assert member is not None
        return member.read()


def test_archive_names_its_config_and_layer_by_digest() -> None:
    archive = image.pack("example/tool:1", [image.Entry("tool", b"#!/bin/sh\n")], ["/tool", "--serve"])
    (manifest,) = json.loads(_content(archive, "manifest.json"))
    assert manifest["RepoTags"] == ["example/tool:1"]
    config = _content(archive, manifest["Config"])
    assert manifest["Config"] == hashlib.sha256(config).hexdigest() + ".json"
    layer = _content(archive, manifest["Layers"][0])
    assert json.loads(config)["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest()]
    assert json.loads(config)["config"]["Entrypoint"] == ["/tool", "--serve"]
    assert _members(layer)["tool"].mode == 0o755


def test_same_entries_give_the_same_bytes(tmp_path: Path) -> None:
    pause = tmp_path / "pause"
    pause.write_bytes(b"program")
    assert image.host_image(pause) == image.host_image(pause)


def test_host_image_has_the_folders_that_pods_mount_over(tmp_path: Path) -> None:
    pause = tmp_path / "pause"
    pause.write_bytes(b"program")
    archive = image.host_image(pause)
    (manifest,) = json.loads(_content(archive, "manifest.json"))
    members = _members(_content(archive, manifest["Layers"][0]))
    assert members["usr"].isdir()
    assert members["lib64"].linkname == "usr/lib64"
    assert members["tmp"].mode == 0o1777, "anybody may write there"


def test_host_pod_mounts_this_python_read_only() -> None:
    pod = image.host_pod()
    paths = [mount["mountPath"] for mount in pod["volumeMounts"]]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in pod["volumeMounts"]}
    assert all(mount["readOnly"] for mount in pod["volumeMounts"])
    for needed in (sys.executable, sys.prefix, sys.base_prefix, image.__file__.replace("local/image.py", "operator")):
        assert any(Path(needed).is_relative_to(path) for path in paths), needed
