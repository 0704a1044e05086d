"""What the text of an answer is made of: content, reasoning, and calls of tools.

A parser takes text in whatever pieces it comes and gives the same result for all cuts, so that a
stream and a whole answer cannot differ: a whole answer is a stream of one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks aloud."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A tool is called; its arguments follow."""

    index: int
    """Among the calls of the answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call: JSON text in pieces."""

    index: int
    text: str


Piece = Content | Reasoning | CallBegins | CallArguments


class PieceParser(Protocol):
    """Text to pieces, for one answer."""

    def push(self, text: str) -> list[Piece]:
        """Pieces that this text completes; what may still become a mark is withheld."""
        ...

    def finish(self) -> list[Piece]:
        """The answer has ended: everything that was withheld."""
        ...


class PlainText:
    """All of it is content."""

    def push(self, text: str) -> list[Piece]:
        """The text as it is."""
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        """Nothing is withheld."""
        return []


class Chained:
    """Content that one parser finds goes through the next one."""

    def __init__(self, first: PieceParser, then: PieceParser) -> None:
        self._first, self._then = first, then

    def push(self, text: str) -> list[Piece]:
        """As both see it."""
        return self._pass_on(self._first.push(text))

    def finish(self) -> list[Piece]:
        """What either withheld."""
        return self._pass_on(self._first.finish()) + self._then.finish()

    def _pass_on(self, pieces: Sequence[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            found += self._then.push(piece.text) if isinstance(piece, Content) else [piece]
        return found


class WithoutReasoning:
    """What the model thinks aloud is not told."""

    def __init__(self, inner: PieceParser) -> None:
        self._inner = inner

    def push(self, text: str) -> list[Piece]:
        """The other pieces."""
        return _told(self._inner.push(text))

    def finish(self) -> list[Piece]:
        """The other pieces."""
        return _told(self._inner.finish())


def _told(pieces: Sequence[Piece]) -> list[Piece]:
    return [piece for piece in pieces if not isinstance(piece, Reasoning)]


class FirstCall:
    """Calls after the first one are dropped."""

    def __init__(self, inner: PieceParser) -> None:
        self._inner = inner

    def push(self, text: str) -> list[Piece]:
        """The other pieces."""
        return _up_to_first_call(self._inner.push(text))

    def finish(self) -> list[Piece]:
        """The other pieces."""
        return _up_to_first_call(self._inner.finish())


def _up_to_first_call(pieces: Sequence[Piece]) -> list[Piece]:
    calls = CallBegins | CallArguments
    return [piece for piece in pieces if not isinstance(piece, calls) or piece.index == 0]
