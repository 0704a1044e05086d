"""What form an answer must have. Names and meanings as vLLM users know them.

One of five descriptions: a JSON schema, any JSON object, a regular expression, a list of texts, or
a grammar. Here a description is checked for its size and for what is wrong on its face; whether it
can be turned into a grammar is known once `heddle.engine.grammar` has done so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from heddle.errors import RequestError, quoted

StructureKind = Literal["json", "regex", "choice", "grammar", "json_object"]

MAX_SOURCE_BYTES = {"json": 65536, "choice": 65536, "grammar": 16384, "regex": 8192}
"""Longest description. The work of compiling an expression or a grammar grows with the square of
its length, so they may be shorter than schemas."""
MAX_JSON_DEPTH = 32
"""Deepest nesting of a schema."""
MAX_ENUM = 1000
"""Most entries of an `enum`."""
MAX_CHOICE = 1000
"""Most texts of `choice`."""

_DATA_KEYS = frozenset({"enum", "const", "default", "examples"})
"""Keys of a schema below which there is data, and no schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one field is set; kept as it is compiled, so equal ones are compiled once.

    Raises:
        RequestError: none or several are set, or one of them is too long or malformed; names the
            field, the value, the rule and the nearest legal value.

    Example:
        >>> StructuredOutputsParams(json={"type": "integer"}).source
        '{"type":"integer"}'
    """

    json: str | None = None
    """A JSON schema, as text or as a mapping; kept as text. At most 64 KiB, 32 levels deep, 1000
    entries in an `enum`, and each `$ref` within the schema (`#...`)."""
    regex: str | None = None
    """A regular expression that the whole answer matches; at most 8 KiB, without look-around and
    back-references."""
    choice: tuple[str, ...] | None = None
    """The answer is one of these texts: 1 to 1000, at most 64 KiB together."""
    grammar: str | None = None
    """A grammar in the Lark syntax of llguidance, or in GBNF; at most 16 KiB."""
    json_object: bool = False
    """The answer is a JSON object."""

    def __post_init__(self) -> None:
        for name in ("json", "choice"):
            object.__setattr__(self, name, _NORMALISE[name](getattr(self, name)))
        _check_text("regex", self.regex)
        _check_text("grammar", self.grammar)
        if not isinstance(self.json_object, bool):
            raise _refusal("json_object", self.json_object, "true or false", True)
        given = self._given()
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'nothing'} set; must be exactly "
                f"one of {', '.join(_NAMES)}; nearest legal: {given[0] if given else 'json_object'}"
            )

    @property
    def kind(self) -> StructureKind:
        """The one field that is set."""
        return self._given()[0]

    @property
    def source(self) -> str:
        """Its value as text; with `kind` it says everything."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _given(self) -> list[StructureKind]:
        return [name for name in _NAMES if getattr(self, name) not in (None, False)]


_NAMES: tuple[StructureKind, ...] = ("json", "regex", "choice", "grammar", "json_object")


def structured_outputs(given: object) -> StructuredOutputsParams | None:
    """What a caller passes as `structured_outputs`: the class, a mapping of its fields, or None.

    Raises:
        RequestError: another type, an unknown field, or a value that is not legal.
    """
    if given is None or isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, Mapping):
        raise RequestError(
            f"structured_outputs={quoted(given)} is not legal; must be StructuredOutputsParams or "
            f"a mapping of its fields: {', '.join(_NAMES)}"
        )
    known = {field.name for field in fields(StructuredOutputsParams)}
    unknown = sorted(map(str, set(given) - known))
    if unknown:
        raise RequestError(
            f"structured_outputs: {quoted(unknown[0])} is not known; legal here: "
            f"{', '.join(_NAMES)}",
            "unsupported_parameter",
        )
    return StructuredOutputsParams(
        **{key: value for key, value in given.items() if value is not None}
    )


def _refusal(name: str, value: object, rule: str, nearest: object = None) -> RequestError:
    hint = "" if nearest is None else f"; nearest legal: {nearest}"
    return RequestError(
        f"structured_outputs.{name}={quoted(value)} is not legal; must be {rule}{hint}"
    )


def _check_text(name: str, text: Any) -> None:
    if text is None:
        return
    if not isinstance(text, str) or not text.strip():
        raise _refusal(name, text, "text that is not empty")
    _check_size(name, text)


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _refusal(name, text, "valid Unicode text") from None
    most = MAX_SOURCE_BYTES[name]
    if size > most:
        raise _refusal(f"{name} of {size} bytes", text, f"at most {most} bytes long", most)


def _choice_texts(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise _refusal("choice", given, "a list of texts")
    texts = list(given)
    if not 1 <= len(texts) <= MAX_CHOICE:
        nearest = min(max(len(texts), 1), MAX_CHOICE)
        raise _refusal("len(choice)", len(texts), f"in 1..{MAX_CHOICE}", nearest)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _refusal("choice", text, "texts that are not empty")
    _check_size("choice", "".join(texts))
    return tuple(dict.fromkeys(texts))


def _schema_text(given: Any) -> str | None:
    """A schema in one spelling, keys in their order: it is that of the answer."""
    if given is None:
        return None
    if isinstance(given, str):
        _check_size("json", given)
        given = _parsed(given)
    if not isinstance(given, Mapping):
        raise _refusal("json", given, "a JSON schema: an object, or its text")
    _check_schema(given)
    try:
        text = json.dumps(given, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _refusal("json", given, f"made of JSON values ({error})") from None
    _check_size("json", text)
    return text


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _refusal("json", text, f"valid JSON ({error})") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _too_deep() -> RequestError:
    return RequestError(
        f"structured_outputs.json is nested deeper than {MAX_JSON_DEPTH} levels; must be at most "
        f"that deep; nearest legal: {MAX_JSON_DEPTH}"
    )


def _check_schema(schema: Mapping[str, Any]) -> None:
    """Refuse what is too deep or too wide, and references to other documents."""
    for key, value, is_data in _entries(schema):
        if key == "enum" and isinstance(value, list) and len(value) > MAX_ENUM:
            raise _refusal("json: len(enum)", len(value), f"at most {MAX_ENUM}", MAX_ENUM)
        if key == "$ref" and not is_data and isinstance(value, str) and value[:1] != "#":
            raise _refusal("json: $ref", value, "within the schema, beginning with '#'", "#")


def _entries(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """(key, value, is below data) of every object in a schema; no recursion, for nothing is known
    of its depth yet.
    """
    waiting: list[tuple[Any, int, bool]] = [(schema, 1, False)]
    while waiting:
        node, depth, is_data = waiting.pop()
        if depth > MAX_JSON_DEPTH:
            raise _too_deep()
        if isinstance(node, Mapping):
            for key, value in node.items():
                yield key, value, is_data
                waiting.append((value, depth + 1, is_data or key in _DATA_KEYS))
        elif isinstance(node, (list, tuple)):
            waiting += [(value, depth + 1, is_data) for value in node]


_NORMALISE = {"json": _schema_text, "choice": _choice_texts}
