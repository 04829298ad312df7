"""LoRAEngine -> manifests, for an engine of several pods; and that engines of one pod know nothing of them."""

from __future__ import annotations

import argparse
import json
from functools import reduce
from typing import Any

import pytest

from clora_engine import config, follow
from clora_operator.pod_template import TRAINER_PORT, follow_arguments
from clora_operator.resources import Engine
from clora_operator.workload import (
    digest,
    leader_worker_set_name,
    manifests,
    name_problem,
    template_of,
    template_of_pod,
    template_wanted,
)
from tests.unit.operator.factories import engine

PEERS = json.dumps([{"podSelector": {"matchLabels": {"app": "operator"}}}])
EVERYTHING: dict[str, Any] = {
    "model": {
        "name": "o/m",
        "claimName": "models",
        "path": "a/b",
        "revision": "r",
        "tokenSecretRef": {"name": "hub"},
    },
    "sampler": {"gpus": 2, "tensorParallelSize": 2, "dataParallelSize": 1, "kvCacheMemory": "4Gi"},
    "trainer": {"gpus": 2, "shardBase": True, "slots": 4},
    "storage": {"existingClaim": "theirs"},
    "dataVolumes": [{"name": "sets", "claimName": "sets"}],
    "serving": {"enabled": True},
    "hubDatasets": ["openai/*"],
    "environments": {"allowed": ["GSM8K", "HTTP"], "allowedHosts": ["a.svc:8000"]},
    "tracking": {"allowedHosts": ["api.wandb.ai"]},
    "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "64Gi"}},
    "tokenSecretRef": {"name": "mine", "key": "k"},
    "podTemplate": {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "nodeSelector": {"gpu": "h200"},
            "containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}],
        },
    },
}


@pytest.mark.parametrize(
    ("fields", "asleep", "known"),
    [
        ({}, False, "ada5f4f26d9acad3ffb44d035972a8c726b9074ae180eb6e53d34975fc6dffe7"),
        ({}, True, "ccba45a7f6582c7e871e660ea78edae757eba9df597902b972d9b8c5ff8e292a"),
        (EVERYTHING, False, "8370f179036a556f6727f3c847c0bff2e8b28e6c95ceeb5e63e4eb5ea7d22e14"),
        (EVERYTHING, True, "6194483950101c5fee78ac9bfbc2b91e9afdec7a6b723e1b09072031499d21c8"),
    ],
)
def test_an_engine_of_one_pod_is_to_the_byte_what_it_was(fields: dict[str, Any], asleep: bool, known: str) -> None:
    """Digests of the release before engines of several pods. Another one here is an update for every engine that runs,
    pending until it is drained: nothing that happens by the way."""
    of = engine(image="clora-engine:test", **fields)
    assert digest(manifests(of, PEERS, PEERS, asleep=asleep)) == known


def several(nodes: int = 3, **fields: Any) -> Engine:
    trainer = {"gpus": 2, "nodes": nodes, **fields.pop("trainer", {})}
    return engine(image="clora-engine:test", **({"trainer": trainer} | fields))


def child(of: Engine, kind: str, **how: Any) -> dict[str, Any]:
    return next(m for m in manifests(of, PEERS, **how) if m["kind"] == kind)


def templates(of: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    group = child(of, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    return group["leaderTemplate"], group["workerTemplate"]


def test_it_is_one_group_of_a_leader_and_its_workers() -> None:
    of = several()
    kinds = [m["kind"] for m in manifests(of, PEERS)]
    assert kinds == ["Service", "PersistentVolumeClaim", "NetworkPolicy", "LeaderWorkerSet"]
    found = child(of, "LeaderWorkerSet")
    assert found["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert found["metadata"]["ownerReferences"][0]["uid"] == "engine-uid"
    assert found["spec"]["replicas"] == 1
    assert child(of, "LeaderWorkerSet", asleep=True)["spec"]["replicas"] == 0
    assert found["spec"]["leaderWorkerTemplate"]["size"] == 3
    assert found["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"


def test_the_leader_is_the_pod_of_today_with_the_trainers_port() -> None:
    leader, _ = templates(several(**{k: v for k, v in EVERYTHING.items() if k != "trainer"}))
    alone = engine(image="clora-engine:test", **{**EVERYTHING, "trainer": {"gpus": 2}})
    today = child(alone, "StatefulSet")["spec"]["template"]
    more = {"--trainer-nodes=3", "--trainer-port=29400"}
    (theirs,), (ours,) = today["spec"].pop("containers"), leader["spec"].pop("containers")
    assert set(ours.pop("args")) - set(theirs.pop("args")) == more
    assert ours == theirs
    assert leader["spec"] == today["spec"]
    assert leader["metadata"]["labels"] == today["metadata"]["labels"] | {"clora.dev/role": "leader"}


def test_a_worker_trains_and_has_no_more_than_it_needs_for_that() -> None:
    _, worker = templates(several(**{k: v for k, v in EVERYTHING.items() if k != "trainer"}))
    (container,) = worker["spec"]["containers"]
    assert container["args"] == [
        "follow",
        "--leader=$(LWS_LEADER_ADDRESS)",
        "--trainer-port=29400",
        "--node=$(LWS_WORKER_INDEX)",
        "--trainer-nodes=3",
        "--trainer-gpus=2",
        "--model=/models/a/b",
        "--model-name=o/m",
        "--revision=r",
        "--token-file=/run/clora/token/token",
    ]
    assert container["resources"] == {
        "requests": {"cpu": "8"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "2"},
    }
    assert [volume["name"] for volume in worker["spec"]["volumes"]] == ["token", "shm", "tmp", "home", "model", "hub"]
    assert [mount["name"] for mount in container["volumeMounts"]] == ["token", "shm", "tmp", "home", "model", "hub"]
    assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe"} & container.keys()


def test_every_flag_is_one_of_the_engines() -> None:
    """Of both command lines, by the engine's own parsers. What Kubernetes puts in is put in here."""
    of = several(3, model={"name": "o/m", "revision": "r"})
    assert of.spec is not None
    (leader,), (worker,) = (template["spec"]["containers"] for template in templates(of))
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    found = config.from_arguments(parser.parse_args(leader["args"][1:]))
    assert (found.trainer_nodes, found.trainer_port, found.trainer_ranks) == (3, TRAINER_PORT, 6)
    parser = argparse.ArgumentParser()
    follow.add_arguments(parser)
    told = {"$(LWS_LEADER_ADDRESS)": "main-0.main.team", "$(LWS_WORKER_INDEX)": "2"}
    given = [reduce(lambda text, name: text.replace(name, told[name]), told, flag) for flag in worker["args"][1:]]
    node = follow.from_arguments(parser.parse_args(given))
    assert (node.leader, node.node, node.nodes, node.gpus) == ("main-0.main.team", 2, 3, 2)
    assert (node.model, node.revision, node.trainer_port) == ("o/m", "r", TRAINER_PORT)


def test_all_pods_have_the_same_identity_image_and_overlay() -> None:
    leader, worker = templates(several(**{k: v for k, v in EVERYTHING.items() if k != "trainer"}))
    for field in ("securityContext", "terminationGracePeriodSeconds", "automountServiceAccountToken", "nodeSelector"):
        assert leader["spec"][field] == worker["spec"][field]
    for field in ("image", "securityContext", "env"):
        assert leader["spec"]["containers"][0][field] == worker["spec"]["containers"][0][field]
    assert {"name": "A", "value": "1"} in worker["spec"]["containers"][0]["env"]
    assert worker["metadata"]["labels"]["team"] == "a"


def test_an_overlay_cannot_make_a_leader_of_a_worker() -> None:
    template = {"metadata": {"labels": {"clora.dev/role": "leader", "clora.dev/engine": "other"}}}
    _, worker = templates(several(podTemplate=template))
    assert worker["metadata"]["labels"]["clora.dev/role"] == "worker"
    assert worker["metadata"]["labels"]["clora.dev/engine"] == "main"


def test_the_service_has_the_leader_alone() -> None:
    of = several()
    leader, worker = templates(of)
    selector = child(of, "Service")["spec"]["selector"].items()
    assert selector <= leader["metadata"]["labels"].items()
    assert not selector <= worker["metadata"]["labels"].items()
    assert child(engine(image="x"), "Service")["spec"]["selector"] == {"clora.dev/engine": "main"}


def test_pods_of_one_engine_reach_each_other_and_nobody_else_reaches_more() -> None:
    one, many = (child(of, "NetworkPolicy")["spec"] for of in (engine(image="x"), several()))
    assert many["podSelector"] == one["podSelector"]
    assert many["ingress"] == [
        *one["ingress"],
        {"from": [{"podSelector": {"matchLabels": {"clora.dev/engine": "main"}}}]},
    ]


def test_while_one_pod_runs_the_rest_of_the_engine_is_for_one_pod() -> None:
    """Of an engine that is to have several, before it was drained."""
    found = manifests(several(), PEERS, runs_as="StatefulSet", workload=False)
    alone = manifests(engine(image="clora-engine:test"), PEERS)
    assert found == alone[:-1]


def test_the_templates_say_what_they_are() -> None:
    of = several()
    leader, worker = templates(of)
    known = {template_of_pod(leader), template_of_pod(worker), template_of(child(of, "LeaderWorkerSet"))}
    assert known == {template_wanted(of)}
    assert template_wanted(several(4)) != template_wanted(of)
    assert template_wanted(several(storage={"size": "1Gi"})) == template_wanted(of), "no pod knows its volume's size"
    labelled = several(podTemplate={"metadata": {"annotations": {"mine": "yes"}}})
    assert templates(labelled)[1]["metadata"]["annotations"]["mine"] == "yes"
    assert template_of({"spec": {"leaderWorkerTemplate": {}}}) == ""


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("queued", [False, True])
def test_requests_are_written_out_where_kueue_compares_them(nodes: int, queued: bool) -> None:
    labels = {"kueue.x-k8s.io/queue-name": "research"} if queued else {}
    of = engine(
        meta={"labels": labels},
        image="x",
        resources={"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "8Gi"}},
        trainer={"nodes": nodes, "gpus": 1},
        sampler={"gpus": 1},
    )
    if nodes == 1:
        pods = {2: child(of, "StatefulSet")["spec"]["template"]}
    else:
        group = child(of, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
        pods = {2: group["leaderTemplate"], 1: group["workerTemplate"]}
    for gpus, pod in pods.items():
        (container,) = pod["spec"]["containers"]
        gpu = {"nvidia.com/gpu": str(gpus)}
        assert container["resources"]["limits"] == {"cpu": "2", "memory": "8Gi"} | gpu
        filled_in = {"memory": "8Gi"} | gpu if queued else {}
        assert container["resources"]["requests"] == {"cpu": "1"} | filled_in


def test_kueue_admits_the_group_by_the_labels_of_the_engine() -> None:
    of = several(meta={"labels": {"kueue.x-k8s.io/queue-name": "research", "team": "a"}})
    found = child(of, "LeaderWorkerSet")["metadata"]["labels"]
    assert found["kueue.x-k8s.io/queue-name"] == "research"
    assert "team" not in found


@pytest.mark.parametrize(("length", "nodes", "fine"), [(44, 2, True), (45, 2, False), (50, 1, True), (51, 1, False)])
def test_names(length: int, nodes: int, fine: bool) -> None:
    of = engine(name="a" * length, image="x", trainer={"nodes": nodes})
    assert (name_problem(of) == "") == fine
    # a label of the last worker: <set>-0-<hash of ten>; a host name of any: <set>-0-<index>
    assert not fine or nodes == 1 or len(f"{leader_worker_set_name(of.meta)}-0-0123456789") <= 63


def test_two_engines_never_have_one_name_for_their_sets() -> None:
    names = {leader_worker_set_name(engine(uid=uid).meta) for uid in ("one", "two")}
    assert len(names) == 2
    assert all(name.startswith("main-") for name in names)


def test_without_a_revision_there_is_none() -> None:
    spec = several().spec
    assert spec is not None
    assert not [flag for flag in follow_arguments(spec) if flag.startswith("--revision")]
