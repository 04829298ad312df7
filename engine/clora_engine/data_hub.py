"""A file of a data set's repository on the hub, downloaded once.

It is asked for without a token, and kept in a cache of its own: what else lies in the engine's cache, a gated model or
a private data set, is nobody's by its name alone. A file at a revision is named, so that a resumed run sees the same
rows. Left out: whole data sets with their configurations and scripts.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# what its HTTP library raises; which library that is differs between its releases
from huggingface_hub.errors import HTTPError as HubHTTPError  # type: ignore[attr-defined]
from huggingface_hub.file_download import repo_folder_name

from clora_engine.data_rows import MAX_FILE_BYTES, bad_data
from clora_engine.errors import TransientError

HUB_SECONDS = 5.0  # the hub has to answer within; the operator waits for the admission's answer
MAX_CACHE_BYTES = 8 << 30

_downloading = Lock()  # one at a time, so that the cache's size is known


def from_hub(repo: str, file: str, revision: str, *, endpoint: str | None = None, cache: Path | None = None) -> Path:
    """The local path of a file in a data set's repository; downloaded once, then taken from the cache. Blocking.

    Raises:
        UserError: no such repository, revision or file, a private one, a file that is too large, or one that is not in
        the cache of an engine that works offline. TransientError: the hub does not answer.
    """
    label, cache = hub_label(repo, file, revision), cache or default_cache()
    try:
        found = try_to_load_from_cache(repo, file, revision=revision, repo_type="dataset", cache_dir=cache)
        if isinstance(found, str):
            return Path(found)
        if constants.HF_HUB_OFFLINE:
            raise bad_data(f"{label} is not in the cache of this engine, which works offline: put it into a dataVolume")
        with _downloading:
            return _download(label, cache, repo_id=repo, filename=file, revision=revision, endpoint=endpoint)
    except LocalEntryNotFoundError:  # of the cache, after the hub could not be asked
        raise TransientError(f"the hub cannot be reached for {label}; a file in a dataVolume needs no hub") from None
    except GatedRepoError:
        raise bad_data(f"{label} is gated: put it into a dataVolume") from None
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError):
        raise bad_data(f"{label} does not exist on the hub, or is private: put it into a dataVolume") from None
    except (HFValidationError, ValueError) as error:
        raise bad_data(f"{label} is nothing that the hub can have: {str(error)[:200]}") from None
    except (HubHTTPError, OSError) as error:
        raise TransientError(f"the hub does not give {label} now: {type(error).__name__}") from None


def _download(label: str, cache: Path, **where: Any) -> Path:
    asked: dict[str, Any] = where | {"repo_type": "dataset", "cache_dir": cache, "token": False}
    asked["etag_timeout"] = HUB_SECONDS
    size = hf_hub_download(**asked, dry_run=True).file_size
    if size > MAX_FILE_BYTES:
        raise bad_data(f"{label} is larger than {MAX_FILE_BYTES >> 20} MiB; split it")
    _make_room(cache, size, hub_root(where["repo_id"], cache))
    return Path(hf_hub_download(**asked))


def _make_room(cache: Path, size: int, keep: Path) -> None:
    """Removes the repositories that were longest not added to, until there is room for `size` bytes."""
    folders = {folder: _bytes_of(folder) for folder in cache.glob("datasets--*")}
    for folder in sorted(folders, key=lambda folder: (folder == keep, folder.stat().st_mtime)):
        if sum(folders.values()) + size <= MAX_CACHE_BYTES:
            return
        shutil.rmtree(folder)
        del folders[folder]


def _bytes_of(folder: Path) -> int:
    return sum(blob.stat().st_size for blob in folder.glob("blobs/*"))


def default_cache() -> Path:
    return Path(constants.HF_HUB_CACHE) / "clora-data"


def hub_root(repo: str, cache: Path | None = None) -> Path:
    """The folder of a repository, which holds all its files and what they are links to."""
    return (cache or default_cache()) / repo_folder_name(repo_id=repo, repo_type="dataset")


def hub_label(repo: str, file: str, revision: str) -> str:
    return f"{file} of {repo} at {revision}"
