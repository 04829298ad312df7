"""The deal of a batch to ranks: everything once, evenly, and as many passes on each where they must keep step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clora_engine.trainer_packing import EMPTY, Deal, MicroBatch, micro_batches
from clora_engine.types import Completion, Row
from tests.numerics.tiny import batch


def places(batches: list[MicroBatch]) -> list[tuple[int, int, int]]:
    return [
        (part.call, place.row, place.completion) for each in batches for part in each.parts for place in part.places
    ]


def hands(calls: list[list[Row]], budget: int, ranks: int, *, in_step: bool = False) -> list[list[MicroBatch]]:
    return [micro_batches(calls, budget, deal_to=Deal(rank, ranks, in_step)) for rank in range(ranks)]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=3), st.integers(1, 5), st.sampled_from([16, 64, 300]))
def test_every_completion_is_dealt_once(seeds: list[int], ranks: int, budget: int) -> None:
    calls = [batch(seed, rows=1 + seed % 5) for seed in seeds]
    dealt = [place for hand in hands(calls, budget, ranks) for place in places(hand)]
    assert sorted(dealt) == sorted(places(micro_batches(calls, budget)))


def group(prompt: int, lengths: list[int], seed: int = 0) -> Row:
    completions = []
    for n, length in enumerate(lengths):
        nothing = [0.0] * length
        ids = [(seed + n + place) % 97 for place in range(length)]
        completions.append(Completion(ids=ids, weights=[1.0] * length, logprobs=nothing, advantages=nothing))
    return Row(prompt=[seed + 1] * prompt, completions=completions)


def test_ranks_get_equal_shares_of_many_prompts() -> None:
    rows = [group(10, [20, 30], seed) for seed in range(16)]
    assert [sum(each.tokens for each in hand) for hand in hands([rows], 120, 4)] == [4 * 60] * 4


@pytest.mark.parametrize("prompt", [4, 1000])
def test_a_single_prompt_is_cut_for_all_ranks_but_into_no_more_parts_than_there_are(prompt: int) -> None:
    tokens = [sum(each.tokens for each in hand) for hand in hands([[group(prompt, [50] * 8)]], 4096, 4)]
    assert tokens == [prompt + 100] * 4


def test_in_step_every_rank_has_as_many_passes() -> None:
    for in_step in (True, False):
        first, second = hands([[group(4, [5])]], 64, 2, in_step=in_step)
        assert [batch.parts[0].places[0].row for batch in first] == [0]
        assert [batch is EMPTY for batch in second] == [True] * in_step
