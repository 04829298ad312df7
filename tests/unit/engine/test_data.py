"""Sources of examples, their order, and what is wrong with a bad row."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clora_engine.chat import Renderer
from clora_engine.data import Builtin, Data, Dataset, File, Generated, Inline, Rows, demonstration, load, permutation
from clora_engine.environments import Generates, Message, create
from clora_engine.errors import UserError
from tests.unit.engine.chat_fixtures import CHATML, tiny_tokenizer

GSM8K = create("GSM8K", {})
PROBLEMS = create("WordProblems", {"families": "errands"})
SAMPLE = Path(__file__).parents[2] / "data" / "gsm8k"


def rows(count: int) -> str:
    return "\n".join(json.dumps({"question": f"Q{i}?", "answer": f"#### {i}"}) for i in range(count))


def questions(dataset: Dataset, count: int) -> list[str]:
    return [dataset.example(position)["question"] for position in range(count)]


def file(path: Path, root: Path) -> File:
    return File(path, root, f"volume data, {path.name}")


@given(st.integers(1, 200), st.integers(0, 2**31 - 1), st.integers(0, 50))
def test_permutation(size: int, seed: int, round_: int) -> None:
    order = permutation(size, seed, round_)
    assert sorted(order) == list(range(size))
    permutation.cache_clear()
    assert permutation(size, seed, round_) == order


def test_permutation_stays_what_it_is() -> None:
    """A resumed run relies on it."""
    assert permutation(8, 0, 0) == (0, 3, 7, 4, 1, 5, 2, 6)
    assert permutation(8, 0, 1) != permutation(8, 0, 0) != permutation(8, 1, 0)


@given(st.integers(1, 50), st.integers(0, 100), st.integers(1, 5))
def test_each_row_comes_once_a_round(size: int, seed: int, rounds: int) -> None:
    dataset = Rows([{"i": i} for i in range(size)], seed)
    seen = [dataset.example(position)["i"] for position in range(size * rounds)]
    assert Counter(seen) == dict.fromkeys(range(size), rounds)
    assert all(sorted(seen[r * size : (r + 1) * size]) == list(range(size)) for r in range(rounds))


def test_a_position_is_all_that_a_run_remembers() -> None:
    data = load(Inline(rows(7), "inline"), GSM8K, seed=3)
    again = load(Inline(rows(7), "inline"), GSM8K, seed=3)
    assert questions(data.train, 40)[25:] == [again.train.example(p)["question"] for p in range(25, 40)]


def test_generated_examples() -> None:
    data = load(Builtin("Generated"), PROBLEMS, seed=5, held_out=40)
    assert isinstance(PROBLEMS, Generates)
    assert data.train.size is None
    assert data.train.example(17) == PROBLEMS.generate(5, "train", 17)
    assert len(data.held_out) == 40
    assert not {row["question"] for row in data.held_out} & set(questions(data.train, 500))
    assert load(Builtin("Generated"), PROBLEMS, seed=6, held_out=40).held_out == data.held_out


def test_generated_needs_an_environment_that_generates() -> None:
    with pytest.raises(UserError, match="generates no examples") as caught:
        load(Builtin("Generated"), GSM8K, seed=0)
    assert caught.value.field == "data"


def test_gsm8k_sample() -> None:
    data = load(Builtin("GSM8KSample"), GSM8K, seed=0, held_out=20)
    assert (data.train.size, len(data.held_out)) == (40, 20)
    assert data.held_out[0]["question"].startswith("Janet")
    assert len(set(questions(data.train, 40))) == 40
    assert questions(data.train, 40) != questions(load(Builtin("GSM8KSample"), GSM8K, seed=1).train, 40)
    with pytest.raises(UserError, match="GSM8KSample has 20 test rows") as caught:
        load(Builtin("GSM8KSample"), GSM8K, seed=0, held_out=21)
    assert caught.value.field == "evaluation.examples"
    with pytest.raises(UserError, match=r"GSM8KSample \(train\), line 1: 'answer' must be a number"):
        load(Builtin("GSM8KSample"), PROBLEMS, seed=0)


def test_held_out_rows_are_never_trained_on() -> None:
    data = load(Inline(rows(20), "inline"), GSM8K, seed=1, held_out=5)
    assert len(data.held_out) == 5
    trained = set(questions(data.train, 100))
    assert len(trained) == 15
    assert not trained & {row["question"] for row in data.held_out}
    with pytest.raises(UserError, match="inline has 20 rows") as caught:
        load(Inline(rows(20), "inline"), GSM8K, seed=1, held_out=20)
    assert caught.value.field == "evaluation.examples"


def test_a_real_file() -> None:
    data = load(file(SAMPLE / "train.jsonl", SAMPLE), GSM8K, seed=0)
    assert data.train.size == 40
    assert all(GSM8K.demonstration(data.train.example(position)) for position in range(40))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "holds no rows"),
        ("\n \n", "holds no rows"),
        (rows(2) + "\n{", "line 3: no JSON object"),
        (rows(1) + "\n\n[]", "line 3: no JSON object"),
        ("72", "line 1: no JSON object"),
        ("{" * 100_000, "line 1: no JSON object"),
        ('{"a":' * 100_000, "line 1: no JSON object"),
        ('{"question": "Q?"}', "line 1: 'answer' must be a text"),
        (rows(1) + '\n{"question": "Q?", "answer": "72"}', "line 2: 'answer' must end in"),
        ('{"messages": []}', "line 1: 'question' must be a text"),
        ("\x00", "line 1: no JSON object"),
        ("\ud800", "line 1: no JSON object"),
    ],
)
def test_a_bad_line_is_named(text: str, what: str) -> None:
    with pytest.raises(UserError, match=f"ConfigMap p, key train, {what}|ConfigMap p, key train {what}") as caught:
        load(Inline(text, "ConfigMap p, key train"), GSM8K, seed=0)
    assert (caught.value.field, caught.value.reason) == ("data", "InvalidData")


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(rows(1).encode() + b'\n{"question": "\xff", "answer": "#### 1"}\n')
    with pytest.raises(UserError, match=r"volume data, rows.jsonl, line 2: no JSON object"):
        load(file(path, tmp_path), GSM8K, seed=0)


def test_files_stay_below_their_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "volume", tmp_path / "secret.jsonl"
    root.mkdir()
    outside.write_text(rows(3))
    (root / "link.jsonl").symlink_to(outside)
    (root / "folder.jsonl").mkdir()
    os.mkfifo(root / "pipe.jsonl")
    (root / "rows.csv").write_bytes(b"a,b")
    for name, what in {
        "../secret.jsonl": "not within its volume",
        "link.jsonl": "not within its volume",
        "missing.jsonl": "does not exist",
        "folder.jsonl": "is no file",
        "pipe.jsonl": "is no file",
        "rows.csv": "convert it to JSON Lines",
    }.items():
        with pytest.raises(UserError, match=what) as caught:
            load(file(root / name, root), GSM8K, seed=0)
        assert caught.value.field == "data"
        assert str(tmp_path) not in str(caught.value)


CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


def test_chats_for_supervised_training() -> None:
    text = json.dumps({**CHAT, "source": "me"}) + "\n" + rows(1)
    data: Data = load(Inline(text, "inline"), GSM8K, seed=0, chat=True)
    conversations = {demonstration(data.train.example(position), GSM8K)[0].content for position in range(2)}
    assert conversations == {"Hi", "Q0?"}
    with pytest.raises(UserError, match="line 1: 'question' must be a text"):
        load(Inline(text, "inline"), GSM8K, seed=0)


def test_a_chats_own_conversation_is_the_demonstration() -> None:
    assert demonstration(CHAT, GSM8K) == [Message("user", "Hi"), Message("assistant", "Hello.")]


def test_a_chat_can_spell_out_an_episode() -> None:
    renderer = Renderer(tiny_tokenizer(CHATML), GSM8K.tools)
    written = {
        "messages": [
            {"role": "user", "content": "Q?"},
            {"role": "assistant", "content": '{"calculator": "70+2"}'},
            {"role": "tool", "content": "72"},
            {"role": "assistant", "content": '{"final_answer": 72}'},
        ]
    }
    data = load(Inline(json.dumps(written), "inline"), GSM8K, seed=0, chat=True)
    by_hand = renderer.demonstration(demonstration(data.train.example(0), GSM8K))
    row = {"question": "Q?", "answer": "<<70+2=72>>\n#### 72"}
    assert by_hand == renderer.demonstration(GSM8K.demonstration(row))


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "must start with the user"),
        ([{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hi"}], "must start with"),
        ([{"role": "tool", "content": "72"}, {"role": "assistant", "content": "Hi"}], "must start with"),
        ("Hi", "Expected `array`"),
        ([{"role": "user", "content": "Hi"}], "must start with"),
        ([{"role": "assistant", "content": "Hi"}] * 2, "must start with"),
        ([{"role": "user", "content": "Hi"}, {"role": "critic", "content": "No."}], "Invalid enum value 'critic'"),
        ([{"role": "user"}], "missing required field `content`"),
        ([{"role": "user", "content": 5}], "Expected `str`, got `int`"),
        ([{"role": "user", "content": "Hi", "tool_calls": []}], "unknown field `tool_calls`"),
    ],
)
def test_bad_chats_are_named(messages: Any, what: str) -> None:
    with pytest.raises(UserError, match=f"inline, line 1: 'messages'.*{what}"):
        load(Inline(json.dumps({"messages": messages}), "inline"), GSM8K, seed=0, chat=True)


def test_datasets_are_values() -> None:
    assert isinstance(PROBLEMS, Generates)
    assert Generated(PROBLEMS, 1) == Generated(PROBLEMS, 1) != Generated(PROBLEMS, 2)


def test_chats_set_aside_to_evaluate_on_must_be_playable() -> None:
    said = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    chats = "\n".join([json.dumps(said)] * 4)
    with pytest.raises(UserError, match="the environment cannot play them: 'question' must be a text") as caught:
        load(Inline(chats, "inline"), GSM8K, seed=0, held_out=2, chat=True)
    assert caught.value.field == "evaluation.examples"
    both = "\n".join([json.dumps({**said, "question": "Q?", "answer": "#### 1"})] * 4)
    assert len(load(Inline(both, "inline"), GSM8K, seed=0, held_out=2, chat=True).held_out) == 2
