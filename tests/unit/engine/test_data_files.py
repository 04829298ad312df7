"""Rows of files: Parquet, the hub (a real server on this machine that answers as it does), what is wrong with them."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from huggingface_hub import constants

from clora_engine import data_files
from clora_engine.data import Data, File, HubFile, load
from clora_engine.data_files import from_hub, read_file
from clora_engine.environments import create
from clora_engine.errors import TransientError, UserError
from tests.unit.engine.environments.http_server import breaks_off, serving

GSM8K = create("GSM8K", {})
ROWS = [{"question": f"Q{i}?", "answer": f"#### {i}"} for i in range(12)]
LINES = "\n".join(json.dumps(row) for row in ROWS).encode()


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_file(path, "data", path.suffix)]


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
    monkeypatch.setattr(data_files, "MAX_FILE_BYTES", 1 << 20)
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
        assert rows(first) == ROWS
        assert await fetched(server.url, tmp_path) == first
        assert len(server.requests) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
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
