"""Micro-batches: every completion once, right sources and masks, the budget; and the checks of input."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clora_engine.errors import UserError
from clora_engine.trainer_packing import check_loss, check_rows, micro_batches, trained_selection
from clora_engine.types import Completion, Loss, Row


def completion(ids: list[int], weights: list[float] | None = None) -> Completion:
    count = len(ids)
    return Completion(ids=ids, weights=weights or [1.0] * count, logprobs=[-1.0] * count, advantages=[1.0] * count)


tokens = st.integers(1, 5)  # few, so that twins and equal prompts are common; 0 is the padding
rows_strategy = st.lists(
    st.builds(
        lambda prompt, many: Row(prompt=prompt, completions=[completion(ids) for ids in many]),
        st.lists(tokens, min_size=1, max_size=4),
        st.lists(st.lists(tokens, max_size=5), max_size=4),
    ),
    max_size=5,
)


@settings(deadline=None)
@given(rows=rows_strategy, budget=st.integers(1, 40))
def test_every_completion_is_computed_once_in_its_own_context(rows: list[Row], budget: int) -> None:
    batches = micro_batches([rows], budget)
    seen: dict[tuple[int, int], int] = {}
    for batch in batches:
        height, length = batch.ids_BL.shape
        assert batch.tokens <= budget or height == 1
        for place in batch.parts[0].places:
            row = rows[place.row]
            ids = row.completions[place.completion].ids
            seen[place.row, place.completion] = seen.get((place.row, place.completion), 0) + 1
            part = slice(place.start, place.start + len(ids))
            assert batch.target_T[part].tolist() == ids
            for step, source in enumerate(batch.source_T[part].tolist()):
                b, position = divmod(source, length)
                # What this position sees, in the order of its positions, is the prompt and the completion so far.
                visible = batch.visible_BLL[b, position]
                where = batch.positions_BL[b][visible]
                assert where.tolist() == list(range(len(row.prompt) + step))
                assert batch.ids_BL[b][visible].tolist() == row.prompt + ids[:step]
        assert batch.visible_BLL.any(-1).all(), "a softmax over nothing is not a number"
    wanted = {(r, c) for r, row in enumerate(rows) for c, one in enumerate(row.completions) if one.ids}
    assert seen == dict.fromkeys(wanted, 1)


def test_equal_completions_of_equal_prompts_are_computed_once() -> None:
    rows = [
        Row(prompt=[1, 2], completions=[completion([3, 4]), completion([3, 4]), completion([5])]),
        Row(prompt=[1, 2], completions=[completion([3, 4])]),
        Row(prompt=[2, 1], completions=[completion([3, 4])]),
    ]
    (batch,) = micro_batches([rows], 100)
    assert batch.ids_BL.tolist() == [[1, 2, 3, 4, 5], [2, 1, 3, 4, 0]]
    starts = {(place.row, place.completion): place.start for place in batch.parts[0].places}
    assert starts == {(0, 0): 0, (0, 1): 0, (1, 0): 0, (0, 2): 2, (2, 0): 3}


def test_a_row_over_the_budget_is_cut_between_completions() -> None:
    row = Row(prompt=[1, 2, 3], completions=[completion([n] * 4) for n in (4, 5, 6)])
    assert [batch.ids_BL.shape for batch in micro_batches([[row]], 11)] == [(1, 11), (1, 7)]
    assert [batch.ids_BL.shape for batch in micro_batches([[row]], 2)] == [(1, 7)] * 3


def test_rows_are_put_together_up_to_a_size_for_which_none_is_cut() -> None:
    rows = [Row(prompt=[n, 2, 3], completions=[completion([7] * 4)]) for n in (1, 2, 3)]
    rows.append(Row(prompt=[4, 2, 3], completions=[completion([n] * 12) for n in (4, 5)]))
    for together, shapes in ((14, [(1, 27), (2, 7), (1, 7)]), (1, [(1, 27), *[(1, 7)] * 3]), (99, [(1, 27), (3, 7)])):
        assert [batch.ids_BL.shape for batch in micro_batches([rows], 30, together=together)] == shapes


def test_only_trained_tokens_are_selected_and_twins_keep_their_own_values() -> None:
    first, second = completion([3, 4, 5], [1.0, 0.0, 0.5]), completion([3, 4, 5], [0.0, 0.0, 2.0])
    rows = [Row(prompt=[1], completions=[first, second])]
    (batch,) = micro_batches([rows], 100)
    chosen = trained_selection(batch.parts[0], rows)
    assert chosen is not None
    assert chosen.head_H.tolist() == [0, 2]
    assert chosen.index_N.tolist() == [0, 1, 1]
    assert chosen.columns_3N[0].tolist() == [1.0, 0.5, 2.0]
    assert chosen.columns_3N.dtype == torch.float64
    unweighted = [Row(prompt=[1], completions=[completion([3], [0.0])])]
    assert trained_selection(micro_batches([unweighted], 100)[0].parts[0], unweighted) is None


NAN = float("nan")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(prompt=[], completions=[]), r"rows\[0\].prompt is empty"),
        (Row(prompt=[10], completions=[]), "outside the vocabulary of 10"),
        (Row(prompt=[1], completions=[completion([-1])]), r"completions\[0\].ids has a token id outside"),
        (Row(prompt=[1] * 5, completions=[completion([1] * 4)]), "have 9 tokens; the trainer takes 8"),
        (Row(prompt=[1], completions=[completion([1, 2], [1.0])]), "weights has 1 values for 2 tokens"),
        (Row(prompt=[1], completions=[completion([1], [NAN])]), "weights is not finite"),
        (
            Row(prompt=[1], completions=[Completion(ids=[1], weights=[1.0], logprobs=[NAN], advantages=[0.0])]),
            "logprobs is not finite at a token with a weight",
        ),
        (
            Row(prompt=[1], completions=[Completion(ids=[1], weights=[1.0], logprobs=[0.0], advantages=[NAN])]),
            "advantages is not finite",
        ),
    ],
)
def test_rows_that_the_model_cannot_take(row: Row, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_rows([row], vocabulary=10, max_positions=8)
    assert caught.value.field is not None
    assert caught.value.field.startswith("rows[0]")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"denominator": 0.0}, "loss.denominator"),
        ({"denominator": NAN}, "loss.denominator"),
        ({"temperature": 0.0}, "loss.temperature"),
        ({"clip_low": 1.3}, "loss.clip_low"),
        ({"clip_high": float("inf")}, "loss.clip_low"),
        ({"beta": -1.0}, "loss.beta"),
    ],
)
def test_losses_without_meaning(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        check_loss(msgspec.structs.replace(Loss(name="PPO", denominator=1.0), **change))
    assert caught.value.field == field
