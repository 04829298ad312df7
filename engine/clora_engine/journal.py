"""One experiment's folder: rollouts, commits, metrics. The only code that writes there.

    experiments/<uid>/
        owner.json            the epoch that may write, and whose experiment it is
        rollouts/00007.jsonl  the finished groups of step 7, each logged before anything is trained on it
        steps/00007/          adapter_model.safetensors, adapter_config.json, optimizer.safetensors, manifest.json
        steps/00008.epoch-2/  what the engine of epoch 2 prepares for the commit of step 8
        metrics.jsonl         one line a step
        tensorboard/          the same as event files (tensorboard.py); nothing reads them back
        tracking/             what trackers that are offline keep (tracking.py): theirs to write and to read
        attempt.json          the attempt for which what an earlier one had drawn was forgotten
        result.json           written once, when the experiment has succeeded

A step comes to exist at one moment: the rename of its manifest, which holds the digests of the step's files and the
length of the metrics file. Everything that lies past it is taken back on resume. Every write by an older epoch than the
folder's is refused (it may wake after hours in the middle of a step), so that of two engines on one volume only the
newer one writes.

Only JSON and safetensors are read; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from clora_engine.best import Best
from clora_engine.errors import CheckpointError, StaleEpochError, UserError
from clora_engine.journal_files import append, locked, room, sha256, sync, write_atomic
from clora_engine.model_folder import BaseModel
from clora_engine.types import Group


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A commit. `files`: name -> sha256 in hex. `metrics_bytes`: length of metrics.jsonl at the commit. `position`:
    examples of the data consumed. `time`: seconds since the Unix epoch. `best`: of all commits up to this one. `uid`:
    of the experiment that made it, and `base`: the model that it was trained on (unset: made before these were written
    down)."""

    step: int
    epoch: int
    files: dict[str, str]
    metrics_bytes: int
    position: int
    time: float
    best: Best | None = None
    uid: str = ""
    base: BaseModel | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """A step that exists: its folder, manifest, and the manifest's sha256."""

    folder: Path
    manifest: Manifest
    digest: str


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    namespace: str
    name: str


def next_epoch(storage: Path) -> int:
    """Counts the storage's epoch up by one and returns it: one life of an engine."""
    storage.mkdir(parents=True, exist_ok=True)
    with locked(storage / ".epoch.lock"):
        path = storage / "epoch"
        epoch = (int(path.read_text()) if path.exists() else 0) + 1
        write_atomic(path, str(epoch).encode())
    return epoch


class Journal:
    """The folder of experiment `uid`, opened by the engine of `epoch`, which has loaded `base` (None: not to be asked).

    Not thread-safe: one experiment loop uses it, one call at a time.
    """

    def __init__(self, storage: Path, uid: str, epoch: int, base: BaseModel | None = None) -> None:
        self.folder = experiment_folder(storage, uid)
        self.uid = uid
        self.epoch = epoch
        self._base = base
        self._metrics = self.folder / "metrics.jsonl"

    # ---------------------------------------------------------------- ownership

    def claim(self, namespace: str, name: str) -> None:
        """Takes the folder over for this epoch. Raises StaleEpochError if a newer engine has it, UserError if it
        belongs to another namespace."""
        (self.folder / "steps").mkdir(parents=True, exist_ok=True)
        (self.folder / "rollouts").mkdir(exist_ok=True)
        with locked(self.folder / ".lock"):
            owner = self.owner()
            if owner is not None and owner.epoch > self.epoch:
                raise StaleEpochError(f"{self.uid} belongs to epoch {owner.epoch}; this engine is epoch {self.epoch}")
            if owner is not None and owner.namespace != namespace:
                raise UserError(f"{self.uid} belongs to another namespace", field="metadata.uid")
            mine = Owner(epoch=self.epoch, namespace=namespace, name=name)
            write_atomic(self.folder / "owner.json", msgspec.json.encode(mine))

    def owner(self) -> Owner | None:
        path = self.folder / "owner.json"
        return msgspec.json.decode(path.read_bytes(), type=Owner) if path.exists() else None

    @contextmanager
    def _owned(self) -> Iterator[None]:
        with locked(self.folder / ".lock"):
            owner = self.owner()
            if owner is None or owner.epoch != self.epoch:
                newer = "nobody" if owner is None else f"epoch {owner.epoch}"
                raise StaleEpochError(f"{self.uid} belongs to {newer}; this engine is epoch {self.epoch}")
            yield

    # ---------------------------------------------------------------- commits

    def step_folder(self, step: int) -> Path:
        """Where the files of `step` are written before its commit; empty and ready, and of this epoch alone. Raises
        StaleEpochError."""
        folder = self._work_folder(step)
        with self._owned():
            if (self._step_folder(step) / "manifest.json").exists():
                raise CheckpointError(f"step {step} of {self.uid} is committed already")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        return folder

    def _step_folder(self, step: int) -> Path:
        return self.folder / "steps" / f"{step:05d}"

    def _work_folder(self, step: int) -> Path:
        return self.folder / "steps" / f"{step:05d}.epoch-{self.epoch}"

    def append_metrics(self, values: dict[str, Any]) -> None:
        """Adds one line and syncs it. It counts once a commit covers it. Raises StaleEpochError."""
        line = json.dumps(values, allow_nan=False, sort_keys=False).encode() + b"\n"
        with self._owned():
            append(self._metrics, line)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines, one a step."""
        lines = self._metrics.read_bytes().splitlines() if self._metrics.exists() else []
        return [dict(json.loads(line)) for line in lines]

    def commit(self, step: int, position: int, now: float, best: Best | None = None) -> Commit:
        """Commits what lies in step_folder(step) and all metrics so far, and marks the best commit.

        Raises StaleEpochError when a newer engine has taken the folder over; nothing has come to exist then.
        """
        prepared, folder = self._work_folder(step), self._step_folder(step)
        files = {}
        with room():
            for path in sorted(prepared.iterdir()):
                sync(path)
                files[path.name] = sha256(path)
            sync(prepared)
        with self._owned():
            manifest = Manifest(
                step=step,
                epoch=self.epoch,
                files=files,
                metrics_bytes=self._metrics.stat().st_size if self._metrics.exists() else 0,
                position=position,
                time=now,
                best=best,
                uid=self.uid,
                base=self._base,
            )
            data = msgspec.json.encode(manifest)
            shutil.rmtree(folder, ignore_errors=True)  # of a kill between the next two lines; it has no manifest
            prepared.rename(folder)
            sync(self.folder / "steps")  # before there is a manifest: it must not turn up under the old name
            write_atomic(folder / "manifest.json", data)
        return Commit(folder, manifest, hashlib.sha256(data).hexdigest())

    def commits(self) -> list[int]:
        """Committed steps, ascending."""
        return sorted(int(p.parent.name) for p in (self.folder / "steps").glob("*/manifest.json") if _is_step(p.parent))

    def read_commit(self, step: int | None = None) -> Commit | None:
        """The commit of `step`, or the latest; None if there is none. Raises CheckpointError, naming the file, when
        it is torn or foreign."""
        steps = self.commits()
        if step is None:
            if not steps:
                return None
            step = steps[-1]
        elif step not in steps:
            raise CheckpointError(f"{self.uid} has no committed step {step}; it has {steps or 'none'}")
        folder = self._step_folder(step)
        manifest, data = self._manifest(step)
        for name, digest in manifest.files.items():
            path = folder / name
            if Path(name).name != name or not path.is_file() or path.is_symlink() or sha256(path) != digest:
                raise CheckpointError(f"steps/{step:05d}/{name} of {self.uid} does not match its manifest")
        return Commit(folder, manifest, hashlib.sha256(data).hexdigest())

    def _manifest(self, step: int) -> tuple[Manifest, bytes]:
        """And the bytes that say so. Raises CheckpointError."""
        data = (self._step_folder(step) / "manifest.json").read_bytes()
        try:
            manifest = msgspec.json.decode(data, type=Manifest)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"steps/{step:05d}/manifest.json of {self.uid} is unreadable: {error}") from None
        if manifest.step != step:
            raise CheckpointError(f"steps/{step:05d}/manifest.json of {self.uid} is of step {manifest.step}")
        if manifest.uid not in ("", self.uid):
            raise CheckpointError(f"steps/{step:05d}/manifest.json of {self.uid} is of experiment {manifest.uid}")
        return manifest, data

    def require_base(self, step: int | None = None) -> None:
        """Raises CheckpointError when the commit of `step`, or the latest one, is of another base model than the one
        that is loaded: its weights would fit in shape, and mean nothing."""
        steps = self.commits()
        if self._base is None or not steps:
            return
        found = self._manifest(steps[-1] if step is None else step)[0]
        if found.base is None or found.base.fingerprint == self._base.fingerprint:
            return
        same = " with other weights" if found.base.name == self._base.name else ""
        raise CheckpointError(
            f"step {found.step} was trained on {found.base.name}, and this engine has loaded {self._base.name}{same}:"
            " give the LoRAEngine that spec.model again, or begin anew with an experiment of another name"
        )

    def resume(self) -> Commit | None:
        """The latest commit, with everything past it taken back: metrics lines, unfinished step folders, and groups
        drawn with versions past it, which no commit tells the weights of."""
        with self._owned():
            commit = self.read_commit()
            keep = commit.manifest.metrics_bytes if commit else 0
            if self._metrics.exists():
                if self._metrics.stat().st_size < keep:
                    raise CheckpointError(f"metrics.jsonl of {self.uid} is shorter than its latest commit says")
                with self._metrics.open("r+b") as file:
                    file.truncate(keep)
                    os.fsync(file.fileno())
            elif keep:
                raise CheckpointError(f"metrics.jsonl of {self.uid} is missing")
            for folder in (self.folder / "steps").iterdir():
                if not _is_step(folder) or not (folder / "manifest.json").exists():
                    shutil.rmtree(folder, ignore_errors=True)  # an engine of an older epoch may be writing there
            self._drop_versions(past=commit.manifest.step if commit else -1)
        return commit

    def prune(self, keep: int, best: int | None = None) -> None:
        """Removes commits but the first, the best, the latest and `keep` before it, and the rollouts of steps as old.
        Raises StaleEpochError."""
        with self._owned():
            steps = self.commits()
            for step in steps[1 : -keep - 1]:
                if step == best:
                    continue
                folder = self._step_folder(step)
                (folder / "manifest.json").unlink()  # first: a half-removed step must not look committed
                shutil.rmtree(folder)
            for path in (self.folder / "rollouts").glob("*.jsonl"):
                if steps and int(path.stem) < steps[-1] - keep:
                    path.unlink()

    # ---------------------------------------------------------------- rollouts

    def append_group(self, step: int, group: Group) -> None:
        """Logs a finished group of `step` and syncs it. Raises StaleEpochError."""
        with self._owned():
            append(self._rollouts(step), msgspec.json.encode(group) + b"\n")

    def read_groups(self, step: int) -> dict[int, Group]:
        """Finished groups of `step` by index. A torn last line (a kill while it was written) is dropped. Raises
        StaleEpochError, and CheckpointError, naming the line, when another one is damaged."""
        path = self._rollouts(step)
        with self._owned():
            data = path.read_bytes() if path.exists() else b""
            whole, _, torn = data.rpartition(b"\n")
            if torn:
                with path.open("r+b") as file:
                    file.truncate(len(whole) + 1 if whole else 0)
        groups = {}
        for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                group = msgspec.json.decode(line, type=Group)
            except msgspec.MsgspecError as error:
                where = f"rollouts/{path.name} of {self.uid}, line {number}"
                raise CheckpointError(f"{where}, is unreadable: {error}") from None
            groups[group.index] = group
        return groups

    def drop_groups(self, step: int) -> None:
        """Forgets the logged groups of `step` and later ones. Raises StaleEpochError."""
        with self._owned():
            for path in (self.folder / "rollouts").glob("*.jsonl"):
                if int(path.stem) >= step:
                    path.unlink()

    def _drop_versions(self, *, past: int) -> None:
        for path in (self.folder / "rollouts").glob("*.jsonl"):
            if int(path.stem) <= past:
                continue
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _version(line) <= past]
            if len(kept) < len(lines):
                write_atomic(path, b"".join(kept))

    def _rollouts(self, step: int) -> Path:
        return self.folder / "rollouts" / f"{step:05d}.jsonl"

    # ---------------------------------------------------------------- result

    def write_json(self, name: str, data: bytes) -> None:
        """Replaces a small file such as result.json."""
        with self._owned():
            write_atomic(self.folder / name, data)

    def read_json(self, name: str) -> bytes | None:
        path = self.folder / name
        return path.read_bytes() if path.exists() else None

    def delete(self) -> None:
        """Removes the folder and everything in it."""
        with self._owned():  # to the end: who waits for the lock finds no owner
            for folder in (self.folder / "steps", self.folder / "rollouts", self.folder):
                shutil.rmtree(folder, ignore_errors=True)


def experiment_folder(storage: Path, uid: str) -> Path:
    """experiments/<uid>, for uids as Kubernetes makes them. Raises UserError for anything else."""
    if not uid or len(uid) > 64 or not all(c.isascii() and (c.isalnum() or c == "-") for c in uid):
        raise UserError(f"{uid!r} is not a uid", field="metadata.uid")
    return storage / "experiments" / uid


class _Drawn(msgspec.Struct):
    version_step: int


def _version(line: bytes) -> int:
    """Of a logged group; of a damaged line, which is told of when its groups are read, -1."""
    try:
        return msgspec.json.decode(line, type=_Drawn).version_step
    except msgspec.MsgspecError:
        return -1


def _is_step(folder: Path) -> bool:
    """By its name: not what some epoch prepares."""
    return folder.name.isdecimal()
