"""Typed access to the untyped fields of a model file.

A configuration file is someone else's data: each value is checked where it is read, and a wrong one
is refused with the file, the key and the value, so that it never surfaces later as a shape error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from heddle.errors import ModelFileError, UnsupportedError, quoted

MAX_SIZE = 2**48
"""Largest size, position or count that a file may state: products of two still are numbers."""
MAX_JSON_BYTES = 64 << 20
"""Of a configuration or an index; the largest published ones have a seventh of it. Parsed, a byte
may take a hundred."""
MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
"""What is walked through one by one is far smaller."""


def read_json_object(path: Path) -> dict[str, object]:
    """Read a JSON file that holds one object.

    Raises:
        ModelFileError: the file is missing, too large, is not UTF-8 JSON, or holds something else.
    """
    check_is_file(path)
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ModelFileError(f"{path}: has {size} bytes; at most {MAX_JSON_BYTES} are read")
        data = json.loads(path.read_text(encoding="utf-8"))
    except ModelFileError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise ModelFileError(f"{path}: holds a {type(data).__name__}; a JSON object was expected")
    return cast("dict[str, object]", data)


def check_is_file(path: Path) -> None:
    """See that a path is no pipe, device or folder: to open a pipe would wait for a writer.

    Raises:
        ModelFileError: it is; one that does not exist is left to whoever opens it.
    """
    try:
        is_other = path.exists() and not path.is_file()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise ModelFileError(f"{quoted(str(path))}: cannot be read ({error})") from error
    if is_other:
        raise ModelFileError(f"{path}: is not a file")


class Fields:
    """One object of a model file, read by key and type. A JSON `null` counts as absent."""

    def __init__(
        self,
        path: Path,
        data: Mapping[str, object],
        prefix: str = "",
        asked: set[str] | None = None,
    ) -> None:
        self.path = path
        self._data = data
        self._prefix = prefix
        self.asked = set() if asked is None else asked
        """Dotted names that were looked for so far, in nested objects, too."""

    def __contains__(self, key: str) -> bool:
        return self._value(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def is_object(self, key: str) -> bool:
        """A value is there, and is an object."""
        return isinstance(self._data.get(key), dict)

    def as_json(self, *, without: Sequence[str] = ()) -> str:
        """The object as JSON text, less some keys."""
        return json.dumps({key: value for key, value in self._data.items() if key not in without})

    def wrong(self, key: str, rule: str) -> ModelFileError:
        """The error for a value that breaks `rule`."""
        return ModelFileError(
            f"{self.path}: {self._prefix}{key}={self._data.get(key)!r} is not legal; {rule}"
        )

    def unsupported(self, key: str, rule: str) -> UnsupportedError:
        """The error for a legal value that is not built here."""
        return UnsupportedError(
            f"{self.path}: {self._prefix}{key}={self._data.get(key)!r} is not supported; {rule}"
        )

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> int:
        """An integer from `minimum` to `maximum`; without a default the key is required."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong(key, f"an integer of at least {minimum} was expected")
        if value > maximum:
            raise self.wrong(key, f"at most {maximum} was expected")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number, above zero unless `positive` is false."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number was expected")
        number = _as_float(value)
        if not math.isfinite(number) or (positive and number <= 0):
            raise self.wrong(key, f"a finite number{' above 0' if positive else ''} was expected")
        return number

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false was expected")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string was expected")
        return value

    def file_name(self, key: str) -> str:
        """A name of a file of the same folder: never a path to somewhere else."""
        value = self.text(key)
        if value in ("", ".", "..") or value != Path(value).name or "\0" in value:
            raise self.wrong(key, "the name of a file of this folder was expected")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        """As `integer`; None when absent."""
        return self.integer(key, minimum=minimum) if key in self else None

    def optional_number(self, key: str) -> float | None:
        """As `number`, any sign; None when absent."""
        return self.number(key, positive=False) if key in self else None

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings, required."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings was expected")
        return tuple(value)

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...]:
        """A list of integers of at least `minimum`; empty when absent."""
        value = self._value(key)
        if value is None:
            return ()
        items: list[object] = value if isinstance(value, list) else [value]
        found = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if (
            not isinstance(value, list)
            or len(found) < len(items)
            or min(found, default=0) < minimum
        ):
            raise self.wrong(key, f"a list of integers of at least {minimum} was expected")
        return tuple(found)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers above zero, required."""
        value = self._get(key, None)
        items: list[object] = value if isinstance(value, list) else [value]
        found = [
            _as_float(item)
            for item in items
            if isinstance(item, int | float) and not isinstance(item, bool)
        ]
        is_whole = isinstance(value, list) and len(found) == len(items)
        if not is_whole or not all(math.isfinite(number) and number > 0 for number in found):
            raise self.wrong(key, "a list of finite numbers above 0 was expected")
        return tuple(found)

    def number_pair(self, key: str, default: tuple[float, float]) -> tuple[float, float]:
        """A list of two numbers, the first not above the second; infinity is legal."""
        value = self._value(key)
        if value is None:
            return default
        items: list[object] = value if isinstance(value, list) else [value]
        numbers = [
            _as_float(item)
            for item in items
            if isinstance(item, int | float) and not isinstance(item, bool)
        ]
        if len(numbers) != len(items) or len(numbers) != 2 or not numbers[0] <= numbers[1]:
            raise self.wrong(key, "two numbers were expected, the smaller one first")
        return numbers[0], numbers[1]

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty when absent."""
        value = self._value(key)
        if value is None:
            return ()
        items: list[object] = value if isinstance(value, list) else [value]
        ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if len(ids) < len(items):
            raise self.wrong(key, "a token id or a list of token ids was expected")
        return tuple(item for item in ids if item >= 0)

    def section(self, key: str) -> Fields | None:
        """A nested object; None when absent."""
        value = self._value(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object was expected")
        return Fields(self.path, value, f"{self._prefix}{key}.", self.asked)

    def _value(self, key: str) -> object:
        self.asked.add(f"{self._prefix}{key}")
        return self._data.get(key)

    def _get(self, key: str, default: object) -> object:
        value = self._value(key)
        if value is not None:
            return value
        if default is None:
            raise ModelFileError(f"{self.path}: {self._prefix}{key} is missing; it is required")
        return default


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # JSON integers have no end, floats have
        return math.inf
