"""The loop with every choice of algorithm, on the real trainer: what is called, what is reported, what is left."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from clora_api.control import Phase
from clora_engine import plan as planning
from clora_engine.adapter_state import GRAD
from clora_engine.rollout import Rollouts
from clora_engine.types import AdamParams, Group, OptimResult
from tests.unit.engine.loop import UID, Life, desired


async def finished(tmp_path: Path, **changes: Any) -> Life:
    life = Life(tmp_path, desired(**changes))
    experiment = await life.run()
    assert experiment.phase is Phase.SUCCEEDED, experiment.report(0)
    assert life.trainer.adapters == []  # also that of the start
    assert [line["step"] for line in life.metrics()] == [0, 1, 2, 3]
    return life


async def test_a_plain_run(tmp_path: Path) -> None:
    life = await finished(tmp_path)
    assert life.trainer.calls == ["forward_backward", "optim_step"] * 3
    assert life.sampler.published == [0, 1, 2, 3]
    assert len({life.weights(step) for step in range(4)}) == 4
    line = life.metrics()[3]
    assert line["updates"] == 1
    assert (line["policy_lag_mean"], line["policy_lag_max"]) == (0, 0)
    assert line["sampler_kl"] == line["kl_k3"] > 0
    for phase in ("rollout", "wait_rollout", "environment", "prepare", "train", "publish", "evaluate", "step"):
        assert line[f"{phase}_seconds"] >= 0, phase


async def test_a_skipped_update_is_reported_and_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path, desired())
    trainer, optim_step = life.trainer, life.trainer.optim_step

    async def second_is_poisoned(adapter: str, adam: AdamParams) -> OptimResult:
        if trainer.calls.count("optim_step") == 1:
            (slot,) = trainer._trainer.store.swap_in([adapter])
            slot.buffers[GRAD][5] = math.nan
        return await optim_step(adapter, adam)

    monkeypatch.setattr(trainer, "optim_step", second_is_poisoned)
    assert (await life.run()).phase is Phase.SUCCEEDED
    assert life.sampler.published == [0, 1, 3]
    assert [line.get("update_skipped") for line in life.metrics()] == [None, 0, 1, 0]
    assert [line.get("updates") for line in life.metrics()] == [None, 1, 0, 1]
    assert life.weights(2) == life.weights(1) != life.weights(3)


async def test_epochs_and_minibatches_make_several_updates(tmp_path: Path) -> None:
    life = await finished(tmp_path, algorithm={"epochsPerBatch": 2, "minibatches": 3})
    updates = sum(line.get("updates", 0) for line in life.metrics())
    assert life.trainer.calls.count("optim_step") == updates > 3 * 2
    again = await finished(tmp_path / "again", algorithm={"epochsPerBatch": 2, "minibatches": 3})
    assert again.weights(3) == life.weights(3)


async def test_the_start_is_what_kl_is_measured_from(tmp_path: Path) -> None:
    plain = await finished(tmp_path / "plain")
    life = await finished(tmp_path / "kl", algorithm={"klCoefficient": "0.5"})
    assert life.trainer.calls == ["forward /start", "forward_backward", "optim_step"] * 3
    assert all("kl_to_start" in line for line in life.metrics()[1:])
    assert life.weights(1) != plain.weights(1)


async def test_entropy_changes_the_update_without_a_pass_of_its_own(tmp_path: Path) -> None:
    plain = await finished(tmp_path / "plain")
    life = await finished(tmp_path / "entropy", algorithm={"entropyCoefficient": "0.1"})
    assert life.trainer.calls == plain.trainer.calls
    assert life.weights(1) != plain.weights(1)


async def test_importance_weights_ask_the_trainer_first(tmp_path: Path) -> None:
    life = await finished(tmp_path, algorithm={"maxImportanceWeight": "2"})
    assert life.trainer.calls == ["forward itself", "forward_backward", "optim_step"] * 3
    line = life.metrics()[1]
    assert line["ratio"] == pytest.approx(1.0, abs=1e-4)  # to the trainer's own policy
    assert line["sampler_kl"] > 0.01
    assert 0 < line["importance_weight"] <= 2


async def test_refilled_steps_go_on_where_they_ended_in_the_data(tmp_path: Path) -> None:
    algorithm = {"maxRefillPrompts": 5, "promptsPerStep": 8, "groupSize": 2}
    life = await finished(tmp_path, algorithm=algorithm)
    refilled = [int(line.get("groups_refilled", 0)) for line in life.metrics()]
    assert any(refilled)
    commit = life.experiment._commit
    assert commit is not None
    assert commit.manifest.position == 3 * 8 + sum(refilled)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"truncatedCompletions": "Mask"},
        {"truncatedCompletions": "Punish", "truncationPenalty": "0.5"},
        {"lossNormalization": "Sequences"},
        {"normalizeByStd": False},
        {"estimator": "Reinforce", "loss": "ImportanceSampling"},
    ],
)
async def test_each_choice_changes_what_is_learnt(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    plain = await finished(tmp_path / "plain")
    chosen = await finished(tmp_path / "chosen", algorithm=algorithm)
    assert chosen.weights(1) != plain.weights(1)


@pytest.mark.parametrize("off_policy", [1, 2])
async def test_steps_are_drawn_ahead_and_say_how_old_their_policy_is(tmp_path: Path, off_policy: int) -> None:
    life = Life(tmp_path, desired(maxSteps=4, algorithm={"maxOffPolicySteps": off_policy}))

    async def until_drawn_ahead() -> None:
        step = life.experiment._progress.step + 1
        awaited = min(4, step + off_policy)
        while len(life.experiment._journal.read_groups(awaited)) < 3:  # noqa: ASYNC110 - the log has no event
            await asyncio.sleep(0)

    life.trainer.before_update = until_drawn_ahead
    assert (await life.run()).phase is Phase.SUCCEEDED
    lags = [line["policy_lag_max"] for line in life.metrics()[1:]]
    assert lags == [min(step - 1, off_policy) for step in range(1, 5)]


async def test_the_best_commit_is_marked_reported_and_kept(tmp_path: Path) -> None:
    evaluation = {"examples": 6, "everySteps": 1, "samples": 3, "temperature": "0.7"}
    life = Life(tmp_path, desired(maxSteps=6, evaluation=evaluation, checkpoint={"keep": 1}))
    accuracies = iter([0.1, 0.4, 0.9, 0.2, 0.9, 0.3, 0.5])
    original = Rollouts.evaluate

    async def evaluate(self: Any, examples: Any, **options: Any) -> dict[str, float]:
        found: dict[str, float] = await original(self, examples, **options)
        return found | {"eval_accuracy": next(accuracies)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollouts, "evaluate", evaluate)
        experiment = await life.run()
    report = experiment.report(0)
    assert report.best is not None
    assert (report.best.step, report.best.metric, report.best.value) == (2, "evalAccuracy", 0.9)
    assert experiment._journal.commits() == [0, 2, 5, 6]
    assert all({"eval_pass_at_k", "eval_mean_at_k"} <= set(line) for line in life.metrics())


async def test_without_evaluation_reward_marks_the_version_it_was_drawn_with(tmp_path: Path) -> None:
    life = await finished(tmp_path)
    rewards = {line["step"]: line["reward_mean"] for line in life.metrics()[1:]}
    best = max(rewards, key=lambda step: (rewards[step], -step))
    report = life.experiment.report(0)
    assert report.best is not None
    assert (report.best.step, report.best.value) == (best - 1, rewards[best])


async def test_a_supervised_run_by_sequences(tmp_path: Path) -> None:
    algorithm = {"estimator": "SFT", "loss": "CrossEntropy", "lossNormalization": "Sequences", "epochsPerBatch": 2}
    environment = {"name": "WordProblems", "arguments": {"families": "kitchen"}}
    life = await finished(tmp_path, algorithm=algorithm, environment=environment, data={"builtin": "Generated"})
    assert [line["updates"] for line in life.metrics()[1:]] == [2, 2, 2]
    assert life.sampler.sampled == 0


def test_the_reference_is_no_name_that_a_tenant_can_have() -> None:
    assert "/" not in UID


async def test_an_environment_that_does_not_end_costs_no_step_at_a_shutdown(tmp_path: Path) -> None:
    life = Life(tmp_path, desired(maxSteps=3, checkpoint={"every": 3}))
    resting = asyncio.Event()

    async def rest() -> None:
        resting.set()
        await asyncio.Event().wait()

    async def stop() -> None:
        if life.experiment._progress.step == 1:
            life.experiment.stop_for_shutdown()

    life.trainer.before_update = stop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(life.experiment._training, "rest", rest)
        running = asyncio.create_task(life.run())
        await resting.wait()
        running.cancel()  # as the engine does with what has not ended in time
        await asyncio.wait([running])
    assert life.experiment._journal.commits() == [0, 2]


@pytest.mark.parametrize("every", [1, 2])
async def test_reward_marks_a_commit_however_far_ahead_is_drawn_and_seldom_committed(
    tmp_path: Path, every: int
) -> None:
    checkpoint = {"every": every, "keep": 1}
    life = Life(tmp_path, desired(maxSteps=6, checkpoint=checkpoint, algorithm={"maxOffPolicySteps": 2}))
    experiment = await life.run()
    report = experiment.report(0)
    assert report.best is not None
    assert report.best.step in experiment._journal.commits()
    assert report.best.step % every == 0


async def test_a_new_life_measures_versions_by_what_the_earlier_one_drew(tmp_path: Path) -> None:
    wanted = desired(maxSteps=5, algorithm={"maxOffPolicySteps": 2}, checkpoint={"keep": 9})
    whole = await Life(tmp_path / "whole", wanted).run()
    first = Life(tmp_path / "parts", wanted)

    async def stop() -> None:
        if first.experiment._progress.step == 2:
            first.experiment.stop_for_shutdown()

    first.trainer.before_update = stop
    await first.run()
    assert first.experiment._journal.commits()[-1] == 3
    second = await Life(tmp_path / "parts", wanted, epoch=2).run()
    assert second.phase is whole.phase is Phase.SUCCEEDED
    assert second.report(0).best is not None
    for experiment in (whole, second):
        drawn = [g for step in range(1, 6) for g in experiment._journal.read_groups(step).values()]
        best = experiment.report(0).best
        assert best is not None
        rewards = [t.reward for g in drawn if g.version_step == best.step for t in g.trajectories if not t.error]
        assert best.value == pytest.approx(sum(rewards) / len(rewards))


async def test_an_attempt_forgets_what_was_drawn_once_and_its_later_lives_keep_it(tmp_path: Path) -> None:
    drawn = Group(index=0, example=0, version_step=0, prompt=[1], trajectories=[])
    for epoch, attempt, kept in ((1, 1, []), (2, 1, [0]), (3, 2, [])):
        experiment = Life(tmp_path, desired().model_copy(update={"attempt": attempt}), epoch).experiment
        experiment._journal.claim("n", "e")
        experiment._journal.append_group(1, drawn)
        experiment._forget_what_failed(1)
        assert sorted(experiment._journal.read_groups(1)) == kept


async def test_a_step_of_too_many_demonstrations_fails_by_its_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = {"estimator": "SFT", "loss": "CrossEntropy"}
    rows = json.dumps({"question": "How many?", "answer": "72", "expressions": ["100-7*4"]})
    monkeypatch.setattr(planning, "MAX_STEP_TOKENS", 10)
    life = Life(tmp_path, desired(algorithm=algorithm).model_copy(update={"data_text": rows}))
    report = (await life.run()).report(0)
    assert (report.phase, report.field) == (Phase.FAILED, "algorithm.promptsPerStep")
