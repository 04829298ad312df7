"""What the operator's tests share: the operator as a process with its documented rights only, an engine without a
model, and waiting for a state through the API server's watch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException

from clora_api import API_VERSION, GROUP, VERSION
from clora_api.v1alpha1.conditions import Reason
from clora_engine.journal import Journal
from clora_operator.decide_release import GIVEN_UP
from clora_operator.kube import FIELD_MANAGER
from local.control_plane import ControlPlane, free_port
from local.node import NodeCluster

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-the-tests"
SECONDS = 60.0
LONG_AGO = "2026-01-01T00:00:00Z"
START_SECONDS = 180.0  # of a process, on a machine that has better things to do
# The rights that the operator needs in a namespace, and no more: every test here runs with these.
RULES = [
    {"apiGroups": [GROUP], "resources": ["loraengines"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [GROUP], "resources": ["loraexperiments"], "verbs": ["get", "list", "watch", "patch", "delete"]},
    {"apiGroups": [GROUP], "resources": ["loraengines/status", "loraexperiments/status"], "verbs": ["patch"]},
    {"apiGroups": ["apps"], "resources": ["statefulsets"], "verbs": ["get", "list", "watch", "create", "patch"]},
    {
        "apiGroups": ["leaderworkerset.x-k8s.io"],
        "resources": ["leaderworkersets"],
        "verbs": ["get", "create", "patch"],
    },
    {"apiGroups": [""], "resources": ["services"], "verbs": ["get", "create", "patch"]},
    {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get", "create", "patch"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "create"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["create", "patch"]},
]
# What it reads of the whole cluster, where it may.
CLUSTER_RULES = [
    {"apiGroups": ["scheduling.k8s.io"], "resources": ["priorityclasses"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get"]},
]
# Times that make a test quick; what a test is about it sets itself.
QUICK = {
    "METRICS_PORT": "0",
    "UNREACHABLE_GRACE_SECONDS": "2",
    "PROGRESS_WRITE_SECONDS": "0.2",
    "RETRY_BACKOFF_SECONDS": "0.2",
    "RESYNC_SECONDS": "5",
    "RELEASE_DEADLINE_SECONDS": "60",
}


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


class Killable:
    """A process of a test's own, once it is started."""

    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As an out-of-memory kill does: no time for anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class EngineProcess(Killable):
    """The simulated engine; what it commits and logs outlives a kill. real_server: behind the engine's own server."""

    def __init__(
        self,
        folder: Path,
        *,
        max_experiments: int = 4,
        max_rank: int = 32,
        max_off_policy_steps: int = 16,
        real_server: bool = False,
    ) -> None:
        folder.mkdir(parents=True)
        self.storage, self._port = folder, free_port()
        self._limits = (max_experiments, max_rank, max_off_policy_steps)
        self._real_server = real_server
        self.model = "simulated"  # from the next start on
        self._token = folder / "token"
        self.set_token(TOKEN)
        self.endpoint = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Returns once it answers."""
        command = [sys.executable, "-m", "tests.integration.simulated_engine", "--port", str(self._port)]
        command += ["--storage", str(self.storage), "--token-file", str(self._token)]
        command += ["--max-experiments", str(self._limits[0]), "--max-rank", str(self._limits[1])]
        command += ["--max-off-policy-steps", str(self._limits[2])]
        command += ["--model-name", self.model, *["--real-server"] * self._real_server]
        with (self.storage / "engine.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        wait_for(lambda: answers(f"{self.endpoint}/healthz"), "the simulated engine to answer", START_SECONDS)

    def set_token(self, token: str) -> None:
        """The only one that it accepts from now on."""
        self._token.write_text(token)

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self._token.read_text()}"}
        answer = httpx.get(self.endpoint + path, headers=headers, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def uids(self) -> set[str]:
        return {item["uid"] for item in self.get("/v1/experiments")["items"]}

    def events(self, event: str, uid: str) -> list[dict[str, Any]]:
        """What happened to an experiment, over all epochs."""
        path = self.storage / "events.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if (line["event"], line["uid"]) == (event, uid)]

    def commits(self, uid: str) -> list[int]:
        """The steps that its storage holds, ascending."""
        return Journal(self.storage, uid, epoch=0).commits()

    def has_files(self, uid: str) -> bool:
        return any((self.storage / "experiments" / uid).glob("*"))


class OperatorProcess(Killable):
    """`clora-operator run`, as users run it."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path, **settings: str) -> None:
        self._kubeconfig, self.namespaces, self.log = kubeconfig, [namespace], log
        self._settings = {f"CLORA_OPERATOR_{name}": value for name, value in (QUICK | settings).items()}

    def start(self) -> None:
        """Returns once it watches."""
        port = free_port()
        command = [str(Path(sys.executable).with_name("clora-operator")), "run"]
        command += [f"--namespace={namespace}" for namespace in self.namespaces]
        command += ["--kubeconfig", str(self._kubeconfig), "--liveness-port", str(port)]
        with self.log.open("ab") as log:
            environment = {**os.environ, **self._settings}
            self._process = subprocess.Popen(command, cwd=self.log.parent, env=environment, stdout=log, stderr=log)
        wait_for(lambda: self._runs() and answers(f"http://127.0.0.1:{port}/healthz"), "the operator", START_SECONDS)

    def _runs(self) -> bool:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"the operator has ended with {code}"
        return True

    def peak_memory_bytes(self) -> int:
        """The most that it ever had resident."""
        line = next(line for line in Path(f"/proc/{self.pid}/status").read_text().splitlines() if "VmHWM" in line)
        return int(line.split()[1]) * 1024

    def stop(self) -> int:
        """SIGTERM, as kubelet does; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=30)


class Cluster:
    """One namespace of the API server, as a user sees it."""

    def __init__(self, kube: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self.core = client.CoreV1Api(kube)
        self.custom = client.CustomObjectsApi(kube)

    def create(self, plural: str, name: str, spec: dict[str, Any], **metadata: Any) -> dict[str, Any]:
        kind = {"loraexperiments": "LoRAExperiment", "loraengines": "LoRAEngine"}[plural]
        body = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}
        return dict(self.custom.create_namespaced_custom_object(GROUP, VERSION, self.namespace, plural, body))

    def experiment(self, name: str, *, max_steps: int = 3, arguments: dict[str, str] | None = None, **spec: Any) -> str:
        """Creates one that the engine `main` takes, with `spec` laid over; its uid."""
        whole = {
            "engineRef": {"name": "main"},
            "environment": {"name": "WordProblems", "arguments": arguments or {}},
            "data": {"builtin": "Generated"},
            "maxSteps": max_steps,
            **spec,
        }
        given = {key: value for key, value in whole.items() if value is not None}
        created = self.create("loraexperiments", name, given)
        return str(created["metadata"]["uid"])

    def engine(self, endpoint: str, name: str = "main", **metadata: Any) -> None:
        """An engine that runs already, with its token."""
        secret = {"metadata": {"name": f"{name}-token"}, "stringData": {"token": TOKEN}}
        self.core.create_namespaced_secret(self.namespace, secret)
        reference = {"name": f"{name}-token"}
        spec = {"model": {"name": "simulated"}, "endpoint": endpoint, "tokenSecretRef": reference}
        self.create("loraengines", name, spec, **metadata)

    def items(self, plural: str = "loraexperiments") -> list[dict[str, Any]]:
        return list(self.custom.list_namespaced_custom_object(GROUP, VERSION, self.namespace, plural)["items"])

    def get(self, name: str, plural: str = "loraexperiments") -> dict[str, Any]:
        return dict(self.custom.get_namespaced_custom_object(GROUP, VERSION, self.namespace, plural, name))

    def patch(self, name: str, body: dict[str, Any], plural: str = "loraexperiments") -> None:
        self.custom.patch_namespaced_custom_object(GROUP, VERSION, self.namespace, plural, name, body)

    def patch_status(self, name: str, body: dict[str, Any], plural: str = "loraexperiments") -> None:
        self.custom.patch_namespaced_custom_object_status(GROUP, VERSION, self.namespace, plural, name, body)

    def long_idle(self, name: str) -> None:
        """Moves back the time at which an engine was unused: the operator's only clock for its sleep."""
        idle = self.wait_reason(name, "Idle", "Unused", plural="loraengines")
        conditions = status(idle)["conditions"]
        for one in conditions:
            if one["type"] == "Idle":
                one["lastTransitionTime"] = LONG_AGO
        version = {"resourceVersion": idle["metadata"]["resourceVersion"]}
        self.patch_status(name, {"metadata": version, "status": {"conditions": conditions}}, "loraengines")

    def delete(self, name: str, plural: str = "loraexperiments") -> None:
        self.custom.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, plural, name)

    def exists(self, name: str, plural: str = "loraexperiments") -> bool:
        try:
            self.get(name, plural)
        except ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    def wait(
        self,
        name: str,
        condition: Callable[[dict[str, Any]], bool],
        what: str,
        *,
        plural: str = "loraexperiments",
        seconds: float = SECONDS,
    ) -> dict[str, Any]:
        """The first version of an object for which `condition` holds, by a watch."""
        last: dict[str, Any] = {}
        listing = self.custom.list_namespaced_custom_object
        for event in watch.Watch().stream(
            listing,
            GROUP,
            VERSION,
            self.namespace,
            plural,
            timeout_seconds=round(seconds),
            field_selector=f"metadata.name={name}",
        ):
            last = event["object"]
            if event["type"] != "DELETED" and condition(last):
                return last
        pytest.fail(
            f"waited {seconds:.0f} s in vain for {what}; the last status of {name} was\n{yaml.dump(last.get('status'))}"
        )

    def wait_state(self, name: str, *states: str, seconds: float = SECONDS) -> dict[str, Any]:
        return self.wait(name, lambda o: status(o).get("state") in states, f"state {'/'.join(states)}", seconds=seconds)

    def wait_reason(self, name: str, kind: str, reason: str, *, plural: str = "loraexperiments") -> dict[str, Any]:
        return self.wait(
            name, lambda o: condition(o, kind).get("reason") == reason, f"{kind} for reason {reason}", plural=plural
        )

    def wait_gone(self, name: str, *, plural: str = "loraexperiments", seconds: float = SECONDS) -> None:
        wait_for(lambda: not self.exists(name, plural), f"{name} to be gone", seconds)

    def event_reasons(self, name: str) -> list[str]:
        items = self.core.list_namespaced_event(self.namespace, field_selector=f"involvedObject.name={name}").items
        return [item.reason for item in items]

    def wait_events(self, name: str, *reasons: str) -> list[str]:
        """The reasons of all events of an object once these are among them; events follow the write they tell of."""
        wait_for(lambda: set(reasons) <= set(self.event_reasons(name)), f"events {', '.join(reasons)} of {name}")
        return self.event_reasons(name)


def status(resource: dict[str, Any]) -> dict[str, Any]:
    return dict(resource.get("status") or {})


def condition(resource: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status(resource).get("conditions", []) if c["type"] == kind), {})


def wait_for(check: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    """For what has no event to wait for: a process that comes up, an object that goes."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.05)


def grant(kube: client.ApiClient, namespace: str, subject: dict[str, str]) -> None:
    """RULES in `namespace` for a ServiceAccount."""
    rbac, name = client.RbacAuthorizationV1Api(kube), subject["name"]
    rbac.create_namespaced_role(namespace, {"metadata": {"name": name}, "rules": RULES})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    rbac.create_namespaced_role_binding(namespace, {"metadata": {"name": name}, "subjects": [subject], "roleRef": role})


def restricted_kubeconfig(
    control_plane: ControlPlane | NodeCluster, kube: client.ApiClient, namespace: str, folder: Path
) -> Path:
    """The kubeconfig of a ServiceAccount that has RULES in `namespace` and CLUSTER_RULES, and nothing else."""
    core, rbac = client.CoreV1Api(kube), client.RbacAuthorizationV1Api(kube)
    name = "clora-operator"
    core.create_namespaced_service_account(namespace, {"metadata": {"name": name}})
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    grant(kube, namespace, subject)
    everywhere = f"{name}-{namespace}"
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": everywhere}
    binding = {"metadata": {"name": everywhere}, "subjects": [subject], "roleRef": role}
    rbac.create_cluster_role({"metadata": {"name": everywhere}, "rules": CLUSTER_RULES})
    rbac.create_cluster_role_binding(binding)
    token = core.create_namespaced_service_account_token(name, namespace, {"spec": {"expirationSeconds": 3600}})
    admin = yaml.safe_load(control_plane.kubeconfig.read_text())
    admin["users"] = [{"name": name, "user": {"token": token.status.token}}]
    for context in admin["contexts"]:
        context["context"]["user"] = name
    path = folder / "operator.kubeconfig"
    path.write_text(yaml.safe_dump(admin))
    path.chmod(0o600)
    return path


class Stage:
    """Starts what a test needs and ends it with the test."""

    def __init__(self, stack: ExitStack, folder: Path, kubeconfig: Path, cluster: Cluster) -> None:
        self._stack, self._folder, self.kubeconfig = stack, folder, kubeconfig
        self.cluster = cluster
        self._guests: list[Cluster] = []

    def guest(self, kube: client.ApiClient, namespace: str) -> Cluster:
        """Another namespace that the operator, started afterwards, watches too."""
        grant(
            kube, namespace, {"kind": "ServiceAccount", "name": "clora-operator", "namespace": self.cluster.namespace}
        )
        self._guests.append(Cluster(kube, namespace))
        self._stack.callback(release, self._guests[-1])
        return self._guests[-1]

    def start_engine(self, name: str = "main", **settings: Any) -> EngineProcess:
        """An engine that answers, and its LoRAEngine. `settings`: EngineProcess's."""
        engine = EngineProcess(self._folder / name, **settings)
        self._stack.callback(engine.kill)
        engine.start()
        self.cluster.engine(engine.endpoint, name, labels={"pool": "tests"})
        return engine

    def start_operator(self, **settings: str) -> OperatorProcess:
        operator = OperatorProcess(self.kubeconfig, self.cluster.namespace, self._folder / "operator.log", **settings)
        operator.namespaces += [guest.namespace for guest in self._guests]
        self._stack.callback(operator.kill)
        operator.start()
        return operator


@contextmanager
def staged(
    control_plane: ControlPlane | NodeCluster, kube: client.ApiClient, namespace: str, folder: Path
) -> Iterator[Stage]:
    kubeconfig = restricted_kubeconfig(control_plane, kube, namespace, folder)
    with ExitStack() as stack:
        yield Stage(stack, folder, kubeconfig, Cluster(kube, namespace))
        for log in folder.glob("operator.log"):
            print(log.read_text())  # shown with a test that has failed
        unlisted = unlisted_reasons(Cluster(kube, namespace))
        release(Cluster(kube, namespace))
        rbac = client.RbacAuthorizationV1Api(kube)
        rbac.delete_cluster_role_binding(f"clora-operator-{namespace}")
        rbac.delete_cluster_role(f"clora-operator-{namespace}")
        assert not unlisted, "reasons of conditions that are not in clora_api.v1alpha1.conditions.Reason"


def unlisted_reasons(cluster: Cluster) -> set[str]:
    """Those in the conditions that are there now, and in the Events, which tell of those that were."""
    resources = [*cluster.items("loraexperiments"), *cluster.items("loraengines")]
    said = {condition["reason"] for resource in resources for condition in status(resource).get("conditions", ())}
    events = cluster.core.list_namespaced_event(cluster.namespace).items
    told = {event.reason for event in events if event.source.component == FIELD_MANAGER}
    return (said | told) - set(Reason) - {GIVEN_UP}


@pytest.fixture
def stage(control_plane: ControlPlane, kube: client.ApiClient, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    with staged(control_plane, kube, namespace, tmp_path) as made:
        yield made


@pytest.fixture
def own_stage(fresh_control_plane: ControlPlane, tmp_path: Path) -> Iterator[Stage]:
    """A stage whose control plane may be broken."""
    with config.new_client_from_config(str(fresh_control_plane.kubeconfig)) as kube:
        client.CoreV1Api(kube).create_namespace({"metadata": {"name": "team"}})
        with staged(fresh_control_plane, kube, "team", tmp_path) as made:
            yield made


def release(cluster: Cluster) -> None:
    """Lets the test's namespace go when the operator is dead: no finalizer is left behind."""
    for item in cluster.items():
        if item["metadata"].get("finalizers"):
            cluster.patch(item["metadata"]["name"], {"metadata": {"finalizers": None}})
