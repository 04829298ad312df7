"""trainer.slots: Auto. How many adapters a pass shall train together, and up to which size of calls that pays.

A pass costs about   overhead + per_token · tokens + per_adapter · (adapters - 1)   seconds. Three short passes measured
when the trainer starts give the three numbers: a small and a larger one of one adapter, and a small one of several. To
join g calls of t tokens saves g - 1 overheads, which no longer matters when t is large. What the model predicts is
then measured once more at another size, and both are logged. Every pass is measured in turn with the others and the
best of its times counts, because other processes start at the same time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from clora_engine.lora import rank_bucket
from clora_engine.trainer import Trainer
from clora_engine.trainer_pass import Request
from clora_engine.types import Completion, LoraConfig, Loss, Row

log = logging.getLogger("clora.trainer")

GAIN = 0.05  # what joining must save to be worth the wait of those that could have been first
ROW = 32  # tokens of a row that is measured, a quarter of them its prompt
SIZES = {"cpu": (32, 128), "cuda": (128, 4096)}  # of the small and the larger pass: seconds altogether, on either
JOINED = 4  # adapters of the joined pass
ROUNDS = 2
MOST_SLOTS = 8
FEWEST_TOKENS = 32  # calls smaller than this do not occur


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a pass: `overhead`, `per_token`, and `per_adapter` beyond the first."""

    overhead: float
    per_token: float
    per_adapter: float

    @classmethod
    def fit(cls, sizes: tuple[int, int], alone: tuple[float, float], adapters: int, joined: float) -> CostModel:
        """alone: seconds of a pass of one adapter of each of the two sizes; joined: of one with the smaller size from
        each of `adapters`."""
        small, large = sizes
        per_token = max(1e-9, (alone[1] - alone[0]) / (large - small))
        overhead = max(0.0, alone[0] - per_token * small)
        per_adapter = (joined - overhead - per_token * small * adapters) / (adapters - 1)
        return cls(overhead, per_token, max(0.0, per_adapter))

    def seconds(self, adapters: int, tokens: int) -> float:
        """A pass of `adapters` calls of `tokens` each."""
        return self.overhead + self.per_token * adapters * tokens + self.per_adapter * (adapters - 1)

    def join_below(self, adapters: int) -> int:
        """The size of calls from which on to join so many of them gains less than GAIN; 0 where it never does."""
        saved = adapters * self.overhead - (1 + GAIN) * (self.overhead + (adapters - 1) * self.per_adapter)
        tokens = int(saved / (GAIN * adapters * self.per_token))
        return tokens if tokens >= FEWEST_TOKENS else 0


@dataclass(frozen=True, slots=True)
class Choice:
    """slots of the trainer; calls of fewer than join_below tokens are joined."""

    slots: int
    join_below: int


def choose(trainer: Trainer, most: int, *, clock: Callable[[], float] = time.perf_counter) -> Choice:
    """Measures and chooses among 1 to `most` slots; nothing of the measurement remains in the trainer."""
    small, large = SIZES[trainer.store.device.type]
    slots = min(most, MOST_SLOTS, trainer.tokens_per_microbatch // small)
    if slots < 2 or trainer.longest_row < ROW or trainer.tokens_per_microbatch < large:
        return Choice(1, 0)
    adapters = min(slots, JOINED)
    names = [f"measured-{n}" for n in range(adapters)]
    with trainer.ranks.together():
        trainer.slots = adapters
    try:
        for seed, name in enumerate(names):
            trainer.create(name, LoraConfig(rank=min(trainer.max_rank, rank_bucket(1)), alpha=1, seed=seed))
        first, second, joined = _measure(trainer, names, [(1, small), (1, large), (adapters, small)], clock)
        model = CostModel.fit((small, large), (first, second), adapters, joined)
        threshold = min(model.join_below(slots), trainer.tokens_per_microbatch)
        (found,) = _measure(trainer, names, [(adapters, 2 * small)], clock)
    finally:
        for name in names:
            if name in trainer.store:
                trainer.delete(name)
        trainer.slots = 1
    ranks = trainer.ranks.size
    choice = Choice(slots, threshold * ranks) if threshold else Choice(1, 0)
    why = (
        f"joining calls below {choice.join_below} tokens"
        if threshold
        else f"for a pass's overhead of {model.overhead:.3f} s is too little to share"
    )
    log.info(
        "trainer.slots: %d, %s; %d calls of %d tokens: predicted %.3f s together and %.3f s in turn, measured %.3f s"
        " together",
        *(choice.slots, why, adapters, 2 * small * ranks),
        *(model.seconds(adapters, 2 * small), adapters * model.seconds(1, 2 * small), found),
    )
    return choice


def _measure(
    trainer: Trainer, names: list[str], cases: list[tuple[int, int]], clock: Callable[[], float]
) -> list[float]:
    """The best seconds of each case (adapters, tokens of each), after one pass that does not count."""
    best = [float("inf")] * len(cases)
    ranks = trainer.ranks.size  # each of which gets an equal share, for the numbers are those of one
    for round_ in range(-1, ROUNDS):
        for n, (adapters, tokens) in enumerate(cases):
            requests = [Request(name, _rows(ranks * tokens, seed), _LOSS) for seed, name in enumerate(names[:adapters])]
            started = clock()
            outcomes = trainer.forward_backward_joined(requests)
            taken = clock() - started
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
            if round_ >= 0:
                best[n] = min(best[n], taken)
    return best


_LOSS = Loss(name="CrossEntropy", denominator=1.0)


def _rows(tokens: int, seed: int) -> list[Row]:
    """Rows of ROW tokens that share and merge nothing; token ids are small, so that every model has them."""
    rows = []
    for row in range(max(1, tokens // ROW)):
        ids = [(7 * row + 3 * seed + place) % 97 for place in range(ROW)]
        prompt, answer = [row % 97, *ids[1 : ROW // 4]], ids[ROW // 4 :]
        zeros = [0.0] * len(answer)
        one = Completion(ids=answer, weights=[1.0] * len(answer), logprobs=zeros, advantages=zeros)
        rows.append(Row(prompt=prompt, completions=[one]))
    return rows
