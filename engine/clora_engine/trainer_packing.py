"""From rows to micro-batches: shared prompts, merged twins, a token budget, and input that is checked first.

One packed row holds a prompt once and several completions behind it. A block mask lets a completion see the prompt and
itself only, and its positions count on from the prompt's end, so every completion is computed as if it stood alone.

Completions of one prompt with the same token ids are computed once, because their log-probs are the same; each keeps
its own weights, sampler log-probs and advantages, and the loss is evaluated for each. That is exact for every loss,
whether or not it is linear in the advantage. Rows with the same prompt are joined in the same way.

A row that would pass the budget is cut between completions; the prompt is then computed once per piece.

Several calls of different adapters can be cut together: a micro-batch then holds rows of each, call by call, and
nothing is ever shared between two calls, neither a row nor a prompt.
"""

# ruff: noqa: N815 (fields carry shape suffixes)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clora_engine.errors import UserError
from clora_engine.trainer_pieces import Piece, deal, group, pieces_of
from clora_engine.types import Completion, Loss, Row


@dataclass(frozen=True, slots=True)
class Place:
    """Where a completion of a call's rows is computed: `start` is its first token among the micro-batch's T."""

    row: int
    completion: int
    start: int


@dataclass(frozen=True, slots=True)
class Part:
    """What a micro-batch holds of one call: its rows `row_start` to `row_stop` of the B, and their completions."""

    call: int
    row_start: int
    row_stop: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. `source_T` is the flat position in B·L whose hidden state predicts token `target_T`. `parts`
    cover the rows in order, one for each call that has some."""

    ids_BL: Tensor
    positions_BL: Tensor
    visible_BLL: Tensor  # bool: query position (second axis) sees key position (third)
    source_T: Tensor
    target_T: Tensor
    parts: tuple[Part, ...]

    @property
    def tokens(self) -> int:
        """Positions computed, padding included."""
        return self.ids_BL.numel()


EMPTY = MicroBatch(
    ids_BL=torch.zeros(1, 1, dtype=torch.int64),
    positions_BL=torch.zeros(1, 1, dtype=torch.int64),
    visible_BLL=torch.ones(1, 1, 1, dtype=torch.bool),
    source_T=torch.zeros(0, dtype=torch.int64),
    target_T=torch.zeros(0, dtype=torch.int64),
    parts=(),
)
"""One token of nobody: what a rank computes that must keep step with the others and has nothing left to do."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Micro-batches are for `rank` of `ranks`. in_step: every rank gets as many, some of them EMPTY."""

    rank: int = 0
    ranks: int = 1
    in_step: bool = False


ALONE = Deal()


def micro_batches(
    calls: Sequence[Sequence[Row]],
    tokens_per_microbatch: int,
    *,
    trained_only: bool = False,
    share: bool = True,
    together: int | None = None,
    deal_to: Deal = ALONE,
) -> list[MicroBatch]:
    """Cuts the checked rows of some calls into micro-batches of at most `tokens_per_microbatch` positions, padding
    included; one prompt with one completion that is longer still gets a micro-batch of its own. Longest first, so that
    memory runs out at once or not at all. Deterministic in `calls`.

    trained_only: leaves out completions without any weight. share: without it every completion is a row of its own.
    together: positions from which on rows are not put together any more, where that is less; longer ones are not cut
    for it. deal_to: which rank's part of them.
    """
    pieces = [
        piece
        for call, rows in enumerate(calls)
        for piece in pieces_of(call, rows, tokens_per_microbatch, trained_only=trained_only, share=share)
    ]
    most = tokens_per_microbatch if together is None else min(together, tokens_per_microbatch)
    hands = [group(hand, most) for hand in deal(pieces, deal_to.ranks)]
    batches = [_assemble(sorted(batch, key=lambda piece: piece.call)) for batch in hands[deal_to.rank]]
    if deal_to.in_step:
        batches += [EMPTY] * (max(map(len, hands)) - len(batches))
    return batches


def plain_tokens(rows: Sequence[Row]) -> int:
    """Positions that the trained completions would take with a row for each and no padding."""
    return sum(len(row.prompt) + len(one.ids) for row in rows for one in row.completions if any(one.weights))


def longest(rows: Sequence[Row], *, trained_only: bool = False) -> int:
    """The longest prompt with one of its completions: no micro-batch can be smaller. trained_only: as there."""
    return max(
        (
            len(row.prompt) + len(one.ids)
            for row in rows
            for one in row.completions
            if not trained_only or any(one.weights)
        ),
        default=0,
    )


def _assemble(pieces: list[Piece]) -> MicroBatch:
    length = max(piece.length for piece in pieces)
    ids_BL = np.zeros((len(pieces), length), dtype=np.int64)
    positions_BL = np.zeros_like(ids_BL)
    segments_BL = np.full_like(ids_BL, -1)  # 0 the prompt, 1… its completions, -1 padding
    sources: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    places: dict[int, list[Place]] = {}
    start = 0
    for b, piece in enumerate(pieces):
        prompt_end = len(piece.prompt)
        ids_BL[b, :prompt_end] = piece.prompt
        positions_BL[b, :prompt_end] = np.arange(prompt_end)
        segments_BL[b, :prompt_end] = 0
        begin = prompt_end
        for segment, (ids, twins) in enumerate(zip(piece.completions, piece.owners, strict=True), start=1):
            end = begin + len(ids)
            ids_BL[b, begin:end] = ids
            positions_BL[b, begin:end] = np.arange(prompt_end, prompt_end + len(ids))
            segments_BL[b, begin:end] = segment
            source = np.arange(begin - 1, end - 1)
            # The first token is predicted by the prompt's last, wherever the completion lies.
            source[0] = prompt_end - 1
            sources.append(b * length + source)
            targets.append(ids_BL[b, begin:end])
            places.setdefault(piece.call, []).extend(Place(row, completion, start) for row, completion in twins)
            start += len(ids)
            begin = end
    return MicroBatch(
        ids_BL=torch.from_numpy(ids_BL),
        positions_BL=torch.from_numpy(positions_BL),
        visible_BLL=_visible(torch.from_numpy(segments_BL)),
        source_T=torch.from_numpy(np.concatenate(sources)),
        target_T=torch.from_numpy(np.concatenate(targets)),
        parts=_parts([piece.call for piece in pieces], places),
    )


def _parts(calls: list[int], places: dict[int, list[Place]]) -> tuple[Part, ...]:
    """`calls`: the call of each row, in ascending order."""
    return tuple(
        Part(call, calls.index(call), calls.index(call) + calls.count(call), tuple(found))
        for call, found in places.items()
    )


def _visible(segments_BL: Tensor) -> Tensor:
    query, key = segments_BL[:, :, None], segments_BL[:, None, :]
    # Padding is a segment of its own, so each of its positions sees at least itself and no softmax is empty.
    same = (query == key) | ((key == 0) & (query > 0))
    return same & torch.ones(same.shape[1:], dtype=torch.bool).tril()


# --------------------------------------------------------------------------------------------- what is trained


@dataclass(frozen=True, slots=True)
class TrainedSelection:
    """The trained tokens of one call in a micro-batch. `head_H` are the distinct tokens (indices into T) whose
    log-probs are needed; token n of the loss (twins counted each) reads the log-prob at `index_N[n]` of those."""

    head_H: Tensor
    index_N: Tensor
    columns_3N: Tensor  # weights, sampler log-probs, advantages


def trained_selection(part: Part, rows: Sequence[Row]) -> TrainedSelection | None:
    """The part's tokens of weight ≠ 0, or None when it has none; `rows` are its call's. Columns in FP64."""
    indices: list[NDArray[np.int64]] = []
    columns: list[NDArray[np.float64]] = []
    for place in part.places:
        completion = rows[place.row].completions[place.completion]
        values = np.array([completion.weights, completion.logprobs, completion.advantages], dtype=np.float64)
        trained = np.flatnonzero(values[0])
        indices.append(place.start + trained)
        columns.append(values[:, trained])
    head, index = np.unique(np.concatenate(indices), return_inverse=True)
    if head.size == 0:
        return None
    columns_3N = torch.from_numpy(np.concatenate(columns, axis=1))
    return TrainedSelection(torch.from_numpy(head), torch.from_numpy(index), columns_3N)


# --------------------------------------------------------------------------------------------- checks


def check_rows(rows: Sequence[Row], *, vocabulary: int, max_positions: int) -> None:
    """Raises UserError for rows that the trainer cannot take. A bad token id must never reach a GPU, where it would end
    the process for every tenant. `max_positions` bounds a prompt and one of its completions together."""
    for r, row in enumerate(rows):
        where = f"rows[{r}]"
        if not row.prompt:
            raise UserError(f"{where}.prompt is empty; it needs at least one token", field=f"{where}.prompt")
        _check_ids(row.prompt, vocabulary, f"{where}.prompt")
        for c, completion in enumerate(row.completions):
            name = f"{where}.completions[{c}]"
            _check_ids(completion.ids, vocabulary, f"{name}.ids")
            length = len(row.prompt) + len(completion.ids)
            if length > max_positions:
                raise UserError(
                    f"{where}.prompt and {name} have {length} tokens; the trainer takes {max_positions}", field=name
                )
            _check_values(completion, name)


def _check_ids(ids: list[int], vocabulary: int, name: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        raise UserError(f"{name} has a token id outside the vocabulary of {vocabulary}", field=name)


def _check_values(completion: Completion, name: str) -> None:
    for column in ("weights", "logprobs", "advantages"):
        values = getattr(completion, column)
        if len(values) != len(completion.ids):
            raise UserError(
                f"{name}.{column} has {len(values)} values for {len(completion.ids)} tokens", field=f"{name}.{column}"
            )
    for column in ("weights", "logprobs", "advantages"):
        values = zip(completion.weights, getattr(completion, column), strict=True)
        if not all(weight == 0 or math.isfinite(value) for weight, value in values):
            raise UserError(f"{name}.{column} is not finite at a token with a weight", field=f"{name}.{column}")


def check_loss(loss: Loss) -> None:
    """Raises UserError for loss settings without meaning."""
    for name in ("denominator", "temperature"):
        value = getattr(loss, name)
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"loss.{name} is {value}; it must be a finite number above 0", field=f"loss.{name}")
    if not 0 <= loss.clip_low <= loss.clip_high < math.inf:
        raise UserError(
            f"loss.clip_low is {loss.clip_low} and loss.clip_high is {loss.clip_high}; they are absolute ratios with "
            "0 <= clip_low <= clip_high",
            field="loss.clip_low",
        )
    if not (math.isfinite(loss.beta) and loss.beta >= 0):
        raise UserError(f"loss.beta is {loss.beta}; it must be a finite number of at least 0", field="loss.beta")
