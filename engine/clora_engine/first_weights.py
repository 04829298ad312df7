"""What an experiment's adapter starts from: fresh weights, a PEFT folder, or a commit of another experiment."""

from __future__ import annotations

import asyncio
from pathlib import Path

from clora_api.control import DesiredExperiment
from clora_engine.errors import CheckpointError, UserError
from clora_engine.journal import Journal
from clora_engine.plan import Plan
from clora_engine.training import Services


async def load_first_weights(plan: Plan, desired: DesiredExperiment, services: Services, epoch: int) -> None:
    """Creates the adapter in the trainer. Raises UserError when what `initFrom` names is not there, or is another
    tenant's."""
    trainer, uid = services.trainer, desired.uid
    if desired.init_source is not None:
        assert plan.spec.init_from is not None
        source = Journal(services.config.storage, desired.init_source.uid, epoch, services.base)
        folder = await asyncio.to_thread(_folder_of, source, desired.init_source.step, desired.namespace)
        await trainer.load(uid, folder, optimizer=plan.spec.init_from.optimizer, config=plan.lora)
    elif plan.init_folder is not None:
        await trainer.load(uid, plan.init_folder, optimizer=False, config=plan.lora)
    elif plan.spec.init_from is not None:
        raise UserError("initFrom.experiment was not resolved", field="initFrom.experiment")
    else:
        await trainer.create(uid, plan.lora)


def _folder_of(journal: Journal, step: int | None, namespace: str) -> Path:
    """The folder of the commit of `step`, or of the last one, which must be the namespace's own."""
    owner = journal.owner()
    if owner is None or owner.namespace != namespace:
        raise UserError(
            "the experiment to start from has no commits on this engine's storage",
            reason="InitFromNotFound",
            field="initFrom.experiment",
        )
    try:
        commit = journal.read_commit(step)
        journal.require_base(step)
    except CheckpointError as error:
        raise UserError(str(error), reason="InitFromNotFound", field="initFrom.experiment.step") from None
    if commit is None:
        raise UserError(f"{owner.name} has no commits yet", reason="InitFromNotFound", field="initFrom.experiment.name")
    return commit.folder
