"""Reasoning in the text of models: what they think aloud, told apart from the answer.

    <think> reasoning </think> content

Models differ in who writes the first mark: the model, its chat template, or nobody. White space
that touches a mark is layout and is dropped. Reasoning that is not closed goes on to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from heddle.errors import ConfigError, quoted
from heddle.server.pieces import Content, Piece, PieceParser, PlainText, Reasoning
from heddle.server.tool_parsers.marks import SPACE, Marks

OPEN, CLOSE = "<think>", "</think>"

ReasoningParserFactory = Callable[[str], PieceParser]


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """A way to reason."""

    create: ReasoningParserFactory
    """Makes the parser of one answer; it takes the prompt, or its end: the template may have
    opened or closed the reasoning there. An empty text says nothing."""
    marks: frozenset[str]
    """Texts around reasoning; special tokens among them are kept for the parser."""


class _In(Enum):
    """Where the end of the text is."""

    START = auto()
    REASONING = auto()
    GAP = auto()
    CONTENT = auto()


class ThinkText:
    """Parses an answer of `<think>`, reasoning, `</think>` and content."""

    def __init__(self, *, begins_inside: bool) -> None:
        """Before the first character.

        Args:
            begins_inside: an answer without the first mark begins with reasoning; else it has none.
        """
        self._begins_inside = begins_inside
        self._in = _In.START
        self._marks = Marks([CLOSE])
        self._held = ""
        self._has_shown = False

    def push(self, text: str) -> list[Piece]:
        """Pieces that this text completes."""
        text, self._held = self._held + text, ""
        found: list[Piece] = []
        if self._in is _In.START:
            text = self._read_start(text)
        if self._in is _In.REASONING:
            text = self._read_reasoning(text, found)
        if self._in is _In.GAP:
            text = text.lstrip(SPACE)
            self._in = _In.CONTENT if text else _In.GAP
        if self._in is _In.CONTENT and text:
            found.append(Content(text))
        return found

    def finish(self) -> list[Piece]:
        """What might have become a mark is text."""
        is_reasoning = self._in is _In.REASONING or (self._in is _In.START and self._begins_inside)
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if is_reasoning else Content(held)]

    def _read_start(self, text: str) -> str:
        bare = text.lstrip(SPACE)
        if bare.startswith(OPEN):
            self._in = _In.REASONING
            return bare.removeprefix(OPEN)
        if OPEN.startswith(bare):
            self._held = text
            return ""
        self._in = _In.REASONING if self._begins_inside else _In.CONTENT
        return text

    def _read_reasoning(self, text: str, found: list[Piece]) -> str:
        if not self._has_shown:
            text = text.lstrip(SPACE)
        start, mark = self._marks.find(text)
        shown = text[:start].rstrip(SPACE)
        if shown:
            self._has_shown = True
            found.append(Reasoning(shown))
        if not mark:
            self._held = text[len(shown) :]
            return ""
        self._in = _In.GAP
        return text[start + len(mark) :]


def _deepseek_r1(prompt: str) -> PieceParser:
    """The answer begins with reasoning, with or without the first mark."""
    return PlainText() if _is_closed(prompt) else ThinkText(begins_inside=True)


def _qwen3(prompt: str) -> PieceParser:
    """Reasoning stands between both marks, the first of which may be in the prompt."""
    if _is_closed(prompt):
        return PlainText()
    return ThinkText(begins_inside=prompt.rstrip(SPACE).endswith(OPEN))


def _is_closed(prompt: str) -> bool:
    return prompt.rstrip(SPACE).endswith(CLOSE)


_MARKS = frozenset((OPEN, CLOSE))
_PARSERS: dict[str, ReasoningParser] = {
    "deepseek_r1": ReasoningParser(_deepseek_r1, _MARKS),
    "qwen3": ReasoningParser(_qwen3, _MARKS),
}


def register_reasoning_parser(name: str, parser: ReasoningParser) -> None:
    """Add a way to reason, before the server starts.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _PARSERS:
        raise ConfigError(f"reasoning parser {name!r} is registered already; choose another name")
    _PARSERS[name] = parser


def find_reasoning_parser(name: str) -> ReasoningParser:
    """The way to reason of this name.

    Raises:
        ConfigError: nobody has it; lists those that are there.
    """
    if name not in _PARSERS:
        raise ConfigError(
            f"reasoning_parser={quoted(name)} is not known; legal here: {', '.join(_PARSERS)}"
        )
    return _PARSERS[name]
