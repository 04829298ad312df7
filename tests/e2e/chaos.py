"""Makes trouble for a while, at random but from a seed: experiments of three priorities come, go, pause and go on;
engines are drained; operator, engines and API server are killed. Says in the end what was done."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from local.control_plane import ControlPlane
from tests.integration.operator_fixtures import Cluster, EngineProcess, OperatorProcess

PRIORITIES: dict[str, int] = {"chaos-high": 100, "chaos-middle": 10}
NAMES = [f"run-{number}" for number in range(12)]  # few, so that names come again while their namesakes still go
PAUSE_SECONDS = 0.4  # between two troubles, on average
DOWN_SECONDS = 2.0  # at most


@dataclass(slots=True)
class Chaos:
    """Everything that can be struck. `done` counts what was."""

    seed: int
    control_plane: ControlPlane
    cluster: Cluster
    engines: dict[str, EngineProcess]
    operator: OperatorProcess
    done: Counter[str] = field(default_factory=Counter)

    def run(self, seconds: float) -> None:
        rng = random.Random(self.seed)
        troubles = {
            self.create: 10,
            self.delete: 4,
            self.suspend_or_resume: 5,
            self.drain_or_not: 1,
            self.kill_operator: 1.5,
            self.kill_engine: 1.5,
            self.restart_api_server: 0.3,
        }
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            (trouble,) = rng.choices(list(troubles), weights=list(troubles.values()))
            try:
                trouble(rng)
                self.done[trouble.__name__] += 1
            except (ApiException, HTTPError) as error:  # the name is taken, or gone, or the API server is
                self.done[f"{trouble.__name__}: {getattr(error, 'status', None) or type(error).__name__}"] += 1
            time.sleep(rng.expovariate(1 / PAUSE_SECONDS))

    def create(self, rng: random.Random) -> None:
        name, steps = rng.choice(NAMES), rng.randint(3, 30)
        arguments = {"stepSeconds": f"{rng.uniform(0.02, 0.3):.2f}", "loadSeconds": f"{rng.choice((0.0, 0.5)):.1f}"}
        if rng.random() < 0.2:
            arguments |= {"failAtStep": str(rng.randint(1, steps)), "failures": str(rng.randint(1, 6))}
        chosen = {"name": rng.choice(list(self.engines))}
        by_labels = rng.random() < 0.5
        self.cluster.experiment(
            name,
            max_steps=steps,
            arguments=arguments,
            engineRef=None if by_labels else chosen,
            engineSelector={"matchLabels": {"pool": "tests"}} if by_labels else None,
            deletionPolicy=rng.choice(("Retain", "Delete")),
            priorityClassName=rng.choice((None, None, *PRIORITIES)),
        )

    def delete(self, rng: random.Random) -> None:
        self.cluster.delete(rng.choice(NAMES))

    def suspend_or_resume(self, rng: random.Random) -> None:
        self.cluster.patch(rng.choice(NAMES), {"spec": {"suspend": rng.random() < 0.4}})

    def drain_or_not(self, rng: random.Random) -> None:
        self.cluster.patch(rng.choice(list(self.engines)), {"spec": {"drain": rng.random() < 0.4}}, "loraengines")

    def kill_operator(self, rng: random.Random) -> None:
        self.operator.kill()
        time.sleep(rng.uniform(0, DOWN_SECONDS))
        self.operator.start()

    def kill_engine(self, rng: random.Random) -> None:
        engine = self.engines[rng.choice(list(self.engines))]
        engine.kill()
        time.sleep(rng.uniform(0, DOWN_SECONDS))
        engine.start()

    def restart_api_server(self, _rng: random.Random) -> None:
        self.control_plane.restart("apiserver")
