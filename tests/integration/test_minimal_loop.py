"""docs/minimal_loop.py does what it says: with the real vLLM, the real trainer and SmolLM2, for two small steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.minimal_loop import Settings, learn
from local.model import model as smollm2

pytestmark = pytest.mark.integration

SMALL = Settings(steps=2, prompts=2, group_size=4)


async def test_the_minimal_loop_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rewards = await learn(smollm2(), SMALL, tmp_path / "versions")
    said = capfd.readouterr().out.splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in said if line.startswith("demonstrations")]
    assert len(losses) == SMALL.demonstrations // 8
    assert losses[-1] < losses[0] / 2  # it has learnt the form of the answers
    assert [line.partition(":")[0] for line in said if line.startswith("step")] == ["step 1", "step 2"]
    assert len(rewards) == 2
    assert all(0.0 <= reward <= 1.0 for reward in rewards)
    assert not list((tmp_path / "versions").iterdir())  # every version was removed
