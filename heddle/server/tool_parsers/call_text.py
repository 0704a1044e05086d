"""Calls in text, by a table of what stands around them.

    content  opener  head  {JSON}  tail  content
             |---- a call, or given back ---|

A call begins, for the reader, when its name is known and its arguments have begun; from then on
arguments are passed on as they come. What breaks before that is given back: the opener is content,
and what follows it is read again. What breaks later ends the call, and the rest is content: what
was passed on cannot be taken back. White space that touches a call is layout and is dropped.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from heddle.server.pieces import CallArguments, CallBegins, Content, Piece
from heddle.server.tool_parsers.call_object import Arguments, CallObject, CallReader
from heddle.server.tool_parsers.marks import SPACE, Marks
from heddle.server.tool_parsers.shape import Fixed, Shape, ShapeReader, Step

NewId = Callable[[], str]


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls stand in the text of a model."""

    openers: Mapping[str, Shape] = field(default_factory=dict)
    """Marks that begin a call, each with what follows it up to the JSON."""
    tail: Shape = ()
    """Behind the JSON. If something else follows, the call counts, and that is content."""
    closers: tuple[str, ...] = ()
    """Marks that are dropped once there was a call."""
    start: Shape | None = None
    """For formats in which the answer itself begins with a call: what comes before its JSON."""
    between: Shape | None = None
    """For formats in which a call may follow another one without an opener: what is between the
    two JSON texts."""
    end: str = ""
    """With `between`: what may stand there in place of a further call."""
    name: str = ""
    """Of the only function, where the JSON is its arguments."""

    @property
    def texts(self) -> frozenset[str]:
        """All fixed texts of the format."""
        shapes = (*self.openers.values(), self.tail, self.start or (), self.between or ())
        fixed = [part.text for shape in shapes for part in shape if isinstance(part, Fixed)]
        return frozenset((*self.openers, *self.closers, *fixed))


class _In(Enum):
    """Where the end of the text is."""

    CONTENT = auto()
    HEAD = auto()
    CALL = auto()
    TAIL = auto()


class CallText:
    """Parses the answers of one format."""

    def __init__(self, form: CallFormat, new_id: NewId = new_call_id) -> None:
        self._form, self._new_id = form, new_id
        self._marks = Marks((*form.openers, *form.closers))
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._held = ""
        """In content: white space and the beginning of a mark, at its end."""
        self._touches_call = False
        """A call has just ended."""
        self._opening = ""
        """An opener and the white space before it, until its call has begun."""
        self._taken = ""
        """Of the head or the tail."""
        self._shape = ShapeReader(())
        self._call: CallReader = CallObject()
        self._has_begun = False
        self._in = _In.CONTENT
        if form.start is not None:
            self._begin_head("", form.start)

    def push(self, text: str) -> list[Piece]:
        """Pieces that this text completes."""
        self._read_all(text)
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """A call that has begun stands, cut short or not, and so does a mark right behind it;
        everything else is content.
        """
        while self._in is _In.HEAD or (self._in is _In.CALL and not self._has_begun):
            if self._is_at_end:
                break
            self._read_all(self._give_back())
        is_closing = any(closer.startswith(self._held) for closer in self._form.closers)
        if not (self._touches_call and is_closing):
            self._show(self._held)
        self._held = ""
        return self._take_pieces()

    @property
    def _is_at_end(self) -> bool:
        """Behind a call, where another one might have followed, and none did."""
        is_between = self._in is _In.HEAD and bool(self._num_calls) and not self._opening
        return is_between and self._taken.strip(SPACE) in ("", self._form.end)

    def _take_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read_all(self, text: str) -> None:
        readers = {
            _In.CONTENT: self._read_content,
            _In.HEAD: self._read_head,
            _In.CALL: self._read_call,
            _In.TAIL: self._read_tail,
        }
        while text:
            text = readers[self._in](text)

    # Each of these takes from the beginning of a text and returns what is left of it.

    def _read_content(self, text: str) -> str:
        text = self._held + text
        if self._touches_call:
            text = text.lstrip(SPACE)
        start, mark = self._marks.find(text)
        shown = text[:start].rstrip(SPACE)
        self._show(shown)
        self._held = text[len(shown) :]
        if not mark:
            return ""
        opening, rest = text[len(shown) : start + len(mark)], text[start + len(mark) :]
        self._held = ""
        if mark in self._form.openers:
            self._begin_head(opening, self._form.openers[mark])
        elif self._num_calls:
            self._touches_call = True
        else:
            self._show(opening)
        return rest

    def _read_head(self, text: str) -> str:
        for place, character in enumerate(text):
            step = self._shape.step(character)
            if step is Step.TAKEN:
                continue
            self._taken += text[:place]
            if step is Step.BEHIND and character == "{":
                name = self._form.name or self._shape.name
                self._call = Arguments(name) if name else CallObject()
                self._has_begun = False
                self._in = _In.CALL
                return text[place:]
            return self._give_back() + text[place:]
        self._taken += text
        return ""

    def _read_call(self, text: str) -> str:
        for place, character in enumerate(text):
            if not self._call.step(character):
                return self._break_call(text[place:])
            if self._call.is_done:
                return self._end_call(text[place + 1 :])
        self._pass_on()
        return ""

    def _read_tail(self, text: str) -> str:
        for place, character in enumerate(text):
            step = self._shape.step(character)
            if step is Step.TAKEN:
                continue
            rest = text[place:] if step is Step.BEHIND else self._taken + text
            self._in, self._touches_call = _In.CONTENT, True
            if self._form.between is not None:
                self._begin_head("", self._form.between)
            return rest
        self._taken += text
        return ""

    def _begin_head(self, opening: str, shape: Shape) -> None:
        self._opening, self._taken, self._shape = opening, "", ShapeReader(shape)
        self._in = _In.HEAD

    def _end_call(self, rest: str) -> str:
        self._pass_on()
        if not self._has_begun:
            return self._give_back() + rest
        self._taken, self._shape = "", ShapeReader(self._form.tail)
        self._in = _In.TAIL
        return rest

    def _break_call(self, rest: str) -> str:
        self._pass_on()
        if not self._has_begun:
            return self._give_back() + rest
        self._in, self._touches_call = _In.CONTENT, False
        return rest

    def _pass_on(self) -> None:
        """What is known of the call."""
        if self._call.name is None:
            return
        if not self._has_begun:
            self._has_begun = True
            self._pieces.append(CallBegins(self._num_calls, self._new_id(), self._call.name))
            self._num_calls += 1
        arguments = self._call.take_arguments()
        if arguments:
            self._pieces.append(CallArguments(self._num_calls - 1, arguments))

    def _give_back(self) -> str:
        """What was no call: its opening is content; the rest, to be read again."""
        again = self._taken + (self._call.seen if self._in is _In.CALL else "")
        self._in = _In.CONTENT
        self._show(self._opening)
        return again

    def _show(self, text: str) -> None:
        if text:
            self._touches_call = False
            self._pieces.append(Content(text))
