"""What stands around the JSON of a call: fixed texts, white space and names, in one order.

A shape is followed character by character and never goes back: each part is told from the next
one by its first character.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from heddle.server.tool_parsers.marks import SPACE

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What a function may be called."""


@dataclass(frozen=True, slots=True)
class Space:
    """Any white space, or none."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A text that must stand there, or may."""

    text: str
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a function. Of two names the later one counts."""

    is_optional: bool = False


Part = Space | Fixed | Name
Shape = tuple[Part, ...]


class Step(Enum):
    """What became of a character."""

    TAKEN = auto()
    BEHIND = auto()
    """The shape is whole, and the character is no part of it."""
    MISFIT = auto()


class ShapeReader:
    """Follows one shape."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._place = 0
        """Of the part that is read."""
        self._taken = ""
        """Of that part."""
        self.name = ""
        """That was read."""

    def step(self, character: str) -> Step:
        """Take a character, if it belongs here."""
        while self._place < len(self._shape):
            part = self._shape[self._place]
            if self._goes_on(part, character):
                self._taken += character
                return Step.TAKEN
            if not self._may_end(part):
                return Step.MISFIT
            if isinstance(part, Name) and self._taken:
                self.name = self._taken
            self._place, self._taken = self._place + 1, ""
        return Step.BEHIND

    def _goes_on(self, part: Part, character: str) -> bool:
        match part:
            case Space():
                return character in SPACE
            case Fixed(text):
                return text[len(self._taken) : len(self._taken) + 1] == character
            case Name():
                return NAME.fullmatch(self._taken + character) is not None

    def _may_end(self, part: Part) -> bool:
        match part:
            case Space():
                return True
            case Fixed(text, is_optional):
                return self._taken == text or (is_optional and not self._taken)
            case Name(is_optional):
                return is_optional or bool(self._taken)
