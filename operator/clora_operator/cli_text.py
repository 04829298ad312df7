"""Text of others for a terminal: what a model wrote must not move the cursor, colour the screen or reorder a line."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"
_HIDDEN = (
    "Cc",
    "Cf",
    "Cs",
    "Co",
)  # controls, formats (bidirectional ones among them), halves of surrogates, private use


def harmless(text: str) -> str:
    """The text with every control and format character but newline and tab written as an escape."""
    return "".join(
        character
        if character in _KEPT or unicodedata.category(character) not in _HIDDEN
        else character.encode("unicode_escape").decode()
        for character in text
    )
