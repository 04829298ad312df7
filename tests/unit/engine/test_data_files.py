"""Rows of files: Parquet, the hub (a real server on this machine that answers as it does), what is wrong with them."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from huggingface_hub import constants

from clora_engine import data_hub, data_rows
from clora_engine.data import Data, File, HubFile, load
from clora_engine.data_files import parse_lines, read_file
from clora_engine.data_hub import from_hub
from clora_engine.environments import create
from clora_engine.errors import TransientError, UserError
from tests.unit.engine.environments.http_server import breaks_off, serving

GSM8K = create("GSM8K", {})
ROWS = [{"question": f"Q{i}?", "answer": f"#### {i}"} for i in range(12)]
LINES = "\n".join(json.dumps(row) for row in ROWS).encode()


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_file(path, path.parent, "data", path.suffix)]


# ------------------------------------------------------------------------------------ Parquet


def test_parquet_as_gsm8k_has_it(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "train-00000-of-00001.parquet", row_group_size=5)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:4]), tmp_path / "test-00000-of-00001.parquet")
    test = File(tmp_path / "test-00000-of-00001.parquet", tmp_path, "test")
    source = File(tmp_path / "train-00000-of-00001.parquet", tmp_path, "train", test)
    data = load(source, GSM8K, seed=0, held_out=3)
    assert data.train.size == 12
    assert len(data.held_out) == 3
    assert {row["question"] for row in data.held_out} <= {"Q0?", "Q1?", "Q2?", "Q3?"}


def test_values_that_json_does_not_know_become_text(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = {
        "day": datetime.date(2024, 7, 26),
        "price": decimal.Decimal("1.50"),
        "raw": b"\x00\xff",
        "nested": [{"a": 1, "b": None}],
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "x.parquet")
    (found,) = rows(tmp_path / "x.parquet")
    assert found == {"day": "2024-07-26", "price": "1.50", "raw": "AP8=", "nested": [{"a": 1, "b": None}]}
    json.dumps(found)


def test_a_bad_row_of_parquet_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    bad = [*ROWS[:6], {"question": "Q?", "answer": "none"}]
    parquet.write_table(pyarrow.Table.from_pylist(bad), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="volume/x, row 7: 'answer' must end in"):
        load(File(tmp_path / "x.parquet", tmp_path, "volume/x"), GSM8K, seed=0)


def test_parquet_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    zeros = pyarrow.table({"question": ["0" * 1000] * 10_000})
    parquet.write_table(zeros, tmp_path / "x.parquet", compression="zstd")
    monkeypatch.setattr(data_rows, "MAX_FILE_BYTES", 1 << 20)
    assert (tmp_path / "x.parquet").stat().st_size < 1 << 20
    with pytest.raises(UserError, match="data is larger than 1 MiB when it is unpacked"):
        rows(tmp_path / "x.parquet")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", LINES])
def test_what_is_no_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(UserError, match="data is no Parquet file that can be read"):
        rows(tmp_path / "x.parquet")


def test_without_pyarrow_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"this engine reads no Parquet \(pyarrow is missing\); convert it"):
        rows(tmp_path / "x.parquet")


@pytest.mark.parametrize("nested", [False, True])
def test_a_value_that_all_rows_repeat_is_counted_before_it_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000), pyarrow.array(["x" * 100_000]))
    if nested:
        column = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1000]), column)
    parquet.write_table(pyarrow.table({"q": column}), tmp_path / "x.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "x.parquet").stat().st_size < 1000
    monkeypatch.setattr(data_rows, "MAX_FILE_BYTES", 10 << 20)
    before = pyarrow.default_memory_pool().max_memory()
    with pytest.raises(UserError, match="data is larger than 10 MiB when it is unpacked"):
        rows(tmp_path / "x.parquet")
    assert pyarrow.default_memory_pool().max_memory() <= max(before, 10 << 20)


def test_columns_that_cannot_be_told_apart_or_counted_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    one = pyarrow.array([1])
    parquet.write_table(pyarrow.Table.from_arrays([one, one], names=["a", "a"]), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match="data has two columns 'a'; rename one"):
        rows(tmp_path / "twice.parquet")
    many = pyarrow.table({f"c{i}": one for i in range(1025)})
    parquet.write_table(many, tmp_path / "many.parquet")
    with pytest.raises(UserError, match="data has more than 1024 columns"):
        rows(tmp_path / "many.parquet")
    parquet.write_table(pyarrow.table({"a": [[0] * 200_000]}), tmp_path / "long.parquet")
    monkeypatch.setattr(data_rows, "MAX_FILE_BYTES", 1 << 20)
    with pytest.raises(UserError, match="data holds 200000 values, more than 131072"):
        rows(tmp_path / "long.parquet")


def test_parquet_values_that_python_does_not_have(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    good = pyarrow.table(
        {
            "at": pyarrow.array([1_721_952_000_123_456_789], pyarrow.timestamp("ns")),
            "time": pyarrow.array([1_001], pyarrow.time64("ns")),
            "map": pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
            "nan": [float("nan")],
        }
    )
    parquet.write_table(good, tmp_path / "good.parquet")
    assert rows(tmp_path / "good.parquet") == [
        {"at": "2024-07-26T00:00:00.123456", "time": "00:00:00.000001", "map": {"k": 1}, "nan": None}
    ]
    far = pyarrow.array([0, 1 << 55], pyarrow.timestamp("ms"))
    text = pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())
    for name, column in {"far": far, "text": text}.items():
        parquet.write_table(pyarrow.table({"a": column}), tmp_path / f"{name}.parquet")
        with pytest.raises((UserError, data_rows.RowError), match="row 2: "):
            rows(tmp_path / f"{name}.parquet")


def test_rows_that_take_too_much_memory_are_refused_before_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_rows, "MAX_DECODED_BYTES", 1 << 20)
    row = b'{"a": [' + b"{}," * 7000 + b"{}]}"
    assert len(list(parse_lines([row]))) == 1
    with pytest.raises(data_rows.RowError, match="line 2: rows up to here take more than 1 MiB of memory"):
        list(parse_lines([row, row]))


def test_paths_that_cannot_be_followed(tmp_path: Path) -> None:
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    for name in ("loop.jsonl", "x" * 300 + ".jsonl", "a\0.jsonl"):
        with pytest.raises(UserError) as caught:
            read_file(tmp_path / name, tmp_path, "volume/x", ".jsonl")
        assert caught.value.field == "data"
        assert str(caught.value).startswith("volume/x ")


def test_a_held_out_file_is_what_runs_are_measured_on_whatever_their_seeds(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(LINES)
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({**row, "question": "T"}) + "\n" for row in ROWS))
    source = File(tmp_path / "train.jsonl", tmp_path, "train", File(tmp_path / "test.jsonl", tmp_path, "test"))
    first, second = (load(source, GSM8K, seed=seed, held_out=5) for seed in (1, 2))
    assert first.held_out == second.held_out
    assert {row["question"] for row in first.held_out} == {"T"}
    assert first.train.size == 12
    assert first.train != second.train
    with pytest.raises(UserError, match="13 examples to evaluate on, but test has 12 rows") as caught:
        load(source, GSM8K, seed=0, held_out=13)
    assert caught.value.field == "evaluation.examples"


# ------------------------------------------------------------------------------------ the hub

COMMIT = "0123456789" * 4


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def hub_server(content: bytes = LINES, size: int | None = None) -> Any:
    async def resolve(request: web.Request) -> web.StreamResponse:
        if request.path != "/datasets/openai/gsm8k/resolve/v1/main/train.jsonl":
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        headers = {"X-Repo-Commit": COMMIT, "ETag": '"abc"'}
        if request.method == "HEAD":
            return web.Response(headers={**headers, "X-Linked-Size": str(size or len(content))})
        return web.Response(body=content, headers=headers)

    return resolve


async def fetched(url: str, cache: Path, file: str = "main/train.jsonl") -> Path:
    return await asyncio.to_thread(from_hub, "openai/gsm8k", file, "v1", endpoint=url, cache=cache)


@pytest.mark.usefixtures("online")
async def test_a_file_of_the_hub_is_downloaded_once_and_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as server:
        server.handlers["/datasets/openai/gsm8k/resolve/v1/main/train.jsonl"] = hub_server()
        first = await fetched(server.url, tmp_path)
        asked = len(server.requests)
        assert [row for _, row in read_file(first, tmp_path, "x", ".jsonl")] == ROWS
        assert await fetched(server.url, tmp_path) == first
        assert len(server.requests) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(data_hub, "default_cache", lambda: tmp_path)
    data: Data = load(HubFile("openai/gsm8k", "v1", "main/train.jsonl"), GSM8K, seed=0, held_out=2)
    assert data.train.size == 10


@pytest.mark.usefixtures("online")
async def test_what_the_hub_does_not_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server:
        server.handlers |= dict.fromkeys(
            (f"/datasets/openai/gsm8k/resolve/v1/main/{name}.jsonl" for name in ("train", "other")),
            hub_server(size=1 << 40),
        )
        with pytest.raises(UserError, match="does not exist on the hub, or is private"):
            await fetched(server.url, tmp_path, "main/other.jsonl")
        with pytest.raises(UserError, match="is larger than 256 MiB"):
            await fetched(server.url, tmp_path)
        server.handlers = dict.fromkeys(server.handlers, breaks_off)
        with pytest.raises(TransientError, match=r"the hub does not give main/train.jsonl of openai/gsm8k at v1 now"):
            await fetched(server.url, tmp_path)
    with pytest.raises(TransientError, match=r"the hub cannot be reached for main/train.jsonl of openai/gsm8k at v1"):
        await fetched(server.url, tmp_path)


def test_an_engine_that_works_offline_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"main/x.jsonl of a/b at v1 is not in the cache of this engine") as caught:
        from_hub("a/b", "main/x.jsonl", "v1", cache=tmp_path)
    assert caught.value.field == "data"


@pytest.mark.parametrize(("repo", "file"), [("a/b.git", "x"), ("a/b--c", "x"), ("a/b..c", "x"), ("a/b", "c/../../x")])
@pytest.mark.usefixtures("online")
def test_names_that_the_hub_cannot_have(tmp_path: Path, repo: str, file: str) -> None:
    with pytest.raises(UserError, match="is nothing that the hub can have") as caught:
        from_hub(repo, file, "v1", cache=tmp_path, endpoint="http://127.0.0.1:9")
    assert caught.value.field == "data"


@pytest.mark.usefixtures("online")
async def test_the_cache_makes_room_for_what_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_hub, "MAX_CACHE_BYTES", 2 * len(LINES))
    for age, name in enumerate(("new", "old")):
        (tmp_path / f"datasets--x--{name}" / "blobs").mkdir(parents=True)
        (tmp_path / f"datasets--x--{name}" / "blobs" / "1").write_bytes(LINES)
        os.utime(tmp_path / f"datasets--x--{name}", (1000 - age, 1000 - age))
    async with serving() as server:
        server.handlers["/datasets/openai/gsm8k/resolve/v1/main/train.jsonl"] = hub_server()
        await fetched(server.url, tmp_path)
    assert {name for name in os.listdir(tmp_path) if "--" in name} == {"datasets--openai--gsm8k", "datasets--x--new"}


def test_what_others_left_in_the_hubs_cache_is_not_given_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    private = tmp_path / "datasets--a--private" / "snapshots" / COMMIT
    private.mkdir(parents=True)
    (private / "x.jsonl").write_bytes(LINES)
    with pytest.raises(UserError, match="is not in the cache of this engine"):
        load(HubFile("a/private", COMMIT, "x.jsonl"), GSM8K, seed=0)
