"""LoRAEngine -> manifests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clora_operator.overlay import overlay
from clora_operator.pod_template import arguments
from clora_operator.resources import Engine
from clora_operator.workload import digest, manifests, name_problem, token_secret
from tests.unit.operator.factories import engine


def ours(**fields: Any) -> Engine:
    return engine(image="clora-engine:test", **fields)


def child(of: Engine, kind: str) -> dict[str, Any]:
    return next(m for m in manifests(of) if m["kind"] == kind)


def container(of: Engine) -> dict[str, Any]:
    found: dict[str, Any] = child(of, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    return found


def test_the_command_line_of_the_defaults() -> None:
    of = ours()
    assert of.spec is not None
    assert arguments(of.spec) == [
        "serve",
        "--model=small",
        "--model-name=small",
        "--storage=/storage",
        "--host=0.0.0.0",
        "--port=8080",
        "--token-file=/run/clora/token/token",
        "--max-experiments=8",
        "--max-rank=32",
        "--max-off-policy-steps=2",
        "--sampler-gpus=4",
        "--tensor-parallel-size=1",
        "--data-parallel-size=4",
        "--max-model-len=8192",
        "--max-num-seqs=256",
        "--scheduling=FairShare",
        "--trainer-gpus=4",
        "--tokens-per-microbatch=16384",
        "--trainer-slots=Auto",
        "--gradient-checkpointing=false",
        "--shard-base=false",
    ]


def test_slots_by_number_and_gradient_checkpointing() -> None:
    of = ours(trainer={"gpus": 1, "slots": 4, "gradientCheckpointing": True})
    assert {"--trainer-slots=4", "--gradient-checkpointing=true"} <= set(container(of)["args"])


def test_gpus_are_those_of_sampler_and_trainer() -> None:
    of = ours(trainer={"gpus": 8, "shardBase": True})
    assert container(of)["resources"]["limits"]["nvidia.com/gpu"] == "12"
    assert {"--trainer-gpus=8", "--shard-base=true"} <= set(container(of)["args"])


def test_another_scheduling_is_another_pod_template() -> None:
    of = ours(scheduling="ShortestRemaining")
    assert "--scheduling=ShortestRemaining" in container(of)["args"]
    assert digest(manifests(of)) != digest(manifests(ours()))


@pytest.mark.parametrize(
    ("model", "argument"),
    [
        ({"name": "o/m"}, "--model=o/m"),
        ({"name": "o/m", "claimName": "c"}, "--model=/models"),
        ({"name": "o/m", "claimName": "c", "path": "a/b"}, "--model=/models/a/b"),
        ({"name": "o/m", "revision": "r"}, "--revision=r"),
    ],
)
def test_where_the_model_comes_from(model: dict[str, Any], argument: str) -> None:
    of = engine(image="x")
    assert of.spec is not None
    spec = of.spec.model_validate({**of.spec.to_api(), "model": model})
    assert argument in arguments(spec)


def test_every_flag_is_one_of_the_engines() -> None:
    """The engine's own parser takes what we write; only its argument parser is loaded, no torch."""
    import argparse

    from clora_engine.config import add_arguments, from_arguments

    of = ours(
        dataVolumes=[{"name": "sets", "claimName": "c"}],
        sampler={"kvCacheMemory": "4Gi"},
        hubDatasets=["openai/gsm8k", "team/*"],
        environments={"allowed": ["GSM8K", "HTTP"], "allowedHosts": ["*.team.svc", "a.svc:8000"]},
        serving={"enabled": True},
        tracking={"allowedHosts": ["api.wandb.ai"]},
    )
    assert of.spec is not None
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    config = from_arguments(parser.parse_args(arguments(of.spec)[1:]))
    assert str(config.data_volumes["sets"]) == "/data/sets"
    assert config.kv_cache_bytes == 4 << 30
    assert config.tenant_port == 8000
    assert config.hub_datasets == ("openai/gsm8k", "team/*")
    assert config.environments == ("GSM8K", "HTTP")
    assert config.environment_hosts == ("*.team.svc", "a.svc:8000")
    assert config.tracking_hosts == ("api.wandb.ai",)


def test_secrets_are_files() -> None:
    text = json.dumps(manifests(ours(tokenSecretRef={"name": "mine", "key": "k"})))
    assert '"secretName": "mine"' in text
    assert "secretKeyRef" not in text
    assert token_secret(ours()) == ("main-token", "token")


def test_gpus_are_limits() -> None:
    assert container(ours())["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    on_cpu = ours(sampler={"gpus": 0}, trainer={"gpus": 0}, resources={"requests": {"cpu": "2"}})
    assert container(on_cpu)["resources"] == {"requests": {"cpu": "2"}}


def test_children_are_owned_but_for_the_claim() -> None:
    for kind in ("Service", "StatefulSet"):
        assert child(ours(), kind)["metadata"]["ownerReferences"][0]["uid"] == "engine-uid"
    assert "ownerReferences" not in child(ours(), "PersistentVolumeClaim")["metadata"]
    assert "ownerReferences" in child(ours(storage={"whenDeleted": "Delete"}), "PersistentVolumeClaim")["metadata"]


def test_an_existing_claim_is_used_and_not_touched() -> None:
    of = ours(storage={"existingClaim": "theirs"})
    assert [m["kind"] for m in manifests(of)] == ["Service", "StatefulSet"]
    volumes = child(of, "StatefulSet")["spec"]["template"]["spec"]["volumes"]
    assert volumes[0] == {"name": "storage", "persistentVolumeClaim": {"claimName": "theirs"}}


def test_the_selector_survives_the_overlay() -> None:
    template = {"metadata": {"labels": {"clora.dev/engine": "other", "mine": "yes"}}}
    found = child(ours(podTemplate=template), "StatefulSet")["spec"]
    assert found["template"]["metadata"]["labels"]["clora.dev/engine"] == "main"
    assert found["template"]["metadata"]["labels"]["mine"] == "yes"
    assert found["selector"] == {"matchLabels": {"clora.dev/engine": "main"}}


def test_only_the_peers_that_are_named_reach_the_control_port() -> None:
    peers = [{"podSelector": {"matchLabels": {"app": "operator"}}}]
    children = manifests(ours(), json.dumps(peers))
    assert [m["kind"] for m in children] == ["Service", "PersistentVolumeClaim", "NetworkPolicy", "StatefulSet"]
    policy, stateful_set = children[2], children[3]
    assert policy["metadata"]["ownerReferences"][0]["uid"] == "engine-uid"
    pod = stateful_set["spec"]["template"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == peers
    assert [port["port"] for port in rule["ports"]] == [pod["spec"]["containers"][0]["ports"][0]["containerPort"]]
    assert policy["spec"]["policyTypes"] == ["Ingress"], "where an engine may go is not clora's to say"
    assert stateful_set == child(ours(), "StatefulSet"), "no engine restarts for its policy"


def test_without_serving_nothing_of_an_engine_changes() -> None:
    text = json.dumps(manifests(ours(), json.dumps([{"podSelector": {}}])))
    assert "tenants" not in text
    assert "tenant-port" not in text


@pytest.mark.parametrize(
    ("allowed", "peers"),
    [
        ({}, [{"podSelector": {}}]),
        ({"from": "All"}, [{"namespaceSelector": {}}]),
        (
            {"from": "Selector", "selector": {"matchLabels": {"team": "a"}}},
            [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {"team": "a"}}}],
        ),
    ],
)
def test_tenants_reach_their_port_and_not_the_control_port(
    allowed: dict[str, Any], peers: list[dict[str, Any]]
) -> None:
    operator = [{"podSelector": {"matchLabels": {"app": "operator"}}}]
    of = ours(serving={"enabled": True}, allowedNamespaces=allowed)
    service, _, policy, _ = manifests(of, json.dumps(operator))
    ports = {port["name"]: port["containerPort"] for port in container(of)["ports"]}
    assert ports == {"control": 8080, "tenants": 8000}
    assert {port["name"]: port["targetPort"] for port in service["spec"]["ports"]} == {
        "control": "control",
        "tenants": "tenants",
    }
    assert policy["spec"]["ingress"] == [
        {"from": operator, "ports": [{"port": 8080, "protocol": "TCP"}]},
        {"from": peers, "ports": [{"port": 8000, "protocol": "TCP"}]},
    ]
    assert "--tenant-port=8000" in container(of)["args"]
    probes = [container(of)[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness")]
    assert set(probes) == {"control"}


def test_a_digest_tells_a_change() -> None:
    assert digest(manifests(ours())) == digest(manifests(ours()))
    assert digest(manifests(ours())) != digest(manifests(ours(storage={"size": "1Gi"})))


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"l": [1, 2]}, {"l": [3]}, {"l": [3]}),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
        ),
        (
            {"volumeMounts": [{"name": "v", "mountPath": "/a"}]},
            {"volumeMounts": [{"name": "v", "mountPath": "/b"}]},
            {"volumeMounts": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]},
        ),
        ({}, {"tolerations": [{"key": "gpu"}]}, {"tolerations": [{"key": "gpu"}]}),
        ({"l": [{"name": "a"}]}, {"l": []}, {"l": []}),
    ],
)
def test_overlay(base: dict[str, Any], over: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps(base)
    assert overlay(base, over) == expected
    assert json.dumps(base) == before


@pytest.mark.parametrize(
    ("name", "fine"),
    [("qwen-4b", True), ("4b", False), ("a.b", False), ("a" * 50, True), ("a" * 51, False), ("a-", False)],
)
def test_names(name: str, fine: bool) -> None:
    assert (name_problem(engine(name=name, image="x")) == "") == fine
