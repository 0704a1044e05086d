"""Texts in pieces, and what parsers make of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from heddle.server.pieces import CallArguments, Content, Piece, PieceParser, Reasoning


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one kind are one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + piece.text)
        elif (
            isinstance(piece, CallArguments)
            and isinstance(last, CallArguments)
            and piece.index == last.index
        ):
            found[-1] = CallArguments(last.index, last.text + piece.text)
        else:
            found.append(piece)
    return found


def parse(parser: PieceParser, *parts: str) -> list[Piece]:
    """What a parser makes of a text that comes in these parts."""
    pieces = [piece for part in parts for piece in parser.push(part)]
    return joined(pieces + list(parser.finish()))


def cut(text: str, places: Iterable[int]) -> Iterator[str]:
    """A text in parts that end at these places."""
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return (text[start:end] for start, end in itertools.pairwise(ends))
