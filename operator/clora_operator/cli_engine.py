"""The command line's way to an engine's control API: its endpoint, or a port-forward to its pod, with its token.

Who may read the token's Secret may do so; clora's own rights are not used.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

from clora_operator import workload
from clora_operator.children import of_a_workload
from clora_operator.decide_sleep import asleep
from clora_operator.kube import ENGINES, EXPERIMENTS, Kube
from clora_operator.observer import decode_token
from clora_operator.pod_template import ENGINE_LABEL, PORT, ROLE_LABEL, WORKER
from clora_operator.resources import Engine, Experiment, parse_engine, parse_experiment

TIMEOUT_SECONDS = 60.0


def find_experiment(kube: Kube, namespace: str, name: str) -> Experiment:
    """Raises LookupError with a sentence for people."""
    body = kube.get(EXPERIMENTS, namespace, name)
    if body is None:
        raise LookupError(f"there is no LoRAExperiment {name} in namespace {namespace}")
    return parse_experiment(body)


class EngineAccess:
    """Requests to the engine that has `experiment`. Raises LookupError where there is no engine or no token."""

    def __init__(self, kube: Kube, experiment: Experiment) -> None:
        namespace, told = experiment.engine_namespace, experiment.status.engine
        if told is None:
            raise LookupError(f"{experiment.meta.name} has not been on an engine yet")
        body = kube.get(ENGINES, namespace, told.name)
        if body is None:
            raise LookupError(f"there is no LoRAEngine {told.name} in namespace {namespace}")
        self._kube, self._engine = kube, parse_engine(body)
        if asleep(self._engine):
            raise LookupError(f"LoRAEngine {told.name} is asleep: an experiment that is to run on it wakes it")
        secret, key = workload.token_secret(self._engine)
        token = decode_token(kube.secret(namespace, secret), key)
        if token is None:
            raise LookupError(f"there is no token with key {key} in Secret {secret} of namespace {namespace}")
        self._token = token

    @contextmanager
    def get(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """The answer's body as a stream. Raises LookupError when the engine answers with a problem."""
        with closing(_connect(self._kube, self._engine)) as connection:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise LookupError(_problem(answer))
            yield answer


def _connect(kube: Kube, engine: Engine) -> http.client.HTTPConnection:
    endpoint = engine.spec.endpoint if engine.spec else None
    if endpoint is None:
        connection = http.client.HTTPConnection("localhost", timeout=TIMEOUT_SECONDS)
        connection.sock = kube.port_forward(engine.meta.namespace, pod_of(kube, engine), PORT)
        return connection
    parts = urlsplit(endpoint)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)


def pod_of(kube: Kube, engine: Engine) -> str:
    """Name of the one with the API. Raises LookupError where there is none."""
    selector = f"{ENGINE_LABEL}={engine.meta.name},{ROLE_LABEL}!={WORKER}"
    found = [pod["metadata"] for pod in kube.pods(engine.meta.namespace, selector) if of_a_workload(pod)]
    living = sorted(meta["name"] for meta in found if not meta.get("deletionTimestamp"))
    if not living:
        raise LookupError(f"LoRAEngine {engine.meta.name} has no pod now")
    return str(living[0])


def _problem(answer: http.client.HTTPResponse) -> str:
    try:
        detail = json.loads(answer.read(65536))["detail"]
    except (ValueError, KeyError, TypeError):
        detail = answer.reason
    return f"the engine answered {answer.status}: {detail}"
