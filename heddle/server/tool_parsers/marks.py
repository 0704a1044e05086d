"""Marks in text that comes in pieces: found whole, or withheld while they may still become whole.

text . . . . . . . . <tool_c
|- can be passed on -|- held -|
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from heddle.server.pieces import Piece, PieceParser

SPACE = " \t\r\n"
"""White space of JSON, and of the layout around marks."""


class Marks:
    """A set of texts that are looked for. The one that begins first is found; of two that begin
    together, the shorter one.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts) - {""}
        in_order = sorted(self.texts, key=len)
        self._pattern = re.compile("|".join(map(re.escape, in_order)) or r"(?!)")
        self._beginnings = {text[:size] for text in in_order for size in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, *, is_end: bool = False) -> tuple[int, str]:
        """The first mark.

        Args:
            text: all that is not yet passed on.
            is_end: no more text will come.
        Returns:
            Where it begins, and the mark. Without a mark: where the tail begins that may become
            one (the end of the text if none), and nothing. A whole mark behind that place has to
            wait: an earlier one may still be under way.
        """
        tail = len(text) if is_end else self._tail(text)
        match = self._pattern.search(text)
        if match is not None and match.start() <= tail:
            return match.start(), match.group()
        return tail, ""

    def _tail(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._beginnings:
                return start
        return len(text)


class WithoutMarks:
    """Text from which marks are taken out before it is parsed: special tokens that are not for
    readers.
    """

    def __init__(self, marks: Marks, then: PieceParser) -> None:
        self._marks, self._then = marks, then
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """What the rest of the text is made of."""
        return self._then.push(self._filtered(text, is_end=False))

    def finish(self) -> list[Piece]:
        """What was only the beginning of a mark is text."""
        return self._then.push(self._filtered("", is_end=True)) + self._then.finish()

    def _filtered(self, text: str, *, is_end: bool) -> str:
        text = self._held + text
        kept = []
        while True:
            start, mark = self._marks.find(text, is_end=is_end)
            kept.append(text[:start])
            if not mark:
                self._held = text[start:]
                return "".join(kept)
            text = text[start + len(mark) :]
