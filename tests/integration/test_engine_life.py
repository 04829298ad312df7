"""Experiments on one real engine over HTTP: life, capacity, refusals, isolation between tenants' folders."""

from __future__ import annotations

import io
import json
import tarfile
import uuid
from pathlib import Path

import pytest

from clora_api.control import Phase
from tests.engine_fixtures import FINAL, EngineProcess, rl_spec, sft_spec

pytestmark = pytest.mark.integration


def new_uid() -> str:
    return str(uuid.uuid4())


def test_supervised_and_reinforcement_run_side_by_side(engine: EngineProcess) -> None:
    sft, rl = new_uid(), new_uid()
    assert engine.put(sft, sft_spec(evaluation={"examples": 2})).status_code == 200
    assert engine.put(rl, rl_spec()).status_code == 200
    first, second = engine.finish(sft), engine.finish(rl)
    assert first.progress.step == second.progress.step == 3
    assert [line["step"] for line in engine.metrics(sft)] == [0, 1, 2, 3]
    lines = engine.metrics(rl)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(0.0 <= line["reward_mean"] <= 1.0 and line["sampled_tokens"] > 0 for line in lines[1:])
    losses = [line["loss"] for line in engine.metrics(sft)[1:]]
    assert losses[-1] < losses[0]
    assert engine.metrics(sft)[-1]["eval_examples"] == 2
    assert first.checkpoint is not None
    assert first.checkpoint.step == 3
    assert engine.info().experiments == 0  # finished experiments hold no slot


def test_the_adapter_downloads_as_a_peft_folder(engine: EngineProcess, tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    uid = new_uid()
    engine.put(uid, sft_spec(maxSteps=1))
    engine.finish(uid)
    steps = [c["step"] for c in engine.http.get(f"/v1/experiments/{uid}/checkpoints").json()["items"]]
    assert steps == [0, 1]
    data = engine.http.get(f"/v1/experiments/{uid}/checkpoints/1").raise_for_status().content
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(tmp_path / "adapter", filter="data")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "adapter")
    assert model.peft_config["default"].r == 8
    assert any(p.abs().max() > 0 for n, p in model.named_parameters() if "lora_B" in n)


def test_trajectories_are_kept_token_by_token(engine: EngineProcess) -> None:
    uid = new_uid()
    engine.put(uid, rl_spec(maxSteps=1))
    engine.finish(uid)
    groups = [json.loads(x) for x in engine.http.get(f"/v1/experiments/{uid}/trajectories?step=1").text.splitlines()]
    assert sorted(g["index"] for g in groups) == [0, 1]
    for trajectory in (t for g in groups for t in g["trajectories"]):
        assert len(trajectory["ids"]) == len(trajectory["mask"]) == len(trajectory["logprobs"]) > 0
    missing = engine.http.get(f"/v1/experiments/{uid}/trajectories?step=9")
    assert missing.status_code == 404
    assert missing.headers["content-type"] == "application/problem+json"


def test_the_same_put_again_changes_nothing(engine: EngineProcess) -> None:
    uid = new_uid()
    engine.put(uid, sft_spec())
    engine.put(uid, sft_spec())
    done = engine.finish(uid)
    assert [line["step"] for line in engine.metrics(uid)] == [0, 1, 2, 3]
    again = engine.put(uid, sft_spec())
    assert again.json()["phase"] == "Succeeded"
    assert again.json()["checkpoint"]["digest"] == (done.checkpoint.digest if done.checkpoint else None)


def test_a_full_engine_refuses_and_a_free_slot_is_taken(engine: EngineProcess) -> None:
    long = [new_uid() for _ in range(3)]
    for uid in long:
        assert engine.put(uid, sft_spec(maxSteps=1000)).status_code == 200
    late = new_uid()
    refused = engine.put(late, sft_spec())
    assert refused.status_code == 409
    assert refused.json()["type"] == "https://clora.dev/problems/capacity-exceeded"
    engine.wait(long[0], lambda r: r.phase is Phase.RUNNING)
    engine.delete(long[0])
    assert engine.put(late, sft_spec()).status_code == 200
    for uid in long[1:]:
        engine.delete(uid)
    engine.finish(late)


def test_suspend_keeps_everything_and_resume_goes_on(engine: EngineProcess) -> None:
    uid = new_uid()
    engine.put(uid, sft_spec(maxSteps=1000))
    engine.wait(uid, lambda r: r.progress.step >= 2)
    engine.put(uid, sft_spec(maxSteps=1000), mode="Suspend")
    suspended = engine.wait(uid, lambda r: r.phase is Phase.SUSPENDED)
    assert suspended.checkpoint is not None
    assert suspended.checkpoint.step == suspended.progress.step
    last = suspended.progress.step + 2
    engine.put(uid, sft_spec(maxSteps=last))
    assert engine.wait(uid, lambda r: r.phase is Phase.SUCCEEDED).progress.step == last
    assert [line["step"] for line in engine.metrics(uid)] == list(range(last + 1))


def test_a_new_weight_is_accepted_while_it_runs_and_waiting_is_reported(engine: EngineProcess) -> None:
    uid = new_uid()
    before = engine.put(uid, rl_spec(maxSteps=1000)).json()
    running = engine.wait(uid, lambda r: r.progress.step >= 1)
    after = engine.put(uid, rl_spec(maxSteps=running.progress.step + 3, weight=1000))
    assert after.status_code == 200
    assert after.json()["specDigest"] != before["specDigest"]
    report = engine.finish(uid)
    waited = [line["wait_sampler_seconds"] for line in engine.metrics(uid)]
    assert len(waited) == report.progress.step + 1
    assert min(waited) >= 0.0
    assert report.progress.seconds_waited >= sum(waited) - 1e-6


def test_a_max_steps_below_the_step_reached_just_finishes(engine: EngineProcess) -> None:
    uid = new_uid()
    engine.put(uid, sft_spec(maxSteps=1000))
    engine.wait(uid, lambda r: r.progress.step >= 2)
    engine.put(uid, sft_spec(maxSteps=1))
    report = engine.finish(uid)
    assert report.progress.step >= 2


def test_stop_when_ends_it_early_with_an_evaluation_and_a_reason(engine: EngineProcess) -> None:
    uid = new_uid()
    rule = {"metric": "loss", "atMost": "1000", "steps": 3}
    engine.put(uid, sft_spec(maxSteps=1000, stopWhen=rule, evaluation={"examples": 2}))
    report = engine.finish(uid)
    assert (report.phase, report.progress.step) == (Phase.SUCCEEDED, 3)
    assert report.message == "stopWhen: loss was at most 1000 for 3 steps in a row"
    assert report.checkpoint is not None
    assert report.checkpoint.step == 3
    assert [line["step"] for line in engine.metrics(uid) if "eval_accuracy" in line] == [0, 3]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lora": {"rank": 32}}, "lora.rank"),
        (
            {"environment": {"name": "WordProblems", "arguments": {"families": "nowhere"}}},
            "environment.arguments.families",
        ),
        ({"environment": {"name": "WordProblems", "arguments": {"colour": "red"}}}, "environment.arguments.colour"),
        ({"data": {"file": {"volume": "datasets", "path": "a.jsonl"}}}, "data.file.volume"),
        ({"initFrom": {"file": {"volume": "adapters", "path": "a"}}}, "initFrom.file.volume"),
        ({"sampling": {"maxTokens": 4096}}, "sampling.maxTokens"),
        ({"sampling": {"temperature": "0"}}, "sampling.temperature"),
    ],
)
def test_a_spec_that_cannot_run_is_refused_by_field(engine: EngineProcess, changes: dict, field: str) -> None:  # type: ignore[type-arg]
    refused = engine.put(new_uid(), rl_spec(**changes))
    assert refused.status_code == 422, refused.text
    assert refused.json()["field"] == field
    assert refused.json()["type"] == "https://clora.dev/problems/invalid-spec"


def test_an_experiment_whose_commits_are_elsewhere_does_not_begin_anew(engine: EngineProcess) -> None:
    uid = new_uid()
    refused = engine.put(uid, sft_spec(), committedStep=7)
    assert refused.status_code == 409
    assert refused.json()["reason"] == "CheckpointUnreachable"
    assert "step 7 was committed, but this engine's storage has no step of it" in refused.json()["detail"]
    assert engine.put(uid, sft_spec(maxSteps=2), committedStep=None).status_code == 200
    engine.finish(uid)
    assert engine.put(uid, sft_spec(maxSteps=2), committedStep=2).status_code == 200


def test_what_is_immutable_stays(engine: EngineProcess) -> None:
    uid = new_uid()
    engine.put(uid, sft_spec(maxSteps=1000))
    refused = engine.put(uid, sft_spec(maxSteps=1000, lora={"rank": 16}))
    assert refused.status_code == 422
    assert refused.json()["field"] == "lora"
    engine.delete(uid)


def test_init_from_starts_with_the_other_ones_weights(engine: EngineProcess) -> None:
    source, target = new_uid(), new_uid()
    engine.put(source, sft_spec())
    engine.finish(source)
    spec = rl_spec(maxSteps=1, initFrom={"experiment": {"name": "source"}}, lora={"rank": 8, "alpha": 16})
    assert engine.put(target, spec, initSource={"uid": source}).status_code == 200
    engine.finish(target)
    start = engine.storage / "experiments" / target / "steps" / "00000" / "adapter_model.safetensors"
    end = engine.storage / "experiments" / source / "steps" / "00003" / "adapter_model.safetensors"
    assert start.read_bytes() == end.read_bytes()


def test_init_from_another_namespace_is_refused(engine: EngineProcess) -> None:
    source, thief = new_uid(), new_uid()
    engine.put(source, sft_spec(maxSteps=1))
    engine.finish(source)
    spec = rl_spec(initFrom={"experiment": {"name": "source"}}, lora={"rank": 8, "alpha": 16})
    engine.put(thief, spec, initSource={"uid": source}, namespace="other-team")
    report = engine.wait(thief, lambda r: r.phase in FINAL)
    assert (report.phase, report.reason, report.retryable) == (Phase.FAILED, "InitFromNotFound", False)


def test_data_of_a_config_map(engine: EngineProcess) -> None:
    rows = "\n".join(json.dumps({"question": f"What is {i} plus {i}?", "answer": f"#### {2 * i}"}) for i in range(1, 9))
    spec = rl_spec(
        environment={"name": "GSM8K"}, data={"configMap": {"name": "sums", "key": "train.jsonl"}}, maxSteps=1
    )
    good, bad = new_uid(), new_uid()
    assert engine.put(good, spec, dataText=rows).status_code == 200
    engine.finish(good)
    refused = engine.put(bad, spec, dataText=rows + '\n{"question": "no answer"}')
    assert refused.status_code == 422
    assert "line 9" in refused.json()["detail"]


def test_a_token_is_needed(engine: EngineProcess) -> None:
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic abc"}):
        answer = engine.http.get("/v1/engine", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["type"] == "https://clora.dev/problems/unauthorized"
    assert engine.http.get("/healthz", headers={"Authorization": ""}).status_code == 200


def test_garbage_is_answered_with_a_problem(engine: EngineProcess) -> None:
    for body in (b"", b"{", b'{"uid": 3}', b"[]"):
        answer = engine.http.put(f"/v1/experiments/{new_uid()}", content=body)
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"
    assert engine.http.get(f"/v1/experiments/{new_uid()}").status_code == 404
    assert engine.http.get("/v1/experiments/..%2f..%2fetc/metrics").status_code in (404, 422)


def test_delete_with_files_leaves_nothing(engine: EngineProcess) -> None:
    uid = new_uid()
    engine.put(uid, sft_spec(maxSteps=1))
    engine.finish(uid)
    engine.delete(uid, files="Delete")
    assert not (engine.storage / "experiments" / uid).exists()
    assert engine.http.delete(f"/v1/experiments/{uid}").status_code == 200


def test_metrics_page_counts_tokens_and_names_no_tenant(engine: EngineProcess) -> None:
    uid = new_uid()
    engine.put(uid, rl_spec(maxSteps=1))
    engine.finish(uid)
    page = engine.http.get("/metrics").text
    generated = next(x for x in page.splitlines() if x.startswith("clora_engine_sampler_generated_tokens_total"))
    assert float(generated.split()[1]) > 0
    assert uid not in page
    assert "team" not in page
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    gate = {name: float(values[f"clora_engine_sampler_{name}"]) for name in ("seats", "seats_taken", "queued")}
    assert gate == {"seats": 32.0, "seats_taken": 0.0, "queued": 0.0}
    charged = float(values["clora_engine_sampler_granted_tokens_total"])
    prompts = float(values["clora_engine_sampler_prompt_tokens_total"])
    cached = float(values["clora_engine_sampler_cached_prompt_tokens_total"])
    assert charged >= float(values["clora_engine_sampler_generated_tokens_total"]) + prompts - cached
    assert float(values["clora_engine_sampler_wait_seconds_total"]) >= 0.0
