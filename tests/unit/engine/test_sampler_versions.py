"""Versions when vLLM's core is replaced: what it does not load again is lost, and said."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from clora_engine.errors import EngineError
from clora_engine.sampler_config import SamplerConfig
from clora_engine.sampler_core import Adapter
from clora_engine.sampler_versions import LiveVersions
from clora_engine.types import Version


class NewCore:
    """Has lost the adapter in `torn`."""

    torn = Path("v1")

    async def load(self, adapter: Adapter) -> None:
        if adapter.directory == self.torn:
            raise EngineError("torn")


async def test_what_a_new_core_cannot_load_is_said_and_leased_no_more(tmp_path: Path) -> None:
    versions = LiveVersions(
        SamplerConfig(model=tmp_path, versions_root=tmp_path, max_model_len=8, max_lora_rank=8, slots=2)
    )
    for number, name in enumerate(("a", "b")):
        entry = versions._table.announce(Version(name, 3), Path(f"v{number}"))
        versions._table.reserve(entry)
        versions._table.commit(entry)
    lost: list[Version] = []
    versions.on_lost = lost.append
    await versions._reload(cast(Any, NewCore()))
    assert lost == [Version("b", 3)]
    assert versions.lease("a").version == Version("a", 3)
    with pytest.raises(EngineError, match="has no version"):
        versions.lease("b")
    for task in versions._unloading:  # waits for the core to be up, which it never is here
        task.cancel()
    await asyncio.gather(*versions._unloading, return_exceptions=True)
