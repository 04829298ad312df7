"""Commits exist at one moment, resume takes back what lies past them, and only the newest epoch writes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from clora_engine.best import Best
from clora_engine.errors import CheckpointError, FolderLockedError, StaleEpochError, UserError
from clora_engine.journal import Journal, experiment_folder, next_epoch
from clora_engine.model_folder import BaseModel
from clora_engine.types import Group, Trajectory

UID = "0b6f2f6e-5d0c-4c58-9a36-3f0a51c1a001"


def opened(storage: Path, epoch: int = 1) -> Journal:
    journal = Journal(storage, UID, epoch)
    journal.claim("team-a", "run")
    return journal


def make_step(journal: Journal, step: int, *, metrics: bool = True) -> None:
    folder = journal.step_folder(step)
    (folder / "adapter_model.safetensors").write_bytes(b"weights %d" % step)
    if metrics:
        journal.append_metrics({"step": step})
    journal.commit(step, position=8 * step, now=float(step))


def lines(journal: Journal) -> list[int]:
    return [json.loads(line)["step"] for line in (journal.folder / "metrics.jsonl").read_text().splitlines()]


def group(index: int) -> Group:
    trajectory = Trajectory(ids=[1, 2], mask=[1, 1], logprobs=[-0.5, -0.25], reward=1.0, turns=1)
    return Group(index=index, example=index, version_step=0, prompt=[5, 6], trajectories=[trajectory])


def test_epoch_only_grows(tmp_path: Path) -> None:
    assert [next_epoch(tmp_path) for _ in range(3)] == [1, 2, 3]


def test_a_commit_is_read_back(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    assert journal.resume() is None
    assert journal.read_metrics() == []
    make_step(journal, 0)
    make_step(journal, 1)
    commit = journal.resume()
    assert commit is not None
    assert (commit.manifest.step, commit.manifest.position, commit.manifest.epoch) == (1, 8, 1)
    assert (commit.folder / "adapter_model.safetensors").read_bytes() == b"weights 1"


def test_resume_takes_back_what_lies_past_the_commit(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    make_step(journal, 0)
    unfinished = journal.step_folder(1)
    (unfinished / "adapter_model.safetensors").write_bytes(b"half")
    journal.append_metrics({"step": 1})
    again = opened(tmp_path, epoch=2)
    commit = again.resume()
    assert commit is not None
    assert commit.manifest.step == 0
    assert lines(again) == [0]
    assert again.read_metrics() == [{"step": 0}]
    assert not unfinished.exists()


def test_an_older_epoch_cannot_commit(tmp_path: Path) -> None:
    """It was taken over while it prepared the step; what the newer one prepares for the same step is another's."""
    old = opened(tmp_path, epoch=1)
    make_step(old, 0)
    (old.step_folder(1) / "adapter_model.safetensors").write_bytes(b"late")
    new = opened(tmp_path, epoch=2)
    (new.step_folder(1) / "adapter_model.safetensors").write_bytes(b"new")
    with pytest.raises(StaleEpochError, match="epoch 2"):
        old.commit(1, position=8, now=1.0)
    assert old.commits() == [0]
    commit = new.commit(1, position=8, now=1.0)
    assert (commit.folder / "adapter_model.safetensors").read_bytes() == b"new"
    with pytest.raises(StaleEpochError):
        opened(tmp_path, epoch=1)


@pytest.mark.parametrize(
    "write",
    [
        lambda journal: journal.step_folder(1),
        lambda journal: journal.append_metrics({"step": 1}),
        lambda journal: journal.append_group(1, group(0)),
        lambda journal: journal.read_groups(1),
        lambda journal: journal.drop_groups(1),
        lambda journal: journal.prune(1),
        lambda journal: journal.write_json("result.json", b"{}"),
        lambda journal: journal.resume(),
        lambda journal: journal.delete(),
    ],
)
def test_an_older_epoch_writes_nothing(tmp_path: Path, write: Callable[[Journal], object]) -> None:
    old = opened(tmp_path, epoch=1)
    make_step(old, 0)
    opened(tmp_path, epoch=2).append_group(1, group(7))
    before = {path: path.read_bytes() for path in old.folder.rglob("*") if path.is_file()}
    with pytest.raises(StaleEpochError, match="belongs to epoch 2"):
        write(old)
    assert {path: path.read_bytes() for path in old.folder.rglob("*") if path.is_file()} == before


def test_a_kill_between_the_steps_folder_and_its_manifest(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    make_step(journal, 0)
    unfinished = journal.folder / "steps" / "00001"
    unfinished.mkdir()
    (unfinished / "adapter_model.safetensors").write_bytes(b"killed")
    assert journal.commits() == [0]
    make_step(journal, 1)  # in the same epoch, or in the next
    assert (unfinished / "adapter_model.safetensors").read_bytes() == b"weights 1"
    assert journal.commits() == [0, 1]


def test_what_an_epoch_prepared_is_never_taken_for_a_step(tmp_path: Path) -> None:
    """Whatever order a file system brings renames and files to the disk in, when the power goes."""
    journal = opened(tmp_path)
    make_step(journal, 0)
    prepared = journal.step_folder(1)
    (prepared / "manifest.json").write_bytes(b"{}")
    assert journal.commits() == [0]
    commit = opened(tmp_path, epoch=2).resume()
    assert commit is not None
    assert commit.manifest.step == 0
    assert not prepared.exists()


def test_a_lock_that_a_stopped_process_holds_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    monkeypatch.setattr("clora_engine.journal_files.LOCK_SECONDS", 0.05)
    with (journal.folder / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FolderLockedError, match="another engine on this volume hangs"):
            journal.append_metrics({"step": 1})
        assert journal.read_metrics() == []
    journal.append_metrics({"step": 1})


def test_a_folder_of_another_namespace_is_not_claimed(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(UserError, match="another namespace"):
        Journal(tmp_path, UID, 2).claim("team-b", "run")


@pytest.mark.parametrize("damage", ["truncate", "remove", "link"])
def test_a_torn_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    journal = opened(tmp_path)
    make_step(journal, 0)
    path = journal.folder / "steps" / "00000" / "adapter_model.safetensors"
    if damage == "truncate":
        path.write_bytes(b"w")
    elif damage == "remove":
        path.unlink()
    else:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"steps/00000/adapter_model\.safetensors"):
        journal.resume()


def test_a_step_of_another_experiment_is_refused_by_name(tmp_path: Path) -> None:
    make_step(opened(tmp_path / "a"), 0)
    other = Journal(tmp_path / "b", "another", 1)
    other.claim("team-a", "run")
    shutil.copytree(tmp_path / "a" / "experiments" / UID / "steps" / "00000", other.folder / "steps" / "00000")
    with pytest.raises(CheckpointError, match=rf"steps/00000/manifest\.json of another is of experiment {UID}"):
        other.resume()


def test_a_damaged_line_of_the_log_is_named(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.append_group(1, group(0))
    path = journal.folder / "rollouts" / "00001.jsonl"
    path.write_bytes(path.read_bytes() + b'{"index": 1}\n')
    with pytest.raises(CheckpointError, match=r"rollouts/00001\.jsonl of .*, line 2, is unreadable"):
        journal.read_groups(1)
    journal.drop_groups(1)
    assert journal.read_groups(1) == {}


def test_a_step_is_committed_once(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    make_step(journal, 0)
    with pytest.raises(CheckpointError, match="committed already"):
        journal.step_folder(0)


def test_metrics_shorter_than_the_commit_says(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    make_step(journal, 0)
    (journal.folder / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        journal.resume()


def test_prune_keeps_the_first_the_latest_and_some_before_it(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for step in range(7):
        make_step(journal, step)
        journal.append_group(step + 1, group(0))
    journal.prune(keep=2)
    assert journal.commits() == [0, 4, 5, 6]
    assert sorted(int(p.stem) for p in (journal.folder / "rollouts").iterdir()) == [4, 5, 6, 7]


def test_prune_keeps_the_best_which_its_manifest_names(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    best = Best(step=2, metric="evalAccuracy", value=0.75)
    for step in range(7):
        journal.step_folder(step)
        journal.commit(step, position=0, now=0.0, best=best if step >= 2 else None)
    journal.prune(keep=1, best=2)
    assert journal.commits() == [0, 2, 5, 6]
    again = opened(tmp_path, epoch=2).resume()
    assert again is not None
    assert again.manifest.best == best


def test_groups_come_back_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.append_group(1, group(3))
    journal.append_group(1, group(1))
    path = journal.folder / "rollouts" / "00001.jsonl"
    with path.open("ab") as file:
        file.write(b'{"index": 2, "exam')
    assert journal.read_groups(1) == {3: group(3), 1: group(1)}
    journal.append_group(1, group(2))
    assert sorted(journal.read_groups(1)) == [1, 2, 3]
    assert journal.read_groups(2) == {}


def test_groups_of_versions_that_no_commit_tells_of_are_taken_back(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    make_step(journal, 0)
    make_step(journal, 1)
    for index, version in enumerate((0, 1, 2)):
        journal.append_group(3, msgspec.structs.replace(group(index), version_step=version))
    (journal.folder / "rollouts" / "00004.jsonl").write_bytes(b'{"damaged": 1}\n{"torn')
    again = opened(tmp_path, epoch=2)
    again.resume()
    assert sorted(again.read_groups(3)) == [0, 1]
    assert (journal.folder / "rollouts" / "00004.jsonl").read_bytes() == b'{"damaged": 1}\n{"torn'


@pytest.mark.parametrize("uid", ["", "../x", "a/b", ".", "x" * 65, "a b"])
def test_a_uid_names_a_folder_below_the_root_only(tmp_path: Path, uid: str) -> None:
    with pytest.raises(UserError):
        experiment_folder(tmp_path, uid)


def test_delete_removes_everything(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    make_step(journal, 0)
    journal.delete()
    assert not journal.folder.exists()


def test_a_kill_between_metrics_and_manifest_leaves_the_step_before(tmp_path: Path) -> None:
    """The real thing: a process is killed after it appended its metrics and before the manifest's rename."""
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from clora_engine import journal as module
        from tests.unit.engine.test_journal import make_step, opened
        journal = opened(Path(sys.argv[1]))
        make_step(journal, 0)
        write = module.write_atomic
        def killed(path, data):
            if path.name == "manifest.json":
                os.kill(os.getpid(), signal.SIGKILL)
            write(path, data)
        module.write_atomic = killed
        make_step(journal, 1)
        """
    )
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    journal = Journal(tmp_path, UID, 1)
    assert lines(journal) == [0, 1]
    again = opened(tmp_path, epoch=2)
    commit = again.resume()
    assert commit is not None
    assert commit.manifest.step == 0
    assert lines(again) == [0]


def test_a_commit_of_another_base_model_is_refused_by_name(tmp_path: Path) -> None:
    qwen = BaseModel("Qwen/Qwen3-4B", "one")
    first = Journal(tmp_path, UID, 1, qwen)
    first.require_base()  # nothing is committed
    first.claim("team-a", "run")
    make_step(first, 1)
    first.require_base()
    Journal(tmp_path, UID, 2, BaseModel("another/name", "one")).require_base()  # the same weights
    Journal(tmp_path, UID, 2).require_base(1)  # for who only reads
    for other, words in (
        (BaseModel("Qwen/Qwen3-8B", "two"), "has loaded Qwen/Qwen3-8B: give"),
        (BaseModel("Qwen/Qwen3-4B", "two"), "has loaded Qwen/Qwen3-4B with other weights: give"),
    ):
        with pytest.raises(CheckpointError, match=f"step 1 was trained on Qwen/Qwen3-4B, and this engine {words}"):
            Journal(tmp_path, UID, 2, other).require_base()


def test_a_commit_from_before_models_were_written_down_is_taken(tmp_path: Path) -> None:
    make_step(opened(tmp_path), 1)
    Journal(tmp_path, UID, 2, BaseModel("Qwen/Qwen3-4B", "one")).require_base()
