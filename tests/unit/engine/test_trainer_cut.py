"""A call that is cut: nothing is lost, nothing is too large, and the parts say together what the whole would have."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clora_engine.trainer_cut import count_trained, cut, joined_logprobs, joined_results, trained
from clora_engine.types import AdamParams, Completion, LoraConfig, Loss, Row
from tests.numerics.tiny import batch, completion, tiny_trainer, trained_tokens

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 20), max_size=6)), max_size=8)


def flat(rows: list[Row]) -> list[tuple[list[int], Completion]]:
    return [(row.prompt, one) for row in rows for one in row.completions]


def size(rows: list[Row]) -> int:
    return sum(len(row.prompt) + sum(len(one.ids) for one in row.completions) for row in rows)


@given(SHAPES, st.integers(1, 60))
def test_pieces_hold_everything_in_order_and_no_more_than_they_may(
    shapes: list[tuple[int, list[int]]], most: int
) -> None:
    rng = random.Random(0)
    rows = [Row(prompt=[1] * length, completions=[completion(rng, n) for n in several]) for length, several in shapes]
    pieces = cut(rows, most)
    assert flat([row for piece in pieces for row in piece]) == flat(rows)
    for piece in pieces:
        assert size(piece) <= most or (len(piece) == 1 and len(piece[0].completions) <= 1)
    answers = [[[one.logprobs for one in row.completions] for row in piece] for piece in pieces]
    assert joined_logprobs(rows, answers) == [[one.logprobs for one in row.completions] for row in rows]


def test_pieces_without_any_weight_are_left_out_unless_there_is_no_other() -> None:
    idle = Completion(ids=[1] * 9, weights=[0.0] * 9, logprobs=[0.0] * 9, advantages=[0.0] * 9)
    rows = [Row(prompt=[1], completions=[idle]), *batch(1), Row(prompt=[2], completions=[idle])]
    pieces = trained(cut(rows, 10))
    assert flat([row for piece in pieces for row in piece]) == flat(batch(1))
    assert trained(cut(rows[:1] * 3, 10)) == [rows[:1]]
    assert trained(cut([], 10)) == [[]]


@pytest.mark.parametrize("loss", ["PPO", "CrossEntropy"])
def test_a_call_in_pieces_gives_the_gradient_and_the_metrics_of_the_whole(loss: str) -> None:
    rows = batch(5, rows=8)
    settings = Loss(name=loss, denominator=trained_tokens(rows))  # type: ignore[arg-type]
    trainer = tiny_trainer()
    for name in ("whole", "cut"):
        trainer.create(name, LoraConfig(rank=8, alpha=8, seed=1))
    whole = trainer.forward_backward("whole", rows, settings)
    pieces = cut(rows, 60)
    assert len(pieces) > 3
    made = joined_results(
        [count_trained(piece) for piece in pieces],
        [trainer.forward_backward("cut", piece, settings) for piece in pieces],
    )
    assert made.plain_tokens == whole.plain_tokens
    assert made.loss == pytest.approx(whole.loss, abs=1e-6)
    assert made.metrics == pytest.approx(whole.metrics, abs=1e-5)
    steps = [trainer.optim_step(name, AdamParams(learning_rate=1e-3)) for name in ("cut", "whole")]
    assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=1e-4)
