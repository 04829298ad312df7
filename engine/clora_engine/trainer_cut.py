"""A large call on the trainer as several small ones, so that other adapters' calls come in between.

A loss is a sum over tokens and its denominator comes with the call, so the gradients of the pieces add up to the
call's. Completions are never cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clora_engine.types import Completion, ForwardBackwardResult, Row


def cut(rows: Sequence[Row], most_tokens: int) -> list[list[Row]]:
    """Pieces of at most so many tokens, or of one completion with its prompt; in order, each with as many as fit."""
    pieces: list[list[Row]] = []
    room = -1
    for prompt, several in _small_rows(rows, most_tokens):
        tokens = len(prompt) + sum(len(one.ids) for one in several)
        if tokens > room:
            pieces.append([])
            room = most_tokens
        pieces[-1].append(Row(prompt=prompt, completions=several))
        room -= tokens
    return pieces or [[]]


def trained(pieces: Sequence[list[Row]]) -> list[list[Row]]:
    """Those in which there is something to train on; the first where there is nothing at all."""
    found = [piece for piece in pieces if any(any(one.weights) for row in piece for one in row.completions)]
    return found or list(pieces[:1])


def count_trained(piece: Sequence[Row]) -> int:
    """Tokens that have a weight."""
    return sum(weight != 0 for row in piece for one in row.completions for weight in one.weights)


def joined_results(counts: Sequence[int], results: Sequence[ForwardBackwardResult]) -> ForwardBackwardResult:
    """What the whole call would have answered; `counts`: of each piece's trained tokens. Metrics are means over these,
    `seconds` those of all pieces."""
    means = {
        name: sum(result.metrics[name] * count for result, count in zip(results, counts, strict=True)) / sum(counts)
        for name in results[0].metrics
    }
    return ForwardBackwardResult(
        loss=sum(result.loss for result in results),
        metrics=means,
        tokens=sum(result.tokens for result in results),
        plain_tokens=sum(result.plain_tokens for result in results),
        adapters=max(result.adapters for result in results),
        seconds=sum(result.seconds for result in results),
    )


def joined_logprobs(rows: Sequence[Row], pieces: Sequence[list[list[list[float]]]]) -> list[list[list[float]]]:
    """row -> completion -> token, of the rows as they were before they were cut."""
    completions = iter([one for piece in pieces for row in piece for one in row])
    return [[next(completions) for _ in row.completions] for row in rows]


def _small_rows(rows: Sequence[Row], most_tokens: int) -> Iterator[tuple[list[int], list[Completion]]]:
    for row in rows:
        several: list[Completion] = []
        room = most_tokens - len(row.prompt)
        for one in row.completions:
            if several and len(one.ids) > room:
                yield row.prompt, several
                several, room = [], most_tokens - len(row.prompt)
            several.append(one)
            room -= len(one.ids)
        yield row.prompt, several
