"""Long texts of environments: an experiment has one at a time in the tokenizer, and the others come between."""

from __future__ import annotations

import asyncio

from clora_engine.chat import Renderer
from clora_engine.environments.protocol import Message
from clora_engine.rendering import INLINE_CHARACTERS, INLINE_TOKENS, Rendering
from tests.unit.engine.loop import tokenizer
from tests.unit.engine.test_words import HeldTokenizer


def long(word: str) -> list[Message]:
    return [Message("user", f"{word} " * INLINE_CHARACTERS)]


async def test_one_experiments_long_texts_hold_up_itself_alone() -> None:
    held = HeldTokenizer(tokenizer())
    renderer = Renderer(held)
    one, other = (Rendering(renderer, 1 << 20, experiment) for experiment in "ab")
    waiting = [asyncio.create_task(one.prompt(long("held"))) for _ in range(4)]
    await asyncio.to_thread(held.until_encoding)
    for _ in range(3):
        assert len(await other.prompt(long("free"))) > 100
    assert await other.observation(long("free"), 10)
    assert await one.prompt([Message("user", "short")]), "a short one waits for none"
    turn = await other.parse(tokenizer().encode("word " * INLINE_TOKENS))
    assert turn.content.startswith("word word")
    assert len(held.encoding) == 1
    held.let_go()
    assert len({len(ids) for ids in await asyncio.gather(*waiting)}) == 1
    assert len(held.encoding) == 4


async def test_an_experiment_that_is_cancelled_leaves_no_texts_behind() -> None:
    held = HeldTokenizer(tokenizer())
    rendering = Rendering(Renderer(held), 1 << 20, "a")
    waiting = [asyncio.create_task(rendering.prompt(long("held"))) for _ in range(4)]
    await asyncio.to_thread(held.until_encoding)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    held.let_go()
    assert await rendering.prompt(long("free"))  # its turn comes after the one that had begun
    assert len(held.encoding) == 1
