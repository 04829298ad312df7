"""What an experiment keeps on the engine after its end, to be served to tenants: its last version, and its slot.

While it trains, tenants get what it has on the sampler anyway. When it succeeds, `keep` leaves that version there; in a
later epoch `load` brings it back from the last commit, without the trainer. Left out: who may ask (serving.py).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from clora_engine.sampler import Sampler

log = logging.getLogger(__name__)


class AfterEnd:
    """Of experiment `uid`. keeps_slot: it is served, or about to be. step: of the version that answers, once it is on
    the sampler. problem: why the last `load` failed, or what became of its version."""

    def __init__(self, sampler: Sampler, uid: str) -> None:
        self._sampler, self._uid = sampler, uid
        self.keeps_slot = False
        self.step: int | None = None
        self.problem = ""

    def keep(self, step: int | None) -> None:
        """It has just ended: the version that is on the sampler, of `step`, stays there."""
        self.keeps_slot, self.step = True, step

    def begin(self) -> None:
        """Takes the slot; `load` comes next."""
        self.keeps_slot = True

    async def load(self, weight: int, publish: Callable[[], Awaitable[int]]) -> None:
        """`publish` brings a version to the sampler and gives its step. Raises nothing but CancelledError: an error
        gives the slot back."""
        try:
            self._sampler.register(self._uid, weight, None)
            step = await publish()
            if self.keeps_slot:
                self.step, self.problem = step, ""
        except Exception as error:
            if self.keeps_slot:
                log.warning("%s cannot be served: %s", self._uid, error)
                self.problem = str(error)[:1024]
                self.stop()
        if not self.keeps_slot:
            self._sampler.drop(self._uid)  # told to stop meanwhile, when there was no version to drop yet

    def lost(self, step: int) -> bool:
        """Whether that was the version that answers: it then gives the slot back."""
        if not self.keeps_slot or self.step != step:
            return False
        self.problem = f"the sampler could not load step {step} again after vLLM's core had died"
        self.stop()
        return True

    def reweigh(self, weight: int) -> None:
        """A new weight counts at once."""
        if self.keeps_slot:
            self._sampler.register(self._uid, weight, None)

    def leave_trainer(self, weight: int) -> None:
        """The end of its last run: nothing but tenants' requests is left to sample, or nothing at all."""
        if self.keeps_slot:
            self._sampler.register(self._uid, weight, None)
        else:
            self._sampler.drop(self._uid)

    def stop(self) -> None:
        """Gives version and slot back; requests under way are finished."""
        if self.keeps_slot:
            self.keeps_slot, self.step = False, None
            self._sampler.drop(self._uid)
