"""The volume of a claim is bound to that claim alone, on this node."""

from __future__ import annotations

from pathlib import Path

from local import node_config, volumes

CLAIM = {
    "metadata": {"namespace": "team", "name": "data", "uid": "42", "resourceVersion": "7"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "3Gi"}}},
    "status": {"phase": "Pending"},
}


def test_volume_is_a_folder_of_the_node_bound_to_its_claim() -> None:
    volume = volumes.volume_for(CLAIM, Path("/node/volumes"))
    spec = volume["spec"]
    assert volume["metadata"]["name"] == "pvc-42"
    assert spec["local"] == {"path": "/node/volumes/pvc-42"}
    assert spec["capacity"] == {"storage": "3Gi"}
    assert spec["accessModes"] == ["ReadWriteOnce"]
    assert {key: spec["claimRef"][key] for key in ("namespace", "name", "uid")} == {
        "namespace": "team",
        "name": "data",
        "uid": "42",
    }
    terms = spec["nodeAffinity"]["required"]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"][0]["values"] == [node_config.NODE]
