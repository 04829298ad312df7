"""Dynamic volumes of the local node: a folder for every claim of the storage class `standard`.

A small control loop inside the node. It makes `local` volumes, not `hostPath` ones as Kubernetes' built-in
provisioner does: only those get the pod's fsGroup, without which a pod that is not root cannot write. Sizes are not
enforced.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

from local import node_config
from local.api import Client

CLASS = "standard"
POLL_SECONDS = 0.5
VOLUMES = "/api/v1/persistentvolumes"

STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": "clora.dev/local-folder",
    "volumeBindingMode": "Immediate",
    "reclaimPolicy": "Delete",
}


def volume_for(claim: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The volume of one claim, already bound to it; `folder` is where volumes are kept on the node."""
    metadata, spec = claim["metadata"], claim["spec"]
    reference = {key: metadata[key] for key in ("namespace", "name", "uid")}
    on_this_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node_config.NODE]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"pvc-{metadata['uid']}"},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "storageClassName": CLASS,
            # Not Delete: Kubernetes would look for a plugin that can. This loop deletes what was released.
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **reference},
            "local": {"path": str(folder / f"pvc-{metadata['uid']}")},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_this_node]}]}},
        },
    }


def reconcile(client: Client, folder: Path) -> None:
    """One pass: a folder and a volume for each new claim; both gone for each released volume."""
    volumes = {volume["metadata"]["name"]: volume for volume in client.get(VOLUMES)["items"]}
    for claim in client.get("/api/v1/persistentvolumeclaims")["items"]:
        name = f"pvc-{claim['metadata']['uid']}"
        if (
            claim["spec"].get("storageClassName") == CLASS
            and claim["status"]["phase"] == "Pending"
            and name not in volumes
        ):
            (folder / name).mkdir(exist_ok=True)
            client.post(VOLUMES, volume_for(claim, folder))
    for name, volume in volumes.items():
        if volume["spec"].get("storageClassName") == CLASS and volume["status"].get("phase") == "Released":
            client.delete(f"{VOLUMES}/{name}")
            shutil.rmtree(folder / name, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m local.volumes")
    parser.add_argument("--dir", type=Path, required=True, help="of the node")
    options = parser.parse_args()
    folder = options.dir / "volumes"
    folder.mkdir(exist_ok=True)
    client = Client(node_config.NODE_IP, node_config.PORT, options.dir / "pki")
    while True:
        try:
            reconcile(client, folder)
        except OSError as error:  # the API server restarts, or an object changed under us: the next pass sees it
            print(f"tried again: {error}", flush=True)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
