"""Answers that have to be calls: the schema that they follow, and who reads them.

required      [{"name": NAME, "parameters": {...}}, ...]    of the functions on offer
one function  {...}                                         its arguments, and nothing else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heddle.server.tool_parsers.call_text import CallFormat
from heddle.server.tool_parsers.shape import Fixed, Space

REQUIRED = CallFormat(
    start=(Space(), Fixed("["), Space()),
    between=(
        Space(),
        Fixed(",", is_optional=True),
        Space(),
        Fixed("]", is_optional=True),
        Space(),
    ),
    end="]",
)

_DATA_KEYS = frozenset(("enum", "const", "default", "examples"))
"""Keywords below which there is data, and no schema."""
_MAP_KEYS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
"""Keywords whose keys are names, and no keywords."""


def only(name: str) -> CallFormat:
    """The answer is the arguments of this function."""
    return CallFormat(start=(Space(),), name=name)


def calls_schema(functions: Sequence[tuple[str, Mapping[str, Any]]], most: int | None) -> Any:
    """Schema of a list of calls.

    Args:
        functions: (name, schema of the arguments) of those on offer.
        most: calls in one answer; None: any number. At least one is made.
    """
    items = [
        {
            "type": "object",
            "properties": {
                "name": {"enum": [name]},
                "parameters": _moved(schema, f"#/items/anyOf/{index}/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, (name, schema) in enumerate(functions)
    ]
    size = {"minItems": 1} | ({} if most is None else {"maxItems": most})
    return {"type": "array", **size, "items": {"anyOf": items}}


def _moved(schema: Any, place: str, *, is_map: bool = False) -> Any:
    """A schema whose references to itself lead to where it now stands."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {}
    for key, value in schema.items():
        if not is_map and key == "$ref" and isinstance(value, str):
            moved[key] = _moved_reference(value, place)
        elif not is_map and key in _DATA_KEYS:
            moved[key] = value
        else:
            moved[key] = _moved(value, place, is_map=not is_map and key in _MAP_KEYS)
    return moved


def _moved_reference(reference: str, place: str) -> str:
    """Pointers are from the root of the document; names of anchors and other documents stay."""
    if reference == "#" or reference.startswith("#/"):
        return place + reference[1:]
    return reference
