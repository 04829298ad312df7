"""spec.tracking of a LoRAExperiment: where its metrics go besides its own files."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from clora_api.v1alpha1.base import ApiModel, ObjectName, rules

TRACKING_LABEL = "clora.dev/tracking"
"""Secrets with this label, of value "true", may be given to trackers: naming any Secret must not send it anywhere."""


class TrackerKind(StrEnum):
    WANDB = "WandB"
    MLFLOW = "MLflow"
    TRACKIO = "Trackio"


# What W&B and MLflow take as the name of a project, an experiment, a team or a run: W&B refuses / \ # ? % and :
TrackedName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9 ._-]*[A-Za-z0-9._-])?$", min_length=1)]


class TrackingSecret(ApiModel):
    name: ObjectName = Field(
        description="A Secret of the experiment's namespace. It needs the label clora.dev/tracking=true, by which its"
        " owner lets trackers have it."
    )
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", min_length=1, max_length=253)] = Field(
        description="Key of the Secret whose value is the API key (WandB), the bearer token (MLflow), or the write"
        " token of the server, for a Space a Hugging Face token (Trackio)."
    )


class Tracker(ApiModel):
    """An experiment tracker that gets the metrics of every committed step, and the spec as the run's configuration."""

    model_config = rules(
        (
            "self.mode == 'Offline' || self.kind == 'WandB' || has(self.url)",
            "MLflow and Trackio need the url of a server, or mode Offline",
        ),
        (
            "self.mode == 'Offline' || self.kind == 'MLflow' || has(self.secretRef)",
            "WandB and Trackio need a secretRef with a key, or mode Offline",
        ),
        (
            "self.mode == 'Online' || !(has(self.url) || has(self.secretRef))",
            "mode Offline reaches nobody: leave url and secretRef out",
        ),
        ("self.kind == 'WandB' || !has(self.entity)", "entity is a team of W&B: leave it out for other kinds"),
        (
            "self.kind != 'Trackio' ||"
            " (self.project.matches('^[A-Za-z0-9_-]+$') && !self.project.startsWith('registry-'))",
            "a project of Trackio has letters, digits, - and _ only, and does not begin with registry-",
        ),
    )

    kind: TrackerKind = Field(description="WandB, MLflow or Trackio.")
    mode: Literal["Online", "Offline"] = Field(
        "Online",
        description="Online: to the server at url, one of the engine's tracking.allowedHosts. Offline: to files in the"
        " folder tracking of the experiment's files, for wandb sync, an MLflow server or trackio show to"
        " read.",
    )
    project: Annotated[TrackedName, Field(max_length=128)] = Field(
        description="Project of W&B or Trackio, or experiment of MLflow, that the run belongs to; made when it does not"
        " exist."
    )
    entity: Annotated[TrackedName, Field(max_length=64)] | None = Field(
        None, description="Team or user of W&B that has the project; unset: the API key's default."
    )
    run_name: Annotated[TrackedName, Field(max_length=128)] | None = Field(
        None, description="Name of the run; unset: the LoRAExperiment's."
    )
    url: Annotated[str, Field(pattern=r"^https?://[^?#@\s]+$", max_length=512)] | None = Field(
        None,
        description="Base URL of the tracking server, for Trackio also that of a Space (https://team-name.hf.space);"
        " unset, for WandB: https://api.wandb.ai.",
    )
    secret_ref: TrackingSecret | None = Field(None, description="Where the API key is.")
