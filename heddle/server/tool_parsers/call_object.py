"""The JSON of a call: an object with a name and arguments, or the arguments alone.

The arguments are passed on as the model writes them, from their first brace on. Where they come
before the name they wait for it.
"""

from __future__ import annotations

import json
from typing import Protocol

from heddle.server.tool_parsers.json_object import JsonObject
from heddle.server.tool_parsers.shape import NAME

ARGUMENT_KEYS = ("arguments", "parameters")
"""Names of the member that holds the arguments; models use one or the other."""


class CallReader(Protocol):
    """Follows the JSON of one call, from its brace on."""

    @property
    def name(self) -> str | None:
        """Of the function; None while it is not known, or the arguments have not begun."""
        ...

    @property
    def is_done(self) -> bool:
        """The JSON is closed."""
        ...

    @property
    def seen(self) -> str:
        """All characters that were taken while there was no name."""
        ...

    def step(self, character: str) -> bool:
        """Take one character; False when no call goes on like this: then it is not taken."""
        ...

    def take_arguments(self) -> str:
        """Arguments that were not taken away before."""
        ...


class Arguments:
    """The arguments of a function whose name is known."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.seen = ""
        self._json = JsonObject()
        self._fresh: list[str] = []

    @property
    def is_done(self) -> bool:
        """The JSON is closed."""
        return self._json.is_done

    def step(self, character: str) -> bool:
        """Take one character, or refuse it."""
        if not self._json.step(character):
            return False
        self._fresh.append(character)
        return True

    def take_arguments(self) -> str:
        """Arguments that were not taken away before."""
        text = "".join(self._fresh)
        self._fresh.clear()
        return text


class CallObject:
    """An object with `name` and `arguments` (or `parameters`); other members are passed over."""

    def __init__(self) -> None:
        self._json = JsonObject()
        self._seen: list[str] = []
        self._key: list[str] = []
        """From behind a brace or comma of the object up to the value."""
        self._role = ""
        """Of the member whose value is read: name, arguments, or nothing of interest."""
        self._name: list[str] = []
        self._fresh: list[str] = []
        self._roles_seen: set[str] = set()
        self._known_name: str | None = None

    @property
    def name(self) -> str | None:
        """Of the function; None while it is not known, or the arguments have not begun."""
        return self._known_name if "arguments" in self._roles_seen else None

    @property
    def is_done(self) -> bool:
        """The JSON is closed."""
        return self._json.is_done

    @property
    def seen(self) -> str:
        """All characters that were taken while there was no name."""
        return "".join(self._seen)

    def step(self, character: str) -> bool:
        """Take one character, or refuse it: broken JSON, a name that no function has, arguments
        that are no object, or one of the two for the second time.
        """
        was_in_value = self._json.is_in_value
        if not self._json.step(character):
            return False
        is_in_value = self._json.is_in_value
        if is_in_value and not was_in_value and not self._begin_value(character):
            return False
        if self._json.expects_key:
            self._key.clear()
        elif is_in_value or was_in_value:
            self._note_value(character)
        else:
            self._key.append(character)
        if self._role == "name" and was_in_value and not is_in_value and not self._end_name():
            return False
        if self.name is None:
            self._seen.append(character)
        return True

    def take_arguments(self) -> str:
        """Arguments that were not taken away before."""
        text = "".join(self._fresh)
        self._fresh.clear()
        return text

    def _begin_value(self, character: str) -> bool:
        key = json.loads("".join(self._key).rstrip(": \t\r\n"))
        self._role = "arguments" if key in ARGUMENT_KEYS else "name" if key == "name" else ""
        if not self._role:
            return True
        if self._role in self._roles_seen or character != _BEGINS[self._role]:
            return False
        self._roles_seen.add(self._role)
        return True

    def _note_value(self, character: str) -> None:
        if self._role == "name":
            self._name.append(character)
        elif self._role == "arguments":
            self._fresh.append(character)

    def _end_name(self) -> bool:
        name: str = json.loads("".join(self._name))
        if not NAME.fullmatch(name):
            return False
        self._known_name = name
        return True


_BEGINS = {"name": '"', "arguments": "{"}
