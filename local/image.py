"""Container images from folders, without builder or registry, and the image whose pods see this machine's programs.

`host` is an image of empty folders. A pod on the local node mounts the machine's /usr, its Python and the virtual
environment read-only over them, so that clora runs in real pods without an image of several gigabytes:

    python -m local.image            prints the volumes, mounts and PATH of such a pod as JSON

Left out: layers, registries, other architectures than this machine's.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local.cache import REPOSITORY

PAUSE = "clora.local/pause:1"
HOST = "clora.local/host:1"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USERS = "root:x:0:0:root:/root:/bin/sh\nclora:x:65532:65532::/tmp:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
MERGED_USR = ("bin", "sbin", "lib", "lib64")


@dataclass(frozen=True)
class Entry:
    """One file, folder or symbolic link of an image. Content None makes a folder; `link` a symbolic link."""

    path: str
    content: bytes | None = None
    mode: int = 0o755
    link: str | None = None


def pack(reference: str, entries: Sequence[Entry], entrypoint: Sequence[str]) -> bytes:
    """A `docker save` archive of one layer, the same bytes for the same entries."""
    layer = _tar(entries)
    layer_digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": ARCHITECTURES[os.uname().machine],
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint), "Env": [f"PATH={SYSTEM_PATH}"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
    }
    config_bytes = json.dumps(config).encode()
    config_name = hashlib.sha256(config_bytes).hexdigest() + ".json"
    layer_name = f"{layer_digest}/layer.tar"
    manifest = [{"Config": config_name, "RepoTags": [reference], "Layers": [layer_name]}]
    return _tar(
        [
            Entry(config_name, config_bytes, 0o644),
            Entry(layer_name, layer, 0o644),
            Entry("manifest.json", json.dumps(manifest).encode(), 0o644),
        ]
    )


def pause_image(pause: Path) -> bytes:
    """What holds a pod's namespaces."""
    return pack(PAUSE, [Entry("pause", pause.read_bytes())], ["/pause"])


def host_image(pause: Path) -> bytes:
    """Mount points for a machine with merged /usr (Debian 12 and later, and its relatives); does nothing by itself."""
    folders = ["etc", "root", "usr", "var", "run", "proc", "sys", "dev", "opt"]
    return pack(
        HOST,
        [
            *(Entry(name) for name in folders),
            *(Entry(name, mode=0o1777) for name in ("tmp", "var/tmp")),
            *(Entry(name, link=f"usr/{name}") for name in MERGED_USR),
            Entry("etc/passwd", USERS.encode(), 0o644),
            Entry("pause", pause.read_bytes()),
        ],
        ["/pause"],
    )


def host_pod() -> dict[str, Any]:
    """Parts of a pod of the `host` image: `volumes`, `volumeMounts` and `env`, for the Python that runs this.

    The repository's packages are mounted too, since an editable environment refers to them.
    """
    python = [Path(sys.base_prefix), Path(sys.prefix)]
    packages = [REPOSITORY / name for name in ("operator", "engine", "crds")]
    outside_usr = [path for path in dict.fromkeys([*python, *packages]) if not path.is_relative_to("/usr")]
    paths = {f"host-{number}": str(path) for number, path in enumerate([Path("/usr"), *outside_usr])}
    return {
        "volumes": [{"name": name, "hostPath": {"path": path, "type": "Directory"}} for name, path in paths.items()],
        "volumeMounts": [{"name": name, "mountPath": path, "readOnly": True} for name, path in paths.items()],
        "env": [{"name": "PATH", "value": f"{Path(sys.prefix) / 'bin'}:{SYSTEM_PATH}"}],
    }


def _tar(entries: Sequence[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry in entries:
            member = tarfile.TarInfo(entry.path)  # owner root, time 0
            member.mode = entry.mode
            if entry.link is not None:
                member.type, member.linkname = tarfile.SYMTYPE, entry.link
            elif entry.content is None:
                member.type = tarfile.DIRTYPE
            else:
                member.size = len(entry.content)
            archive.addfile(member, io.BytesIO(entry.content or b""))
    return buffer.getvalue()


if __name__ == "__main__":
    print(json.dumps(host_pod(), indent=1))
