"""What becomes one packed row each, and which of a trainer's ranks computes it.

A piece is a prompt with some of its distinct completions. With several ranks (one process per device) the pieces of a
call are dealt out by their lengths, longest first, each to the rank that has least so far (Graham 1969: at most 4/3 of
the best possible load). A piece longer than a rank's fair share is cut first, so that a call of few prompts keeps all
ranks busy; its prompt is then computed once on each of them. Every rank works the whole deal out for itself, from the
same calls, so nothing has to be said about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from clora_engine.types import Row

Ids = tuple[int, ...]


@dataclass(slots=True)
class Piece:
    """`owners`: for each completion, (row, completion) of each of its twins in call number `call`."""

    call: int
    prompt: Ids
    completions: list[Ids] = field(default_factory=list)
    owners: list[list[tuple[int, int]]] = field(default_factory=list)
    length: int = 0

    @classmethod
    def pack(
        cls, call: int, prompt: Ids, distinct: Sequence[tuple[Ids, list[tuple[int, int]]]], budget: int
    ) -> list[Piece]:
        """Pieces of at most `budget` tokens, or one completion where that is more."""
        pieces = [cls(call, prompt, length=len(prompt))]
        for ids, twins in distinct:
            if pieces[-1].completions and pieces[-1].length + len(ids) > budget:
                pieces.append(cls(call, prompt, length=len(prompt)))
            pieces[-1].completions.append(ids)
            pieces[-1].owners.append(twins)
            pieces[-1].length += len(ids)
        return pieces


def pieces_of(call: int, rows: Sequence[Row], budget: int, *, trained_only: bool, share: bool) -> list[Piece]:
    """A call's rows as pieces of at most `budget` tokens; see trainer_packing.micro_batches."""
    owners: dict[object, dict[Ids, list[tuple[int, int]]]] = {}
    prompts: dict[object, Ids] = {}
    for r, row in enumerate(rows):
        for c, completion in enumerate(row.completions):
            if completion.ids and (not trained_only or any(completion.weights)):
                prompt = tuple(row.prompt)
                key: object = prompt if share else (r, c)
                prompts[key] = prompt
                owners.setdefault(key, {}).setdefault(tuple(completion.ids), []).append((r, c))
    return [
        piece
        for key, distinct in owners.items()
        for piece in Piece.pack(call, prompts[key], list(distinct.items()), budget)
    ]


def deal(pieces: Sequence[Piece], ranks: int) -> list[list[Piece]]:
    """The pieces of each rank, longest first. Deterministic."""
    if ranks > 1:
        fair = -(-sum(piece.length for piece in pieces) // ranks)
        pieces = [part for piece in pieces for part in _cut(piece, fair, ranks)]
    hands: list[list[Piece]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        least = loads.index(min(loads))
        hands[least].append(piece)
        loads[least] += piece.length
    return hands


def _cut(piece: Piece, fair: int, ranks: int) -> list[Piece]:
    """A piece longer than `fair`, in as many parts as there are ranks at most: more would only repeat the prompt."""
    if piece.length <= fair:
        return [piece]
    completions = piece.length - len(piece.prompt)
    budget = max(fair, len(piece.prompt) + -(-completions // ranks))
    return Piece.pack(piece.call, piece.prompt, list(zip(piece.completions, piece.owners, strict=True)), budget)


def group(pieces: Sequence[Piece], tokens_per_microbatch: int) -> list[list[Piece]]:
    """Pieces (longest first) that are computed in one pass: at most so many positions, padding included, or one."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and groups[-1][0].length * (len(groups[-1]) + 1) <= tokens_per_microbatch:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups
