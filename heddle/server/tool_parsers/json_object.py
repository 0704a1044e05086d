"""The text of one JSON object, followed character by character (RFC 8259).

Nothing is built: the machine only says whether the text still is the beginning of an object, how
deep it is, and whether it stands inside the value of a member of the outermost object.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from heddle.server.tool_parsers.marks import SPACE

_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}
_NUMBER_BEGINS = {"-": "-", "0": "0"} | dict.fromkeys("123456789", "whole")
_NUMBER_GOES_ON: dict[str, dict[str, str]] = {
    "-": {"0": "0"} | dict.fromkeys("123456789", "whole"),
    "0": {".": ".", "e": "e", "E": "e"},
    "whole": {".": ".", "e": "e", "E": "e"} | dict.fromkeys(_DIGITS, "whole"),
    ".": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "e", "E": "e"} | dict.fromkeys(_DIGITS, "fraction"),
    "e": {"+": "sign", "-": "sign"} | dict.fromkeys(_DIGITS, "power"),
    "sign": dict.fromkeys(_DIGITS, "power"),
    "power": dict.fromkeys(_DIGITS, "power"),
}
"""The grammar of a number: by the part that it is in, the part that a character leads to."""
_NUMBER_MAY_END = frozenset(("0", "whole", "fraction", "power"))


class _At(Enum):
    """What may come next."""

    START = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    FIRST_ITEM = auto()
    AFTER_VALUE = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()
    NUMBER = auto()
    END = auto()


_IN_SCALAR = frozenset((_At.STRING, _At.ESCAPE, _At.HEX, _At.WORD, _At.NUMBER))


class JsonObject:
    """Follows one object."""

    def __init__(self) -> None:
        self._at = _At.START
        self._closers: list[str] = []
        self._is_key = False
        self._rest = ""
        """Of a word; of the hex digits of an escape, one mark each; part of a number."""

    @property
    def is_done(self) -> bool:
        """The object is closed; it takes no more."""
        return self._at is _At.END

    @property
    def expects_key(self) -> bool:
        """Right behind the brace or the comma that a key of the outermost object follows."""
        return len(self._closers) == 1 and self._at in (_At.FIRST_KEY, _At.KEY)

    @property
    def is_in_value(self) -> bool:
        """Inside the value of a member of the outermost object."""
        if len(self._closers) == 1:
            return self._at in _IN_SCALAR and not self._is_key
        return bool(self._closers)

    def step(self, character: str) -> bool:
        """Take one character.

        Returns:
            False when no object goes on like this; the character is not taken.
        """
        return _STEPS[self._at](self, character)

    def _start(self, character: str) -> bool:
        return character == "{" and self._open("}", _At.FIRST_KEY)

    def _open(self, closer: str, at: _At) -> bool:
        self._closers.append(closer)
        self._at = at
        return True

    def _first_key(self, character: str) -> bool:
        return self._close() if character == "}" else self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._at, self._is_key = _At.STRING, True
            return True
        return character in SPACE

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._at, self._is_key = _At.VALUE, False
            return True
        return character in SPACE

    def _first_item(self, character: str) -> bool:
        return self._close() if character == "]" else self._value(character)

    def _value(self, character: str) -> bool:
        if character == "{":
            return self._open("}", _At.FIRST_KEY)
        if character == "[":
            return self._open("]", _At.FIRST_ITEM)
        if character == '"':
            self._at = _At.STRING
        elif character in _WORDS:
            self._at, self._rest = _At.WORD, _WORDS[character]
        elif character in _NUMBER_BEGINS:
            self._at, self._rest = _At.NUMBER, _NUMBER_BEGINS[character]
        else:
            return character in SPACE
        return True

    def _after_value(self, character: str) -> bool:
        if character == self._closers[-1]:
            return self._close()
        if character == ",":
            self._at = _At.KEY if self._closers[-1] == "}" else _At.VALUE
            return True
        return character in SPACE

    def _close(self) -> bool:
        self._closers.pop()
        self._at = _At.AFTER_VALUE if self._closers else _At.END
        return True

    def _string(self, character: str) -> bool:
        if character == '"':
            self._at = _At.COLON if self._is_key else _At.AFTER_VALUE
        elif character == "\\":
            self._at = _At.ESCAPE
        return character >= " "

    def _escape(self, character: str) -> bool:
        if character == "u":
            self._at, self._rest = _At.HEX, "...."
            return True
        self._at = _At.STRING
        return character in _ESCAPES

    def _hex(self, character: str) -> bool:
        self._rest = self._rest[1:]
        self._at = _At.HEX if self._rest else _At.STRING
        return character in _HEX

    def _word(self, character: str) -> bool:
        expected, self._rest = self._rest[0], self._rest[1:]
        self._at = _At.WORD if self._rest else _At.AFTER_VALUE
        return character == expected

    def _number(self, character: str) -> bool:
        part = _NUMBER_GOES_ON[self._rest].get(character)
        if part is not None:
            self._rest = part
            return True
        if self._rest not in _NUMBER_MAY_END:
            return False
        self._at = _At.AFTER_VALUE
        return self._after_value(character)

    def _end(self, character: str) -> bool:
        del character
        return False


_STEPS: dict[_At, Callable[[JsonObject, str], bool]] = {
    _At.START: JsonObject._start,
    _At.FIRST_KEY: JsonObject._first_key,
    _At.KEY: JsonObject._key,
    _At.COLON: JsonObject._colon,
    _At.VALUE: JsonObject._value,
    _At.FIRST_ITEM: JsonObject._first_item,
    _At.AFTER_VALUE: JsonObject._after_value,
    _At.STRING: JsonObject._string,
    _At.ESCAPE: JsonObject._escape,
    _At.HEX: JsonObject._hex,
    _At.WORD: JsonObject._word,
    _At.NUMBER: JsonObject._number,
    _At.END: JsonObject._end,
}
