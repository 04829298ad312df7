"""What only the engine can find wrong with a spec, by field; and learning-rate schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clora_api.control import DesiredExperiment
from clora_engine import plan
from clora_engine.advantages import Shape
from clora_engine.config import EngineConfig
from clora_engine.errors import UserError
from clora_engine.types import AdamParams
from tests.unit.engine.chat_fixtures import CHATML, REWRITING, tiny_tokenizer

SFT = {"estimator": "SFT", "loss": "CrossEntropy"}


def config(tmp_path: Path, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"model": "m", "storage": tmp_path, "token_file": tmp_path / "token"}
    return EngineConfig(**values | {"max_rank": 16, "max_model_len": 512} | changes)


def desired(data_text: str | None = None, **spec: Any) -> DesiredExperiment:
    base = {
        "engineRef": {"name": "e"},
        "environment": {"name": "WordProblems", "arguments": {"families": "kitchen"}},
        "data": {"builtin": "Generated"},
        "maxSteps": 10,
    }
    return DesiredExperiment.model_validate(
        {"uid": "u", "namespace": "n", "name": "x", "spec": base | spec, "dataText": data_text}
    )


def build(tmp_path: Path, wanted: DesiredExperiment, **changes: Any) -> plan.Plan:
    return plan.build(wanted, config(tmp_path, **changes), tiny_tokenizer(CHATML))


def refused(tmp_path: Path, wanted: DesiredExperiment, **changes: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        build(tmp_path, wanted, **changes)
    return caught.value


def test_warm_up_then_constant(tmp_path: Path) -> None:
    algorithm = {"learningRate": "1e-3", "optimizer": {"warmupSteps": 4}}
    made = build(tmp_path, desired(algorithm=algorithm))
    rates = [made.adam(step).learning_rate for step in (1, 2, 4, 5, 10)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3])


def test_every_setting_of_the_optimizer_reaches_the_trainer(tmp_path: Path) -> None:
    optimizer = {"beta1": "0.81", "beta2": "0.992", "epsilon": "3e-7", "weightDecay": "0.04", "maxGradNorm": "0.6"}
    made = build(tmp_path, desired(algorithm={"learningRate": "2e-4", "optimizer": optimizer}))
    wanted = AdamParams(learning_rate=2e-4, beta1=0.81, beta2=0.992, eps=3e-7, weight_decay=0.04, grad_clip_norm=0.6)
    assert made.adam(1) == wanted


def test_each_experiment_starts_from_a_seed_of_its_own_unless_it_names_one(tmp_path: Path) -> None:
    def seed(uid: str, **spec: Any) -> int:
        return build(tmp_path, desired(**spec).model_copy(update={"uid": uid})).lora.seed

    own = {uid: seed(uid) for uid in ("a", "b", "c")}
    assert len(set(own.values())) == 3, "default specs of equal shapes"
    assert all(0 <= each < 1 << 31 for each in own.values())
    assert seed("a", lora={"rank": 8}) == own["a"], "the uid's, whatever else is asked for and however often"
    assert [seed(uid, lora={"seed": 0}) for uid in own] == [0, 0, 0]


def test_linear_schedule_ends_at_a_tenth(tmp_path: Path) -> None:
    algorithm = {"learningRate": "1e-3", "optimizer": {"schedule": "Linear"}}
    made = build(tmp_path, desired(algorithm=algorithm))
    rates = [made.adam(step).learning_rate for step in (1, 6, 11)]
    assert rates == pytest.approx([1e-3, 1e-3 * (1 - 0.9 * 0.5), 1e-4])


def test_work_left_is_measured_once_there_is_a_step_and_bounded_by_the_spec_before(tmp_path: Path) -> None:
    made = build(
        tmp_path,
        desired(
            algorithm={"promptsPerStep": 4, "groupSize": 8},
            environment={"name": "WordProblems", "arguments": {"families": "kitchen"}, "maxTurns": 3},
            sampling={"maxTokens": 40},
        ),
    )
    assert made.remaining_tokens(0, None) == 10 * 4 * 8 * 3 * 40
    assert made.remaining_tokens(4, 500.0) == 6 * 500
    assert made.remaining_tokens(12, 500.0) == 0
    assert made.samples
    supervised = build(tmp_path, desired(algorithm=SFT | {"promptsPerStep": 4}, sampling={"maxTokens": 40}))
    assert (supervised.samples, supervised.remaining_tokens(0, None)) == (False, 10 * 4 * 40)
    assert supervised.remaining_tokens(4, 500.0) == 6 * 500
    assert build(tmp_path, desired(algorithm=SFT, evaluation={"examples": 2})).samples


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"lora": {"rank": 17}}, "lora.rank"),
        ({"sampling": {"maxTokens": 512}}, "sampling.maxTokens"),
        (
            {"environment": {"name": "WordProblems", "maxEpisodeTokens": 64}, "sampling": {"maxTokens": 64}},
            "sampling.maxTokens",
        ),
        ({"sampling": {"temperature": "0.001"}}, "sampling.temperature"),
        ({"sampling": {"temperature": "3"}}, "sampling.temperature"),
        ({"algorithm": {"clipLow": "1.1"}}, "algorithm.clipLow"),
        ({"algorithm": {"clipHigh": "0.9"}}, "algorithm.clipLow"),
        ({"algorithm": {"optimizer": {"beta2": "1.0"}}}, "algorithm.optimizer.beta2"),
        ({"algorithm": {"maxImportanceWeight": "0"}}, "algorithm.maxImportanceWeight"),
        ({"algorithm": SFT | {"maxImportanceWeight": "2"}}, "algorithm.maxImportanceWeight"),
        ({"algorithm": SFT | {"klCoefficient": "0.1"}}, "algorithm.klCoefficient"),
        ({"algorithm": SFT | {"entropyCoefficient": "0.1"}}, "algorithm.entropyCoefficient"),
        ({"algorithm": {"promptsPerStep": 4096, "groupSize": 1024}}, "algorithm.promptsPerStep"),
        ({"algorithm": {"maxOffPolicySteps": 3}}, "algorithm.maxOffPolicySteps"),
        ({"environment": {"name": "WordProblems", "arguments": {"families": "x"}}}, "environment.arguments.families"),
        ({"environment": {"name": "GSM8K"}}, "data"),
        ({"data": {"file": {"volume": "d", "path": "x.jsonl"}}}, "data.file.volume"),
        ({"initFrom": {"file": {"volume": "d", "path": "x"}}}, "initFrom.file.volume"),
        ({"data": {"configMap": {"name": "c", "key": "k"}}}, "data.configMap"),
        ({"data": {"hub": {"repo": "a/b", "revision": "v1", "file": "x.jsonl"}}}, "data.hub.repo"),
        ({"environment": {"name": "HTTP", "arguments": {"url": "http://a.svc"}}}, "environment.name"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, spec: dict[str, Any], field: str) -> None:
    assert refused(tmp_path, desired(**spec)).field == field


@pytest.mark.parametrize("pattern", ["a/b", "a/*"])
def test_data_sets_of_the_hub_are_for_those_that_the_owner_allows(tmp_path: Path, pattern: str) -> None:
    hub = {"repo": "a/b", "revision": "v1", "file": "x.jsonl"}
    allowed = refused(tmp_path, desired(data={"hub": hub}), hub_datasets=(pattern,))
    assert "is not in the cache of this engine, which works offline" in str(allowed)
    other = refused(tmp_path, desired(data={"hub": {**hub, "repo": "ab/b"}}), hub_datasets=(pattern,))
    assert (other.field, "spec.hubDatasets" in str(other)) == ("data.hub.repo", True)


@pytest.mark.parametrize("name", ["loop", "x" * 300])
def test_an_adapter_folder_that_cannot_be_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    adapter = desired(initFrom={"file": {"volume": "v", "path": name}})
    assert refused(tmp_path, adapter, data_volumes={"v": tmp_path}).field == "initFrom.file.path"


def test_an_episode_is_no_longer_than_the_trainer_computes_in_one_piece(tmp_path: Path) -> None:
    assert refused(tmp_path, desired(sampling={"maxTokens": 256}), tokens_per_microbatch=256).field == (
        "sampling.maxTokens"
    )


def test_files_stay_below_their_volume(tmp_path: Path) -> None:
    volume, secret = tmp_path / "volume", tmp_path / "secret"
    volume.mkdir()
    secret.mkdir()
    (secret / "adapter_config.json").write_text("{}")
    (secret / "rows.jsonl").write_text("{}\n")
    (volume / "link").symlink_to(secret)
    volumes = {"data_volumes": {"v": volume}}
    adapter = desired(initFrom={"file": {"volume": "v", "path": "link"}})
    assert refused(tmp_path, adapter, **volumes).field == "initFrom.file.path"
    rows = desired(environment={"name": "GSM8K"}, data={"file": {"volume": "v", "path": "link/rows.jsonl"}})
    assert "not within its volume" in str(refused(tmp_path, rows, **volumes))


def test_what_a_trajectory_counts_comes_from_the_spec(tmp_path: Path) -> None:
    made = build(tmp_path, desired(algorithm={"truncatedCompletions": "Punish", "truncationPenalty": "0.5"}))
    assert (made.scoring.truncated, made.scoring.penalty) == ("Punish", 0.5)
    assert made.shape == Shape()
    made = build(tmp_path, desired(algorithm={"lossNormalization": "Sequences", "klCoefficient": "0.01"}))
    assert made.shape == Shape(by_sequences=True, keep_flat=True)


@pytest.mark.parametrize(("wanted", "context"), [(None, 512), (100, 100), (4096, 512)])
def test_an_episode_has_the_tokens_of_the_spec_or_of_the_engine(
    tmp_path: Path, wanted: int | None, context: int
) -> None:
    environment = {"name": "WordProblems"} | ({} if wanted is None else {"maxEpisodeTokens": wanted})
    spec = desired(environment=environment).spec
    assert plan.max_context(spec, config(tmp_path)) == context


def test_a_held_out_file_is_evaluated_on(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "Q?", "answer": "1"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "T?", "answer": "2"}\n')
    file = {"volume": "v", "path": "train.jsonl", "heldOutPath": "test.jsonl"}
    made = build(tmp_path, desired(data={"file": file}, evaluation={"examples": 1}), data_volumes={"v": tmp_path})
    assert [row["question"] for row in made.data.held_out] == ["T?"]
    assert made.data.train.size == 1


@pytest.mark.parametrize("path", ["../x", "/x", "a/../b", "a//b", ".", "..", "a/.", ""])
def test_the_schema_refuses_paths_that_leave(path: str) -> None:
    with pytest.raises(ValueError):
        desired(initFrom={"file": {"volume": "v", "path": path}})


@pytest.mark.parametrize("path", ["x", "a/b.jsonl", ".hidden/x", "..x/y", "a..b"])
def test_the_schema_takes_paths_that_stay(path: str) -> None:
    made = desired(initFrom={"file": {"volume": "v", "path": path}})
    assert made.spec.init_from is not None


def test_a_chat_template_that_rewrites_history_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        plan.build(desired(), config(tmp_path), tiny_tokenizer(REWRITING))
    assert caught.value.field == "environment"
