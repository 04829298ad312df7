"""Engines of several pods: the operator with its documented rights, and LWS's own controller and webhooks, before a
real API server. There is no node here: a pod runs when a test says so in its status, and an engine is drained likewise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config, watch

from clora_operator.cli_engine import pod_of
from clora_operator.kube import Kube, configuration
from clora_operator.resources import parse_engine
from clora_operator.workload import leader_worker_set_name, manifests
from local.control_plane import ControlPlane
from tests.integration.lws_fixtures import lws, lws_controller, lws_kinds
from tests.integration.operator_fixtures import LONG_AGO, Cluster, Stage, condition, own_stage, stage, status, wait_for

pytestmark = pytest.mark.integration
__all__ = ["lws", "own_stage", "stage"]

Pod = Any


def spec(nodes: int = 2, **fields: Any) -> dict[str, Any]:
    return {"model": {"name": "org/model"}, "image": "clora-engine:test", "trainer": {"nodes": nodes}, **fields}


class Several:
    """One LoRAEngine, `main`, and what belongs to it."""

    def __init__(self, cluster: Cluster, kube: client.ApiClient) -> None:
        self.cluster, self.namespace = cluster, cluster.namespace
        self.apps, self.core, self.custom = client.AppsV1Api(kube), cluster.core, cluster.custom

    def create(self, spec: dict[str, Any], **metadata: Any) -> None:
        self.cluster.create("loraengines", "main", spec, **metadata)

    def patch(self, **fields: Any) -> None:
        self.cluster.patch("main", {"spec": fields}, "loraengines")

    def wait_reason(self, kind: str, reason: str) -> dict[str, Any]:
        return self.cluster.wait_reason("main", kind, reason, plural="loraengines")

    @property
    def name(self) -> str:
        return leader_worker_set_name(parse_engine(self.cluster.get("main", "loraengines")).meta)

    def sets(self) -> list[dict[str, Any]]:
        group = "leaderworkerset.x-k8s.io"
        listed = self.custom.list_namespaced_custom_object(group, "v1", self.namespace, "leaderworkersets")
        return list(listed["items"])

    def patch_set(self, body: dict[str, Any]) -> None:
        group = "leaderworkerset.x-k8s.io"
        self.custom.patch_namespaced_custom_object(group, "v1", self.namespace, "leaderworkersets", self.name, body)

    def delete_set(self) -> None:
        group = "leaderworkerset.x-k8s.io"
        self.custom.delete_namespaced_custom_object(group, "v1", self.namespace, "leaderworkersets", self.name)

    def pods(self) -> dict[str, Pod]:
        found = self.core.list_namespaced_pod(self.namespace, label_selector="clora.dev/engine=main").items
        return {pod.metadata.name: pod for pod in found}

    def uids(self) -> set[str]:
        return {pod.metadata.uid for pod in self.pods().values()}

    def wait_pods(self, *names: str) -> dict[str, Pod]:
        wait_for(lambda: set(self.pods()) == set(names), f"the pods {names}")
        return self.pods()

    def wait_group(self) -> dict[str, Pod]:
        return self.wait_pods(f"{self.name}-0", f"{self.name}-0-1")

    def runs(self, name: str) -> None:
        """As kubelet would say."""
        running = {"name": "engine", "image": "i", "imageID": "i", "ready": True, "restartCount": 0}
        running |= {"state": {"running": {"startedAt": LONG_AGO}}}
        self.core.patch_namespaced_pod_status(
            name, self.namespace, {"status": {"phase": "Running", "containerStatuses": [running]}}
        )

    def say(self, kind: str, value: str, reason: str) -> None:
        """A condition, as the operator says it once the engine has answered, long ago."""
        engine = self.cluster.get("main", "loraengines")
        mine = {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": "said by the test",
            "observedGeneration": engine["metadata"]["generation"],
            "lastTransitionTime": LONG_AGO,
        }
        others = [one for one in status(engine)["conditions"] if one["type"] != kind]
        body = {
            "metadata": {"resourceVersion": engine["metadata"]["resourceVersion"]},
            "status": {"conditions": [*others, mine]},
        }
        self.cluster.patch_status("main", body, "loraengines")

    def version(self) -> str:
        return str(self.core.list_namespaced_pod(self.namespace).metadata.resource_version)

    def kinds_since(self, version: str) -> list[set[str]]:
        """Which kinds of workload had pods, after each event of a pod since then: "" is a StatefulSet's."""
        living: dict[str, str] = {}
        history = []
        events = watch.Watch().stream(
            self.core.list_namespaced_pod, self.namespace, resource_version=version, timeout_seconds=1
        )
        for event in events:
            pod = event["object"]
            role = pod.metadata.labels.get("clora.dev/role", "")
            living[pod.metadata.name] = "LeaderWorkerSet" if role else "StatefulSet"
            if event["type"] == "DELETED":
                del living[pod.metadata.name]
            history.append(set(living.values()))
        return history


@pytest.fixture
def several(stage: Stage, kube: client.ApiClient) -> Several:
    return Several(stage.cluster, kube)


def variables(pod: Pod) -> dict[str, str]:
    return {one.name: one.value for one in pod.spec.containers[0].env}


@pytest.mark.usefixtures("lws")
def test_lws_makes_a_leader_and_its_workers(stage: Stage, several: Several) -> None:
    stage.start_operator()
    several.create(spec(3, trainer={"nodes": 3, "gpus": 4}, sampler={"gpus": 2, "dataParallelSize": 2}))
    name = several.name
    pods = several.wait_pods(f"{name}-0", f"{name}-0-1", f"{name}-0-2")
    leader, worker = pods[f"{name}-0"], pods[f"{name}-0-2"]
    for index, pod in enumerate((leader, pods[f"{name}-0-1"], worker)):
        assert variables(pod)["LWS_LEADER_ADDRESS"] == f"{name}-0.{name}.{stage.cluster.namespace}"
        assert variables(pod)["LWS_WORKER_INDEX"] == str(index)
        assert pod.spec.subdomain == name
    assert {"--trainer-nodes=3", "--trainer-port=29400"} <= set(leader.spec.containers[0].args)
    assert worker.spec.containers[0].args[:3] == ["follow", "--leader=$(LWS_LEADER_ADDRESS)", "--trainer-port=29400"]
    assert leader.spec.containers[0].resources.limits == {"nvidia.com/gpu": "6"}
    assert worker.spec.containers[0].resources.limits == {"nvidia.com/gpu": "4"}
    headless = several.core.read_namespaced_service(name, stage.cluster.namespace).spec
    assert headless.cluster_ip == "None"
    assert headless.publish_not_ready_addresses, "a leader that is not ready yet is found by its workers"
    ours = several.core.read_namespaced_service("main", stage.cluster.namespace).spec.selector.items()
    assert ours <= leader.metadata.labels.items()
    assert not ours <= worker.metadata.labels.items()
    engine = parse_engine(several.cluster.get("main", "loraengines"))
    assert pod_of(Kube(configuration(str(stage.kubeconfig))), engine) == f"{name}-0", "that of `clora pull`"
    several.wait_reason("WorkloadCurrent", "UpToDate")
    several.wait_reason("Ready", "PodUnschedulable")
    (made,) = several.sets()
    several.cluster.delete("main", "loraengines")
    wait_for(lambda: not several.sets() and not several.pods(), "the garbage collector")
    assert made["metadata"]["ownerReferences"][0]["kind"] == "LoRAEngine"


@pytest.mark.usefixtures("lws")
def test_every_field_is_one_that_lws_knows(stage: Stage, several: Several) -> None:
    """Refused by name if it is not; and the webhooks take it."""
    several.create(spec(podTemplate={"metadata": {"annotations": {"a": "b"}}}, storage={"existingClaim": "mine"}))
    engine = parse_engine(several.cluster.get("main", "loraengines"))
    manifest = manifests(engine)[-1]
    create = several.custom.create_namespaced_custom_object
    place = ("leaderworkerset.x-k8s.io", "v1", stage.cluster.namespace, "leaderworkersets")
    create(*place, manifest, field_validation="Strict", dry_run="All")
    manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["unknown"] = 1
    with pytest.raises(client.exceptions.ApiException, match="unknown"):
        create(*place, manifest, field_validation="Strict", dry_run="All")


@pytest.mark.usefixtures("lws")
def test_an_update_waits_until_the_engine_is_drained(stage: Stage, several: Several) -> None:
    """LWS rolls as soon as its templates change: they do not before."""
    stage.start_operator(RESYNC_SECONDS="1")
    several.create(spec())
    before = several.wait_group()
    for name in before:
        several.runs(name)
    several.wait_reason("WorkloadCurrent", "UpToDate")
    several.patch(image="clora-engine:next")
    pending = several.wait_reason("WorkloadCurrent", "UpdatePending")
    assert "set spec.drain to true" in condition(pending, "WorkloadCurrent")["message"]
    several.patch(drain=True)
    several.wait_reason("Drained", "Draining")  # nobody knows what is attached
    assert several.uids() == {pod.metadata.uid for pod in before.values()}
    (held,) = several.sets()
    template = held["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    assert template["spec"]["containers"][0]["image"] == "clora-engine:test"
    several.say("Drained", "True", "Drained")
    several.wait_reason("WorkloadCurrent", "UpToDate")
    after = several.wait_group()
    assert {pod.spec.containers[0].image for pod in after.values()} == {"clora-engine:next"}
    assert not several.uids() & {pod.metadata.uid for pod in before.values()}


@pytest.mark.usefixtures("lws")
def test_pods_that_have_not_started_are_of_the_newest_template(stage: Stage, several: Several) -> None:
    stage.start_operator(RESYNC_SECONDS="1")
    several.create(spec(image="clora-engine:misspelt"))
    several.wait_group()
    several.patch(image="clora-engine:right")
    wait_for(
        lambda: {pod.spec.containers[0].image for pod in several.pods().values()} == {"clora-engine:right"}, "the image"
    )
    several.wait_group()
    several.wait_reason("WorkloadCurrent", "UpToDate")


@pytest.mark.usefixtures("lws")
def test_from_one_pod_to_two_and_back_there_is_never_more_than_one_workload(stage: Stage, several: Several) -> None:
    stage.start_operator(RESYNC_SECONDS="1")
    several.create(spec(1))
    several.wait_pods("main-0")
    several.runs("main-0")
    several.wait_reason("WorkloadCurrent", "UpToDate")
    start = several.version()

    several.patch(trainer={"nodes": 2})
    several.wait_reason("WorkloadCurrent", "UpdatePending")
    selector = several.core.read_namespaced_service("main", stage.cluster.namespace).spec.selector
    assert selector == {"clora.dev/engine": "main"}, "the pod that runs stays reachable"
    assert not several.sets()
    several.patch(drain=True)
    several.wait_reason("Drained", "Draining")
    several.wait_pods("main-0")
    several.say("Drained", "True", "Drained")
    for name in several.wait_group():
        several.runs(name)
    several.wait_reason("WorkloadCurrent", "UpToDate")
    assert several.apps.read_namespaced_stateful_set("main", stage.cluster.namespace).spec.replicas == 0

    several.patch(drain=False, trainer={"nodes": 1})
    several.wait_reason("WorkloadCurrent", "UpdatePending")
    several.wait_group()
    several.patch(drain=True)
    several.wait_reason("Drained", "Draining")
    several.say("Drained", "True", "Drained")
    several.wait_pods("main-0")
    several.wait_reason("WorkloadCurrent", "UpToDate")
    selector = several.core.read_namespaced_service("main", stage.cluster.namespace).spec.selector
    assert selector == {"clora.dev/engine": "main"}
    history = several.kinds_since(start)
    assert {kind for kinds in history for kind in kinds} == {"StatefulSet", "LeaderWorkerSet"}
    assert all(len(kinds) <= 1 for kinds in history), "two at once"


@pytest.mark.usefixtures("lws")
def test_it_sleeps_and_wakes(stage: Stage, several: Several) -> None:
    stage.start_operator(RESYNC_SECONDS="1")
    several.create(spec(scaleDownAfterSeconds=3600))
    several.wait_group()
    several.wait_reason("Idle", "Unused")
    several.say("Idle", "True", "Unused")
    several.wait_reason("Ready", "Asleep")
    several.wait_pods()
    several.cluster.experiment("one")
    several.wait_group()
    several.wait_reason("WorkloadCurrent", "UpToDate")


@pytest.mark.usefixtures("lws")
def test_drift_is_put_right(stage: Stage, several: Several) -> None:
    stage.start_operator(RESYNC_SECONDS="1")
    several.create(spec())
    before = several.wait_group()
    several.patch_set({"spec": {"replicas": 2}})
    wait_for(lambda: several.sets()[0]["spec"]["replicas"] == 1, "one replica again")
    several.wait_group()
    several.delete_set()
    wait_for(lambda: not several.uids() & {pod.metadata.uid for pod in before.values()}, "the old pods to go")
    several.wait_group()


@pytest.mark.usefixtures("lws")
def test_a_group_that_waits_for_quota_is_queued(stage: Stage, several: Several) -> None:
    """Gated as Kueue gates pods that its queue has no quota for."""
    stage.start_operator()
    gates = {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
    labels = {"kueue.x-k8s.io/queue-name": "research"}
    several.create(spec(podTemplate=gates), labels=labels)
    queued = several.wait_reason("Ready", "Queued")
    assert f"pod {several.name}-0 waits in Kueue's queue research" in condition(queued, "Ready")["message"]
    assert several.sets()[0]["metadata"]["labels"].items() >= labels.items()


def test_a_cluster_without_the_kind(own_stage: Stage, fresh_control_plane: ControlPlane, tmp_path: Path) -> None:
    """Said, with the remedy; no crash, and other engines are not concerned. Installed later, it is picked up."""
    operator = own_stage.start_operator()
    with config.new_client_from_config(str(fresh_control_plane.kubeconfig)) as api:
        several = Several(own_stage.cluster, api)
        own_stage.cluster.create("loraengines", "alone", spec(1))
        several.create(spec())
        told = several.wait_reason("Accepted", "LeaderWorkerSetMissing")
        assert "install LWS" in condition(told, "Accepted")["message"]
        assert condition(told, "Ready")["reason"] == "LeaderWorkerSetMissing"
        own_stage.cluster.wait_reason("alone", "WorkloadCurrent", "UpToDate", plural="loraengines")
        with lws_kinds(api), lws_controller(fresh_control_plane.kubeconfig, api, tmp_path / "lws"):
            several.wait_reason("Accepted", "SpecValid")
            several.wait_group()
            several.cluster.delete("main", "loraengines")
            wait_for(lambda: not several.sets() and not several.pods(), "the garbage collector")
    assert "Traceback" not in operator.log.read_text()


def test_the_pod_stays_while_nobody_makes_those_of_the_kind(
    own_stage: Stage, fresh_control_plane: ControlPlane, tmp_path: Path
) -> None:
    """LWS is installed and does not run: its place would stay empty."""
    own_stage.start_operator(RESYNC_SECONDS="1")
    with config.new_client_from_config(str(fresh_control_plane.kubeconfig)) as api, lws_kinds(api):
        several = Several(own_stage.cluster, api)
        several.create(spec(1))
        several.wait_pods("main-0")
        several.runs("main-0")
        several.patch(trainer={"nodes": 2}, drain=True)
        several.wait_reason("Drained", "Draining")
        several.say("Drained", "True", "Drained")
        words = "has not looked at LeaderWorkerSet"
        several.cluster.wait(
            "main", lambda o: words in condition(o, "WorkloadCurrent").get("message", ""), words, plural="loraengines"
        )
        (empty,) = several.sets()
        assert empty["spec"]["replicas"] == 0
        before = several.uids()
        assert several.apps.read_namespaced_stateful_set("main", own_stage.cluster.namespace).spec.replicas == 1
        assert len(before) == 1
        with lws_controller(fresh_control_plane.kubeconfig, api, tmp_path / "lws"):
            several.wait_group()
            several.cluster.delete("main", "loraengines")
            wait_for(lambda: not several.sets() and not several.pods(), "the garbage collector")
