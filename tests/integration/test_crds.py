"""The CRDs on the real API server: they apply without warnings, teach, refuse by a sentence, block no status."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from clora_api import API_VERSION, GROUP, VERSION
from local.control_plane import ControlPlane
from tests.cluster_fixtures import wait_until

pytestmark = pytest.mark.integration

CRDS = Path(__file__).resolve().parents[2] / "crds"
EXPERIMENT: dict[str, Any] = {
    "engineRef": {"name": "main"},
    "environment": {"name": "WordProblems"},
    "data": {"builtin": "Generated"},
    "maxSteps": 10,
}
ENGINE: dict[str, Any] = {"model": {"name": "org/model"}, "image": "clora-engine:test"}
KINDS = {"loraexperiments": ("LoRAExperiment", EXPERIMENT), "loraengines": ("LoRAEngine", ENGINE)}


def kubectl(control_plane: ControlPlane, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["kubectl", "--kubeconfig", str(control_plane.kubeconfig), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


class Api:
    def __init__(self, kube: client.ApiClient, namespace: str) -> None:
        self._api, self._namespace = client.CustomObjectsApi(kube), namespace

    def create(self, plural: str = "loraexperiments", name: str = "one", **changes: Any) -> dict[str, Any]:
        """The kind's small valid spec with `changes` laid over its top level; None removes."""
        kind, spec = KINDS[plural]
        merged = {key: value for key, value in (copy.deepcopy(spec) | changes).items() if value is not None}
        body = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": merged}
        return dict(
            self._api.create_namespaced_custom_object(
                GROUP, VERSION, self._namespace, plural, body, field_validation="Strict"
            )
        )

    def patch(self, spec: dict[str, Any], plural: str = "loraexperiments", name: str = "one") -> dict[str, Any]:
        call = self._api.patch_namespaced_custom_object
        return dict(call(GROUP, VERSION, self._namespace, plural, name, {"spec": spec}))

    def patch_status(self, status: dict[str, Any], name: str = "one") -> dict[str, Any]:
        call = self._api.patch_namespaced_custom_object_status
        return dict(call(GROUP, VERSION, self._namespace, "loraexperiments", name, {"status": status}))


@pytest.fixture
def api(kube: client.ApiClient, namespace: str) -> Api:
    return Api(kube, namespace)


def refusal(error: pytest.ExceptionInfo[ApiException]) -> str:
    assert error.value.status == 422
    return str(json.loads(error.value.body)["message"])


# ------------------------------------------------------------------------------ as a whole


@pytest.mark.parametrize("path", sorted(CRDS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_crd_applies_without_warnings(control_plane: ControlPlane, path: Path) -> None:
    done = kubectl(control_plane, "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("plural", KINDS)
def test_a_crd_is_structural_and_its_names_are_taken(kube: client.ApiClient, plural: str) -> None:
    found = client.ApiextensionsV1Api(kube).read_custom_resource_definition(f"{plural}.{GROUP}")
    conditions = {c.type: c.status for c in found.status.conditions}
    assert conditions["Established"] == "True"
    assert conditions["NamesAccepted"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("lexp.spec.algorithm.estimator", "rewards normalised within each prompt's group"),
        ("lexp.spec.suspend", "nothing is lost"),
        ("lexp.spec.weight", "twice the weight gets twice the tokens while others wait there too"),
        ("leng.spec.scheduling", "the experiment with the least work left over its weight first"),
        ("lexp.status.progress.percent", "Share of the steps made"),
        ("leng.spec.capacity.maxRank", "Highest LoRA rank"),
        ("lexp.spec.priorityClassName", "a higher priority takes the slot of the lowest one"),
        ("leng.spec.trainer.slots", "computed in one pass, each with its own loss and optimizer"),
        ("leng.spec.drain", "finishes its step, commits, detaches and waits"),
        ("leng.spec.allowedNamespaces.from", "experiments of the engine's own namespace"),
        ("leng.status.epoch", "The present life of the engine"),
    ],
)
def test_kubectl_explain_teaches(control_plane: ControlPlane, tmp_path: Path, field: str, words: str) -> None:
    cache = f"--cache-dir={tmp_path}"  # discovery follows a new CRD within seconds, kubectl's cache within minutes
    wait_until(lambda: kubectl(control_plane, cache, "explain", field).returncode == 0, "discovery")
    assert words in " ".join(kubectl(control_plane, cache, "explain", field).stdout.split())


def test_columns(control_plane: ControlPlane, api: Api, namespace: str) -> None:
    api.create()
    api.patch_status({"state": "Running", "engine": {"name": "main"}, "progress": {"step": 3, "reward": "0.5"}})
    lines = kubectl(control_plane, "-n", namespace, "get", "lexp").stdout.splitlines()
    assert lines[0].split() == ["NAME", "STATE", "ENGINE", "STEP", "MAX", "REWARD", "AGE"]
    assert lines[1].split()[:6] == ["one", "Running", "main", "3", "10", "0.5"]


def test_defaults_are_written_out(api: Api) -> None:
    spec = api.create()["spec"]
    assert spec["lora"] == {"rank": 16, "alpha": 32, "targetModules": ["all-linear"]}
    assert spec["algorithm"]["learningRate"] == "1e-4"
    assert spec["algorithm"]["optimizer"]["epsilon"] == "1e-8"
    assert (spec["backoffLimit"], spec["deletionPolicy"], spec["suspend"]) == (3, "Retain", False)
    assert spec["weight"] == 100


@pytest.mark.parametrize("slots", ["Auto", 1, 64])
def test_slots_are_a_number_or_auto(api: Api, slots: int | str) -> None:
    assert api.create("loraengines", trainer={"slots": slots})["spec"]["trainer"]["slots"] == slots


# ------------------------------------------------------------------------------ refusals at creation

VOLUME = {"volume": "sets", "path": "a/b.jsonl"}
OFFLINE = {"kind": "MLflow", "mode": "Offline", "project": "p"}
TRACKIO = {"kind": "Trackio", "project": "p"}


REFUSED_EXPERIMENTS: list[tuple[dict[str, Any], str]] = [
    ({"engineSelector": {"matchLabels": {"a": "b"}}}, "give exactly one of engineRef and engineSelector"),
    ({"engineRef": None}, "give exactly one of engineRef and engineSelector"),
    ({"algorithm": {"learningRate": "abc"}}, "must be a decimal number in quotes, such as '5e-4'"),
    ({"algorithm": {"learningRate": "-1"}}, "spec.algorithm.learningRate"),
    ({"algorithm": {"estimator": "SFT"}}, "estimator SFT goes with loss CrossEntropy and only with it"),
    ({"algorithm": {"loss": "CrossEntropy"}}, "estimator SFT goes with loss CrossEntropy and only with it"),
    ({"algorithm": {"groupSize": 1}}, "estimator GRPO compares within a group: set groupSize >= 2"),
    (
        {"algorithm": {"estimator": "Reinforce", "maxRefillPrompts": 1}},
        "maxRefillPrompts replaces groups that give",
    ),
    (
        {"algorithm": {"estimator": "SFT", "loss": "CrossEntropy", "maxOffPolicySteps": 1}},
        "draws nothing that could be off-policy",
    ),
    ({"algorithm": {"estimator": "PPO"}}, 'supported values: "GRPO", "Reinforce", "SFT"'),
    ({"maxSteps": 0}, "spec.maxSteps"),
    ({"maxSteps": None}, "spec.maxSteps: Required value"),
    ({"lora": {"rank": 513}}, "spec.lora.rank"),
    ({"lora": {"targetModules": []}}, "spec.lora.targetModules"),
    ({"data": {"builtin": "Generated", "file": VOLUME}}, "give exactly one source of data"),
    ({"data": {}}, "give exactly one source of data"),
    ({"stopWhen": {"atLeast": "0.9", "atMost": "1"}}, "give exactly one bound: atLeast or atMost"),
    ({"tracking": [{"kind": "MLflow", "project": "p"}]}, "MLflow and Trackio need the url of a server"),
    ({"tracking": [{"kind": "WandB", "project": "p"}]}, "WandB and Trackio need a secretRef with a key"),
    ({"tracking": [TRACKIO]}, "MLflow and Trackio need the url of a server"),
    ({"tracking": [TRACKIO | {"url": "http://a"}]}, "WandB and Trackio need a secretRef with a key"),
    ({"tracking": [TRACKIO | {"mode": "Offline", "project": "a.b"}]}, "a project of Trackio has letters, digits,"),
    ({"tracking": [TRACKIO | {"mode": "Offline", "project": "registry-a"}]}, "does not begin with registry-"),
    ({"tracking": [TRACKIO | {"mode": "Offline", "entity": "team"}]}, "entity is a team of W&B"),
    ({"tracking": [OFFLINE | {"url": "http://a"}]}, "mode Offline reaches nobody: leave url and secretRef out"),
    ({"tracking": [OFFLINE | {"entity": "team"}]}, "entity is a team of W&B: leave it out for other kinds"),
    ({"tracking": [OFFLINE, OFFLINE]}, "Duplicate value"),
    ({"tracking": [OFFLINE | {"project": "a/b"}]}, "spec.tracking[0].project"),
    ({"stopWhen": {"steps": 2}}, "give exactly one bound: atLeast or atMost"),
    ({"stopWhen": {"metric": "reward", "atLeast": "0.9"}}, 'supported values: "rewardMean", "evalAccuracy"'),
    ({"stopWhen": {"atLeast": "90%"}}, "must be a decimal number in quotes"),
    ({"data": {"file": VOLUME | {"path": "../x"}}}, "spec.data.file.path"),
    ({"initFrom": {"file": VOLUME | {"path": "../x"}}}, "spec.initFrom.file.path"),
    ({"initFrom": {"file": VOLUME | {"path": "a/../x"}}}, "must be a path within the volume"),
    ({"initFrom": {"file": VOLUME | {"path": "/etc"}}}, "spec.initFrom.file.path"),
    ({"initFrom": {"file": VOLUME, "optimizer": True}}, "a PEFT directory holds no optimizer state"),
    ({"initFrom": {}}, "give exactly one source to start from"),
    ({"initFrom": {"file": VOLUME, "experiment": {"name": "x"}}}, "give exactly one source to start from"),
    ({"environment": {"name": "Nothing"}}, "spec.environment.name"),
    ({"sampling": {"temperature": "hot"}}, "spec.sampling.temperature"),
    ({"engineSelector": {"matchLabels": {}}, "engineRef": None}, "spec.engineSelector.matchLabels"),
    ({"deletionPolicy": "Forget"}, "spec.deletionPolicy"),
    ({"weight": 0}, "spec.weight"),
    ({"weight": 1001}, "spec.weight"),
    ({"priorityClassName": "system-node-critical"}, "Kubernetes keeps classes that start with 'system-'"),
    ({"priorityClassName": "High"}, "must be the name of a PriorityClass"),
    ({"ttlSecondsAfterFinished": -1}, "spec.ttlSecondsAfterFinished"),
    ({"engineRef": {"name": "main", "namespace": "a.b"}}, "spec.engineRef.namespace"),
]
REFUSED_ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"image": None}, "give an image to run, or the endpoint of an engine that runs already"),
    ({"endpoint": "http://engine"}, "an endpoint needs tokenSecretRef"),
    ({"scaleDownAfterSeconds": 59}, "spec.scaleDownAfterSeconds"),
    (
        {"endpoint": "http://engine", "tokenSecretRef": {"name": "t"}, "scaleDownAfterSeconds": 60},
        "scaleDownAfterSeconds is for engines that clora runs",
    ),
    (
        {"endpoint": "http://engine", "tokenSecretRef": {"name": "t"}, "trainer": {"nodes": 2}},
        "trainer.nodes is for engines that clora runs",
    ),
    (
        {"endpoint": "http://engine", "tokenSecretRef": {"name": "t"}, "serving": {"enabled": True}},
        "say where tenants reach an engine that somebody else runs: give serving.endpoint",
    ),
    ({"trainer": {"nodes": 0}}, "should be greater than or equal to 1"),
    ({"trainer": {"nodes": 65}}, "should be less than or equal to 64"),
    ({"endpoint": "http://engine/path", "tokenSecretRef": {"name": "t"}}, "spec.endpoint"),
    ({"endpoint": "file:///etc/passwd", "tokenSecretRef": {"name": "t"}}, "spec.endpoint"),
    ({"capacity": {"maxRank": 17}}, "spec.capacity.maxRank"),
    ({"trainer": {"gpus": 9}}, "should be less than or equal to 8"),
    ({"trainer": {"gpus": 1, "shardBase": True}}, "set gpus to 2 or more"),
    ({"trainer": {"slots": 65}}, "must be Auto or a number from 1 to 64"),
    ({"trainer": {"slots": "4"}}, "must be Auto or a number from 1 to 64"),
    ({"scheduling": "First"}, 'supported values: "FairShare", "ShortestRemaining"'),
    ({"storage": {"existingClaim": "c", "storageClassName": "s"}}, "storageClassName has no effect"),
    ({"storage": {"size": "much"}}, "spec.storage.size"),
    ({"model": {"name": "a", "claimName": "c", "path": "a/../b"}}, "must be a path within the volume"),
    ({"allowedNamespaces": {"from": "Selector"}}, "from Selector goes with a selector and only with it"),
    (
        {"allowedNamespaces": {"selector": {"matchLabels": {"a": "b"}}}},
        "from Selector goes with a selector and only with it",
    ),
    ({"allowedNamespaces": {"from": "Some"}}, 'supported values: "Same", "All", "Selector"'),
    ({"capacity": {"maxPerNamespace": 0}}, "spec.capacity.maxPerNamespace"),
    ({"dataVolumes": [{"name": "a", "claimName": "x"}, {"name": "a", "claimName": "y"}]}, "Duplicate value"),
]
# what is created with some changes, and how it is changed then
SELECTED: dict[str, Any] = {"engineRef": None, "engineSelector": {"matchLabels": {"a": "b"}}}
INIT: dict[str, Any] = {"initFrom": {"experiment": {"name": "x"}}}
ELSEWHERE: dict[str, Any] = {"endpoint": "http://engine", "tokenSecretRef": {"name": "t"}}
REFUSED_CHANGES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("loraexperiments", {}, {"lora": {"rank": 8}}, "lora cannot change after creation"),
    (
        "loraexperiments",
        {},
        {"algorithm": {"estimator": "Reinforce"}},
        "algorithm.estimator cannot change after creation",
    ),
    (
        "loraexperiments",
        {},
        {"environment": {"arguments": {"families": "shop"}}},
        "environment cannot change after creation",
    ),
    ("loraexperiments", {}, {"data": {"shuffleSeed": 1}}, "data cannot change after creation"),
    ("loraexperiments", {}, INIT, "initFrom cannot change after creation"),
    ("loraexperiments", INIT, {"initFrom": None}, "initFrom cannot change after creation"),
    ("loraexperiments", {}, {"engineRef": {"name": "other"}}, "engineRef cannot change after creation"),
    ("loraexperiments", {}, SELECTED, "engineRef cannot change after creation"),
    (
        "loraexperiments",
        SELECTED,
        {"engineSelector": {"matchLabels": {"a": "c"}}},
        "engineSelector cannot change after creation",
    ),
    ("loraengines", {}, ELSEWHERE, "cannot turn from endpoint to image or back"),
    ("loraengines", ELSEWHERE, {"endpoint": None, "image": "x"}, "cannot turn from endpoint to image or back"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED_EXPERIMENTS)
def test_an_experiment_is_refused(api: Api, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiException) as error:
        api.create(**changes)
    assert words in refusal(error)


@pytest.mark.parametrize(("changes", "words"), REFUSED_ENGINES)
def test_an_engine_is_refused(api: Api, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiException) as error:
        api.create("loraengines", **changes)
    assert words in refusal(error)


def test_an_unknown_field_is_refused(api: Api) -> None:
    with pytest.raises(ApiException) as error:
        api.create(sampling={"topP": "0.9"})
    assert 'unknown field "spec.sampling.topP"' in str(json.loads(error.value.body)["message"])


# ------------------------------------------------------------------------------ changes


@pytest.mark.parametrize(("plural", "before", "change", "words"), REFUSED_CHANGES)
def test_what_cannot_change(api: Api, plural: str, before: dict[str, Any], change: dict[str, Any], words: str) -> None:
    api.create(plural, **before)
    with pytest.raises(ApiException) as error:
        api.patch(change, plural)
    assert words in refusal(error)


def test_what_can_change(api: Api) -> None:
    api.create()
    changed = api.patch(
        {"maxSteps": 20, "suspend": True, "algorithm": {"learningRate": "5e-4"}, "backoffLimit": 0, "weight": 300}
    )
    assert changed["metadata"]["generation"] == 2


def test_a_status_write_is_never_blocked(api: Api) -> None:
    """Not by a maxSteps below the reached step, nor by anything else that the spec says."""
    api.create()
    api.patch_status({"state": "Running", "progress": {"step": 8, "maxSteps": 10}})
    api.patch({"maxSteps": 3})
    written = api.patch_status({"state": "Succeeded", "progress": {"step": 9, "percent": 100}})
    assert written["status"]["progress"]["step"] == 9
    assert written["metadata"]["generation"] == 2


def test_examples_are_valid(control_plane: ControlPlane, namespace: str) -> None:
    """Every manifest under examples/, checked strictly by the API server."""
    found = 0
    for path in sorted((CRDS.parent / "examples").rglob("*.yaml")):
        found += 1
        done = kubectl(
            control_plane, "-n", namespace, "apply", "--dry-run=server", "--validate=strict", "-f", str(path)
        )
        assert done.returncode == 0, f"{path.name}: {done.stderr}"
    assert found
