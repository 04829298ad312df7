"""Where the base model's files are on this machine, and which model they are."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from clora_engine.errors import UserError

SAMPLES, SAMPLE_BYTES = 1024, 256


class BaseModel(msgspec.Struct, frozen=True):
    """What an adapter was trained on. name: as it is served; fingerprint: of its weights."""

    name: str
    fingerprint: str


def base_model(folder: Path, name: str) -> BaseModel:
    """The model of a local folder, whatever the folder is called. Its fingerprint is a sha256 over the names, lengths
    and some thousand places of its files of weights: another model, another fine-tune or another dtype has another one,
    and it takes no time that grows with the model."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)):
        length = path.stat().st_size
        digest.update(f"{path.name} {length}\n".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(length * sample // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return BaseModel(name, digest.hexdigest())


def model_folder(model: str, revision: str | None) -> Path:
    """The model's local folder; a name on the hub is downloaded first. Raises UserError."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"--model {model} is neither a folder nor a model that the hub gives: {error}", field="--model"
        ) from None
