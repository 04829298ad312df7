"""What the sampler's gate and the trainer's queue know of an experiment while it runs: its weight, and the work that it
has left, in tokens, one number for both. So both serve the same experiment first."""

from __future__ import annotations

from clora_engine.plan import Plan
from clora_engine.progress import Progress
from clora_engine.training import Services


class WorkLeft:
    """Of experiment `uid`."""

    def __init__(self, services: Services, uid: str) -> None:
        self._services, self._uid = services, uid
        self._tokens: int | None = None  # None while nobody was told
        self._samples = False

    def tell(self, plan: Plan, progress: Progress, weight: int) -> None:
        """After every step, and before the first, so that seats come free for it while it prepares."""
        self._tokens, self._samples = plan.remaining_tokens(progress.step, progress.step_tokens), plan.samples
        self.reweigh(weight)

    def reweigh(self, weight: int) -> None:
        """A new weight counts at once, where there is anything that it counts for."""
        if self._tokens is None:
            return
        self._services.trainer.register(self._uid, weight, self._tokens)
        if self._samples:  # for one that never samples, no seats must be set aside
            self._services.sampler.register(self._uid, weight, self._tokens)

    def leave_trainer(self) -> None:
        """It runs no longer; what it has on the sampler is seen to elsewhere (after_end.py)."""
        self._tokens = None
        self._services.trainer.remove(self._uid)
