"""The verifiers library's first example, reverse-text: the model writes a short text backwards, within tags.

The texts are made here, of common words, so that it needs no network. The reward is how much of the reversed text is
right, from 0 to 1.
"""

from __future__ import annotations

import random
import re
from difflib import SequenceMatcher
from typing import Any

import verifiers as vf
from datasets import Dataset

WORDS = re.findall(
    r"\w+",
    "apple bread chair cloud dance earth field flower garden green horse house island juice kitchen lemon light market "
    "morning music night ocean orange paper piano plant river road salt school silver stone summer sugar table tiger "
    "train tree village water window winter yellow zebra",
)
SYSTEM = "Write the text backwards, letter by letter, within <reversed> tags."


def load_environment(words: int = 3, examples: int = 2000, held_out: int = 200) -> vf.Environment:
    """`words` of each text; `examples` to train on and `held_out` others to evaluate on."""
    dice = random.Random(0)  # noqa: S311
    texts = list(dict.fromkeys(" ".join(dice.choices(WORDS, k=words)) for _ in range(2 * (examples + held_out))))
    rows = [{"question": text, "answer": text[::-1]} for text in texts[: examples + held_out]]
    parser = vf.XMLParser(["reversed"], answer_field="reversed")

    def likeness(completion: Any, answer: str) -> float:
        found = parser.parse_answer(completion) or ""
        return SequenceMatcher(None, found, answer, autojunk=False).ratio()

    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[held_out:]),
        eval_dataset=Dataset.from_list(rows[:held_out]),
        system_prompt=SYSTEM,
        parser=parser,
        rubric=vf.Rubric(funcs=[likeness, parser.get_format_reward_func()], weights=[1.0, 0.0], parser=parser),
    )
