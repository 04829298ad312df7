"""What the peers are given to do is what clora does, and the arithmetic of their figures."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from benchmarks.engine_runs import Ended, rl_spec
from benchmarks.peers import table
from benchmarks.peers.environments import source_path
from benchmarks.peers.runs import clora_record, skyrl_record, trl_record
from benchmarks.peers.work import Episodes, StepTokens, Work, step_tokens
from benchmarks.report import ROOT
from clora_engine.plan import Plan
from clora_engine.rollout import Rollouts
from clora_engine.rollout_config import Prompt, RolloutConfig
from clora_engine.types import Group, Sample, SamplingParams, Trajectory, Version
from tests.unit.engine.chat_fixtures import CHATML, tiny_tokenizer

CONTEXT, PROMPTS, GROUP = 2048, 6, 8
ANSWERS = ('{"calculator": "100-7*4"}', '{"calculator": "1/0"}', '{"final_answer": 72}', "Seventy-two.")
SETTINGS = {"dtype": "float32", "micro_batch": 16, "generation": "static"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer(CHATML).save_pretrained(folder)
    environment = {"name": "WordProblems", "arguments": {"families": "kitchen"}}
    spec = rl_spec(environment, seed=3, prompts=PROMPTS, group=GROUP, steps=2)
    return Work(spec=spec, model=str(folder), adapter="", max_context=CONTEXT, settings={}, out="").plan()


class Writer:
    """A sampler whose answers depend on the history and on a sample's place alone; also clora's lease of it."""

    version = Version("peer", 0)

    def __init__(self, plan: Plan) -> None:
        tokenizer = tiny_tokenizer(CHATML)
        right = {plan.data.train.example(place)["answer"] for place in range(2 * PROMPTS)}
        texts = (*ANSWERS, *(f'{{"final_answer": {answer}}}' for answer in sorted(right)))
        end = plan.renderer.stop_token_ids[-1]
        self._turns = [(*tokenizer.encode(text, add_special_tokens=False), end) for text in texts]

    def write(self, history: Sequence[int], n: int) -> list[Sample]:
        rng = random.Random(f"{list(history)}")
        found = []
        for ids in rng.choices(self._turns, weights=[4] * len(ANSWERS) + [1] * (len(self._turns) - len(ANSWERS)), k=n):
            cut = rng.random() < 0.1
            written = ids[:-1] if cut else ids
            found.append(Sample(ids=written, logprobs=(-0.5,) * len(written), truncated=cut))
        return found

    async def sample(self, lease: Writer, prompt_ids: Sequence[int], n: int, params: SamplingParams) -> list[Sample]:
        return self.write(prompt_ids, n)

    def lease(self, experiment: str) -> Writer:
        return self

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


def by_turns(plan: Plan, writer: Writer, position: int) -> list[Group]:
    episodes = Episodes(plan, position, CONTEXT)
    while episodes.open:
        for group in episodes.groups:
            alike = defaultdict(list)
            for episode in group:
                if episode.open:
                    alike[episode.history].append(episode)
            for history, members in alike.items():
                for member, sample in zip(members, writer.write(history, len(members)), strict=True):
                    episodes.answer(member, sample.ids, sample.logprobs)
    return episodes.finished()


@pytest.mark.parametrize("position", [0, PROMPTS])
def test_a_peer_plays_the_episodes_that_clora_plays(plan: Plan, position: int) -> None:
    writer = Writer(plan)
    config = RolloutConfig(
        experiment="peer", group_size=GROUP, temperature=1.0, max_tokens=40, max_turns=3, max_context=CONTEXT
    )
    prompts = [Prompt(i, position + i, plan.data.train.example(position + i)) for i in range(PROMPTS)]
    own = asyncio.run(Rollouts(writer, plan.renderer, plan.factory, config).step(prompts))
    played = [trajectory for group in own for trajectory in group.trajectories]
    assert {t.turns for t in played} == {1, 2, 3}, "all that can happen does"
    assert {t.reward for t in played} == {0.0, 1.0}
    assert any(t.truncated for t in played)
    assert by_turns(plan, writer, position) == own


def test_the_tokens_of_a_step() -> None:
    def trajectory(mask: list[int], reward: float) -> Trajectory:
        return Trajectory(ids=[7] * len(mask), mask=mask, logprobs=[0.0] * len(mask), reward=reward, turns=1)

    groups = [
        Group(index=0, example=0, version_step=0, prompt=[1] * 5, trajectories=[trajectory([1, 1, 0, 1], 1.0)] * 2),
        Group(index=1, example=1, version_step=0, prompt=[1] * 7, trajectories=[trajectory([1], 0.0)] * 2),
    ]
    # rows: 2 * (5 + 4) + 2 * (7 + 1); padded: four rows of the longest prompt and the longest completion
    assert step_tokens(groups) == StepTokens(sampled=8, rows=34, padded=4 * (7 + 4), reward_mean=0.5)


def test_the_time_of_trls_run() -> None:
    tokens = {"sampled": 10, "rows": 100, "padded": 120, "reward_mean": 0.5}
    events = [
        {"event": "begin", "time": 130.0},
        {"event": "rollout", "time": 140.0, "seconds": 9.0, **tokens},
        {"event": "step", "time": 150.0, "step": 1},
        {"event": "rollout", "time": 157.0, "seconds": 6.0, **tokens},
        {"event": "step", "time": 165.0, "step": 2},
    ]
    found = trl_record(100.0, 170.0, events)
    assert (found["cold_seconds"], found["job_seconds"], found["process_seconds"]) == (50.0, 35.0, 70.0)
    times = [(step["step"], step["seconds"], step["rollout_seconds"], step["train_seconds"]) for step in found["steps"]]
    assert times == [(1, 20.0, 9.0, 11.0), (2, 15.0, 6.0, 9.0)]


def job(ended: float, reward: float) -> Ended:
    line = {"step_seconds": 4.0, "rollout_seconds": 2.0, "sampled_tokens": 50.0, "reward_mean": reward}
    trained = {"train_seconds": 1.0, "trained_tokens": 30.0}
    return Ended("job", 0.0, ended, [{"step": 0}, {"step": 1, **line, **trained}, {"step": 2, **line, **trained}])


def records() -> list[dict[str, Any]]:
    """Two repetitions, in which TRL takes 35 and 70 s for a job, and clora 10 and 14 s alone, 40 and 70 s for eight."""
    tokens = {"sampled": 10, "rows": 100, "padded": 120, "reward_mean": 0.5}
    made: list[dict[str, Any]] = [{"part": "trial", "tried": [{**SETTINGS, "error": "no kernel"}]}]
    for repetition, (trl, alone, last) in enumerate([(35.0, 10.0, 40.0), (70.0, 14.0, 70.0)]):
        events = [
            {"event": "begin", "time": 20.0},
            {"event": "rollout", "time": 0.0, "seconds": 5.0, **tokens},
            {"event": "step", "time": 20.0 + trl},
        ]
        made.append({"part": f"trl-{repetition}", **trl_record(0.0, 20.0 + trl + 1.0, events)})
        together = clora_record([job(last - 10.0, 0.4)] * 7 + [job(last, 0.6)])
        clora = {"start_seconds": 30.0, "alone": clora_record([job(alone, 0.5)]), "together": together}
        made.append({"part": f"clora-{repetition}", **clora})
    answers = {"publish_seconds": 1.0, "rollout_seconds": 10.0, "train_seconds": 20.0, "trained_tokens": 800, **tokens}
    runs = [
        skyrl_record(
            clients,
            [{"event": "created", "time": 0.0}]
            + [{"event": "step", "time": 50.0 * n + c, "step": n, **answers} for n in (1, 2) for c in range(clients)],
        )
        for clients in (1, 4)
    ]
    made.append({"part": "skyrl", "supervised": [{"train_seconds": 9.0}] * 3, "runs": runs})
    return made


def test_headlines_are_medians_of_each_repetitions_ratio() -> None:
    found = table.headlines(records(), at_once=8)
    assert found["over_trl_serial"] == 7.5  # 8 * 35 / 40 and 8 * 70 / 70
    assert found["over_trl_serial_cold"] == pytest.approx((8 * 56 / 40 + 8 * 91 / 70) / 2)
    assert found["over_trl_single"] == 4.25  # 3.5 and 5
    assert found["trl_cold_seconds"] == 72.5
    assert found["clora_step_seconds"] == 4.0
    assert found["clora_sampling_tokens_per_second"] == 25.0
    assert found["skyrl_sampling_tokens_per_second"] == 1.0
    assert found["skyrl_training_tokens_per_second"] == 40.0


def test_first_mean_and_last_come_from_one_run() -> None:
    together = records()[2]["together"]
    assert (together["first_seconds"], together["mean_seconds"], together["last_seconds"]) == (30.0, 31.25, 40.0)
    assert len(together["steps"]) == 16


def test_skyrls_steps_end_with_the_last_client() -> None:
    assert [run["wall_seconds"] for run in records()[-1]["runs"]] == [[50.0, 50.0], [53.0, 50.0]]


def test_the_fastest_settings_are_those_of_the_least_time_a_token() -> None:
    tried = [
        {**SETTINGS, "micro_batch": 8, "step": {"seconds": 60.0, "trained_tokens": 6000}},
        {**SETTINGS, "micro_batch": 16, "step": {"seconds": 62.0, "trained_tokens": 6600}},
        {**SETTINGS, "micro_batch": 32, "error": "out of memory"},
    ]
    assert table.fastest(tried) == {**SETTINGS, "micro_batch": 16}


def test_the_page_says_what_was_measured_and_what_did_not_run() -> None:
    settings = {
        "steps": 2,
        "repetitions": 2,
        "prompts": 8,
        "group": 8,
        "at_once": 8,
        "trl": SETTINGS,
        "commits": ["abc"],
    }
    document = {
        "command": "python -m benchmarks.peers",
        "machine": {"cores": 2, "cpu": "a CPU", "features": ["avx2"], "memory_gib": 24},
        "versions": {"clora": "0.1.0"},
        "settings": {**settings, "trl_versions": {"trl": "1.16.0"}, "skyrl_versions": {"skyrl": "0.4.0"}},
        "headlines": table.headlines(records(), at_once=8),
        "records": records(),
    }
    page = table.render(document)
    assert "| `over_trl_serial` | 7.5 |" in page
    assert "does not run: `no kernel`" in page
    assert "| clora, 8 at once, the last | 55.00 (40.00–70.00) |" in page
    assert "| 4 | 50.00 (50.00–50.00) | 1.0 | 40.0 | 0.50 |" in page


@pytest.mark.parametrize("requirements", ["peer-trl.txt", "peer-skyrl.txt"])
def test_a_peers_environment_holds_what_the_episodes_need(requirements: str, tmp_path: Path) -> None:
    """Imports them where there is nothing but the standard library and what the file names."""
    lines = (ROOT / "requirements" / requirements).read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    for package in metadata.distributions():
        if re.sub(r"[-_.]+", "-", package.name).lower() in pinned:
            for top in {file.parts[0] for file in package.files or () if file.parts[0] != ".."}:
                if not (tmp_path / top).exists():
                    (tmp_path / top).symlink_to(Path(str(package.locate_file(top))))
    path = os.pathsep.join([source_path(), str(tmp_path)])
    command = [sys.executable, "-S", "-c", "import benchmarks.peers.work"]
    done = subprocess.run(command, env={"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
