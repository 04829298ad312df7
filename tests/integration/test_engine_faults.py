"""Kills, with the real processes: what is lost, what is not, and who notices."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from clora_api.control import Phase
from tests.engine_fixtures import EngineProcess, kill, rl_spec, sft_spec

pytestmark = pytest.mark.integration


def weights(engine: EngineProcess, uid: str, step: int) -> bytes:
    folder = engine.storage / "experiments" / uid / "steps" / f"{step:05d}"
    return (folder / "adapter_model.safetensors").read_bytes() + (folder / "optimizer.safetensors").read_bytes()


def test_kill_of_the_engine_resumes_bit_for_bit(own_engine: EngineProcess, tmp_path: Path, tiny_model: Path) -> None:
    """Two experiments; the engine is killed in mid-run; both go on in the next epoch from their commits. The supervised
    one ends with the very bits of a run that nobody disturbed."""
    sft, rl = str(uuid.uuid4()), str(uuid.uuid4())
    own_engine.start()
    own_engine.put(sft, sft_spec(maxSteps=12))
    own_engine.put(rl, rl_spec(maxSteps=12))
    own_engine.wait(sft, lambda r: r.progress.step >= 4)
    own_engine.wait(rl, lambda r: r.progress.step >= 2)
    orphans = [own_engine.child("clora_engine.trainer_process"), own_engine.child("VLLM::EngineCore")]
    own_engine.kill()
    info = own_engine.start()
    assert info.epoch == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in orphans)
    own_engine.put(sft, sft_spec(maxSteps=12))
    own_engine.put(rl, rl_spec(maxSteps=12))
    back = own_engine.wait(rl, lambda r: r.phase is Phase.RUNNING)
    assert back.progress.reward is not None
    for uid in (sft, rl):
        assert own_engine.finish(uid).epoch == 2
        assert [line["step"] for line in own_engine.metrics(uid)] == list(range(13))
    undisturbed = str(uuid.uuid4())
    own_engine.put(undisturbed, sft_spec(maxSteps=12))
    own_engine.finish(undisturbed)
    assert weights(own_engine, undisturbed, 12) == weights(own_engine, sft, 12)


def test_kill_of_the_trainer_ends_the_epoch(own_engine: EngineProcess) -> None:
    uid = str(uuid.uuid4())
    own_engine.start()
    own_engine.put(uid, sft_spec(maxSteps=10))
    own_engine.wait(uid, lambda r: r.progress.step >= 2)
    kill(own_engine.child("clora_engine.trainer_process"))
    assert own_engine.process is not None
    assert own_engine.process.wait(60) == 3
    assert own_engine.start().epoch == 2
    own_engine.put(uid, sft_spec(maxSteps=10))
    report = own_engine.finish(uid)
    assert (report.epoch, report.attempt) == (2, 0)
    assert [line["step"] for line in own_engine.metrics(uid)] == list(range(11))


def test_kill_of_vllms_core_is_survived_within_the_epoch(own_engine: EngineProcess) -> None:
    uid = str(uuid.uuid4())
    own_engine.start()
    own_engine.put(uid, rl_spec(maxSteps=8))
    own_engine.wait(uid, lambda r: r.progress.step >= 2)
    kill(own_engine.child("VLLM::EngineCore"))
    report = own_engine.finish(uid)
    assert (report.epoch, report.attempt) == (1, 0)
    assert own_engine.info().sampler_generation == 2
    assert [line["step"] for line in own_engine.metrics(uid)] == list(range(9))


def test_an_engine_that_wakes_after_it_was_replaced_writes_nothing(own_engine: EngineProcess, tiny_model: Path) -> None:
    """Its node was cut off, its pod force-deleted, another engine has its volume; then it goes on in mid-step."""
    sft, rl = str(uuid.uuid4()), str(uuid.uuid4())
    own_engine.start()
    own_engine.put(sft, sft_spec(maxSteps=1000))
    own_engine.put(rl, rl_spec(maxSteps=1000))
    own_engine.wait(sft, lambda r: r.progress.step >= 3)
    own_engine.wait(rl, lambda r: r.progress.step >= 1)
    with own_engine.frozen():
        successor = EngineProcess(own_engine.folder.parent / "successor", tiny_model, storage=own_engine.storage)
        try:
            assert successor.start().epoch == 2
            specs = {sft: sft_spec, rl: rl_spec}
            for uid, spec in specs.items():
                successor.put(uid, spec(maxSteps=1000))
                successor.wait(uid, lambda r: r.phase is Phase.RUNNING)
            own_engine.thaw()
            for uid, spec in specs.items():
                stale = own_engine.wait(uid, lambda r: r.phase is Phase.FAILED)
                assert (stale.reason, stale.epoch) == ("StaleEpoch", 1), stale
                last = successor.report(uid).progress.step + 3
                successor.wait(uid, lambda r, last=last: r.progress.step >= last)  # type: ignore[misc]
                successor.put(uid, spec(maxSteps=1))  # it just finishes
                successor.finish(uid)
                steps = [line["step"] for line in successor.metrics(uid)]
                assert steps == list(range(len(steps)))
        finally:
            successor.close()


def test_sigterm_brings_steps_to_their_commits(own_engine: EngineProcess) -> None:
    uid = str(uuid.uuid4())
    own_engine.start()
    spec = sft_spec(maxSteps=1000, checkpoint={"every": 1000})
    own_engine.put(uid, spec)
    own_engine.wait(uid, lambda r: r.progress.step >= 3)
    assert own_engine.terminate() == 0
    own_engine.start()
    own_engine.put(uid, spec)
    resumed = own_engine.wait(uid, lambda r: r.phase is Phase.RUNNING)
    assert resumed.checkpoint is not None
    assert resumed.checkpoint.step >= 3
    lines = own_engine.metrics(uid)
    assert [line["step"] for line in lines] == list(range(len(lines)))


def test_a_finished_experiment_stays_finished_in_the_next_epoch(own_engine: EngineProcess) -> None:
    uid = str(uuid.uuid4())
    own_engine.start()
    own_engine.put(uid, sft_spec(maxSteps=2))
    own_engine.finish(uid)
    own_engine.kill()
    own_engine.start()
    again = own_engine.put(uid, sft_spec(maxSteps=2)).json()
    assert (again["phase"], again["progress"]["step"], again["epoch"]) == ("Succeeded", 2, 2)
    assert own_engine.info().experiments == 0


def test_a_damaged_checkpoint_fails_its_experiment_alone(own_engine: EngineProcess) -> None:
    uid, other = str(uuid.uuid4()), str(uuid.uuid4())
    own_engine.start()
    own_engine.put(uid, sft_spec(maxSteps=1000))
    own_engine.wait(uid, lambda r: r.progress.step >= 2)
    own_engine.put(uid, sft_spec(maxSteps=1000), mode="Suspend")
    step = own_engine.wait(uid, lambda r: r.phase is Phase.SUSPENDED).progress.step
    path = own_engine.storage / "experiments" / uid / "steps" / f"{step:05d}" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    own_engine.put(uid, sft_spec(maxSteps=1000))
    own_engine.put(other, sft_spec(maxSteps=2))
    failed = own_engine.wait(uid, lambda r: r.phase is Phase.FAILED)
    assert failed.reason == "CheckpointUnreachable"
    assert f"steps/{step:05d}/adapter_model.safetensors" in failed.message
    own_engine.finish(other)


def test_commits_of_another_base_model_are_neither_resumed_nor_started_from(tmp_path: Path, tiny_model: Path) -> None:
    """They would fit in shape. With the model put back, all goes on."""
    model, kept = tmp_path / "model", tmp_path / "kept"
    for folder in (model, kept):
        shutil.copytree(tiny_model, folder)
    engine = EngineProcess(tmp_path / "engine", model)
    going, source, warm = str(uuid.uuid4()), str(uuid.uuid4()), str(uuid.uuid4())
    try:
        engine.start()
        engine.put(going, sft_spec(maxSteps=1000))
        engine.put(source, sft_spec(maxSteps=2))
        engine.finish(source)
        engine.wait(going, lambda r: r.progress.step >= 2)
        assert engine.terminate() == 0
        step = max(
            int(path.parent.name) for path in (engine.storage / "experiments" / going).glob("steps/*/manifest.json")
        )

        file = model / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.0.self_attn.q_proj.weight"] *= 1.01
        save_file(tensors, file, metadata={"format": "pt"})
        engine.start()
        refused = engine.put(going, sft_spec(maxSteps=1000), committedStep=step)
        assert (refused.status_code, refused.json()["reason"]) == (409, "CheckpointUnreachable")
        words = (
            f"step {step} was trained on tiny, and this engine has loaded tiny with other weights: give the LoRAEngine"
        )
        assert refused.json()["detail"].startswith(words)
        from_it = rl_spec(maxSteps=1, initFrom={"experiment": {"name": "source"}}, lora={"rank": 8, "alpha": 16})
        engine.put(warm, from_it, initSource={"uid": source})
        failed = engine.wait(warm, lambda r: r.phase is Phase.FAILED)
        assert (failed.reason, failed.retryable) == ("InitFromNotFound", False)
        assert "step 2 was trained on tiny" in failed.message
        assert engine.put(source, sft_spec(maxSteps=2)).json()["phase"] == "Succeeded"
        assert engine.terminate() == 0

        shutil.copyfile(kept / "model.safetensors", file)
        engine.start()
        engine.put(going, sft_spec(maxSteps=step + 2), committedStep=step)
        assert [line["step"] for line in engine.metrics(going)][-1] >= step
        assert engine.finish(going).progress.step == step + 2
    finally:
        engine.close()
