"""An engine with the real vLLM in pods that mount this machine's Python, and what it trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client

from local import image
from local.cache import REPOSITORY

BIN = Path(sys.prefix) / "bin"


def model_volume(folder: Path, name: str = "model") -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "by-hand",
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }


def model_claim(volume: str = "model") -> dict[str, Any]:
    spec = {
        "volumeName": volume,
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "by-hand",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    return {"metadata": {"name": "model"}, "spec": spec}


def stored(core: client.CoreV1Api, namespace: str, claim: str) -> Path:
    """Where the node keeps the claim's volume."""
    volume = core.read_namespaced_persistent_volume_claim(claim, namespace).spec.volume_name
    source = core.read_persistent_volume(volume).spec
    return Path((source.local or source.host_path).path)


def engine_manifest(model_name: str) -> dict[str, Any]:
    host = image.host_pod()
    container = {
        "name": "engine",
        "imagePullPolicy": "Never",
        "command": [str(BIN / "clora-engine")],
        "env": host["env"],
        "volumeMounts": host["volumeMounts"],
    }
    return {
        "apiVersion": "clora.dev/v1alpha1",
        "kind": "LoRAEngine",
        "metadata": {"name": "local"},
        "spec": {
            "image": image.HOST,
            "model": {"name": model_name, "claimName": "model"},
            "capacity": {"maxExperiments": 2, "maxRank": 16},
            "sampler": {
                "gpus": 0,
                "dataParallelSize": 1,
                "maxModelLen": 1024,
                "maxNumSeqs": 32,
                "kvCacheMemory": "1Gi",
            },
            # one slot: nothing to measure at each start
            "trainer": {"gpus": 0, "tokensPerMicrobatch": 3000, "slots": 1},
            "storage": {"size": "2Gi"},
            "resources": {"requests": {"memory": "3Gi"}, "limits": {"memory": "8Gi"}},
            "podTemplate": {"spec": {"containers": [container], "volumes": host["volumes"]}},
        },
    }


def experiment(name: str, steps: int) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples" / "demo" / "warm-up.yaml").read_text())
    body["metadata"]["name"], body["spec"]["maxSteps"] = name, steps
    body["spec"]["algorithm"]["promptsPerStep"] = 2
    return body
