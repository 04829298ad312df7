"""No tenant ever gets another's answer: many tenants' requests, versions that come and go, and each answer judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from clora_engine.sampler import Lease, Sampler
from clora_engine.sampler_config import SamplerConfig
from clora_engine.types import Sample, SamplingParams
from clora_engine.versions import State
from tests.isolation_run import Traffic, drive, isolation_config, judge, run
from tests.sampler_fixtures import make_model

pytestmark = pytest.mark.integration

REQUESTS = 2000
MOST_EXCUSED = 0.005


def test_every_answer_is_that_of_its_version_alone(tmp_path: Path) -> None:
    report = run(make_model(tmp_path / "model"), tmp_path, requests=REQUESTS, seed=0)
    print(report)
    assert report.alike == 0
    assert report.mismatches == 0
    assert report.excused <= MOST_EXCUSED * report.greedy_samples
    assert report.max_logprob_gap <= 1e-3
    # and it was the crowd that it is meant to be
    assert report.requests == REQUESTS
    assert report.versions_answered > 50
    assert report.publishes > 80
    assert min(report.retirements, report.cancelled) > 5
    assert report.full_share > 0.5


OTHER = {"experiment-0": "experiment-1", "experiment-1": "experiment-0"}


class MixedUp(Sampler):
    """Leases of these two experiments are of the other's version, where it has one. mixed: the samples under them."""

    def __init__(self, config: SamplerConfig) -> None:
        super().__init__(config)
        self.mixed: list[Sample] = []
        self._swapped: list[Lease] = []

    def lease(self, experiment: str, *, serving: bool = False) -> Lease:
        live = {stats.version.experiment for stats in self.stats().versions if stats.state is State.LIVE}
        other = OTHER.get(experiment, experiment)
        lease = super().lease(other if other in live else experiment, serving=serving)
        if lease.version.experiment != experiment:
            self._swapped.append(lease)
        return lease

    async def sample(
        self, lease: Lease | None, prompt_ids: Sequence[int], n: int, params: SamplingParams
    ) -> list[Sample]:
        samples = await super().sample(lease, prompt_ids, n, params)
        if lease in self._swapped:
            self.mixed += samples
        return samples


async def test_two_experiments_that_are_mixed_up_are_found_out(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")

    sampler = MixedUp(isolation_config(model, tmp_path))
    async with sampler:
        recording = await drive(sampler, tmp_path / "copies", Traffic(requests=200, seed=1))
    report = judge(model, recording)
    print(report)
    touched = len(sampler.mixed)
    assert touched > 20
    assert 0.8 * touched < report.mismatches <= touched
    assert {version.split("@")[0] for version in report.mismatched} == set(OTHER)
    assert report.max_logprob_gap > 0.1
