"""Bodies of many megabytes, decoded in pieces.

The decoder holds the interpreter's lock until it returns, so a thread beside the event loop would
stop the loop all the same: 16 MB of token ids for 0.6 s. So a body is only looked over at once, and
what it holds is decoded piece by piece, with room for others in between:

    outline     each known field as bytes; what nobody reads is never decoded
    ids         64 KiB at a time, and checked there
    messages    as ever: most of them is text, of which 16 MB take 10 ms
    other       refused above 1 MiB
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from heddle.server.errors import ApiError
from heddle.server.prompts import (
    MAX_PROMPTS,
    prompt_misfit,
    too_many_prompts,
)
from heddle.server.requests import SILENT_FIELDS, SUCCESSORS

PIECE_BYTES = 1 << 16
MAX_NAMES_BYTES = 1 << 16
"""Of a body beside its known fields, for its unknown fields to be named."""
MAX_FIELD_BYTES = 1 << 20
"""Of a field that is neither text nor one of `LARGE_FIELDS`, nor made of ids."""
LARGE_FIELDS = frozenset(("messages", "documents"))
UNNAMED = "(names of more than 64 KiB)"
"""In place of unknown fields that are too many, or too large, to be named."""
_GOOD_ID = re.compile(rb"\s*-?\d+\s*")

Body = TypeVar("Body", bound=msgspec.Struct)
Decoded = tuple[Body, list[str], Mapping[str, bytes]]
"""A request; names of fields that it does not declare; fields that have a successor, as JSON."""


def decode_heavy(data: bytes, kind: type[Body]) -> Decoded[Body]:
    """The typed form of a large body.

    Args:
        data: JSON.
        kind: of the request.
    Raises:
        ApiError: a prompt that is none, or a field that is too large.
        msgspec.DecodeError: not JSON, or a field of another type.
    """
    outline = msgspec.json.decode(data, type=_outline(kind))
    found = {name: bytes(getattr(outline, name)) for name in outline.__struct_fields__}
    given = {name: raw for name, raw in found.items() if raw}
    rest = len(data) - sum(map(len, given.values()))
    names = (
        msgspec.json.decode(data, type=dict[str, msgspec.Raw]) if rest <= MAX_NAMES_BYTES else None
    )
    known = {*kind.__struct_fields__, *SILENT_FIELDS}
    unknown = [UNNAMED] if names is None else [name for name in names if name not in known]
    outmoded = {name: given[name] for name in SUCCESSORS.keys() & given.keys()}
    divided: dict[str, Any] = {}
    light: list[bytes] = []
    for name in kind.__struct_fields__:
        raw = given.get(name)
        if raw is None or name in SILENT_FIELDS:
            continue
        if len(raw) > PIECE_BYTES and raw[:1] == b"[" and name in _DIVIDERS:
            divided[name] = _DIVIDERS[name](raw, name)
            raw = b"[]"
        elif len(raw) > MAX_FIELD_BYTES and raw[:1] != b'"' and name not in LARGE_FIELDS:
            raise ApiError(f"{name} is larger than {MAX_FIELD_BYTES} bytes", param=name)
        light.append(b'"%s":%s' % (name.encode(), raw))
    body = msgspec.json.decode(b"{%s}" % b",".join(light), type=kind)
    for name, value in divided.items():
        setattr(body, name, value)
    return body, unknown, outmoded


@lru_cache
def _outline(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The same fields, none of them decoded; empty where one is missing."""
    names = dict.fromkeys((*kind.__struct_fields__, *SILENT_FIELDS, *SUCCESSORS))
    empty = msgspec.Raw(b"")
    return msgspec.defstruct(
        f"{kind.__name__}Outline", [(name, msgspec.Raw, empty) for name in names]
    )


def _prompt(raw: bytes, place: str) -> tuple[int, ...] | list[Any]:
    """A list of ids, of texts, or of lists of ids, told apart by its first element."""
    first = re.match(rb"\[\s*(.)", raw)
    begin = b"" if first is None else first[1]
    if begin and begin in b"-0123456789":
        return _ids(raw, place)
    if begin == b"[":
        return _id_lists(raw, place)
    if begin == b'"':
        least = (raw.count(b'"') - raw.count(b'\\"')) // 2
        if least > MAX_PROMPTS:
            raise too_many_prompts(least)
        try:
            return msgspec.json.decode(raw, type=list[str])
        except msgspec.ValidationError as error:
            raise prompt_misfit(f"{place}.{_index(error)}") from None
    if begin == b"]":
        return []
    raise prompt_misfit(f"{place}.0")


def _id_lists(raw: bytes, place: str) -> list[tuple[int, ...]]:
    """Lists of ids; no list in them, so each ends at the next bracket."""
    count = raw.count(b"[") - 1
    if count > MAX_PROMPTS:
        raise too_many_prompts(count)
    found: list[tuple[int, ...]] = []
    end = 1
    while (between := raw[end : raw.find(b"[", end)].strip()) in (b"", b","):
        begin = raw.find(b"[", end)
        if begin < 0:
            break
        end = raw.find(b"]", begin) + 1
        found.append(_ids(raw[begin:end], f"{place}.{len(found)}"))
    if between or raw[end:].strip() != b"]":
        raise prompt_misfit(f"{place}.{len(found)}")
    return found


def _ids(raw: bytes, place: str) -> tuple[int, ...]:
    """A list of whole numbers, cut at commas."""
    found: list[int] = []
    begin, end = 1, len(raw) - 1
    while begin < end:
        cut = end
        if begin + PIECE_BYTES < end:
            cut = raw.rfind(b",", begin, begin + PIECE_BYTES)
            cut = cut if cut > 0 else raw.find(b",", begin, end)
            cut = cut if cut > 0 else end
        piece = _whole_numbers(raw[begin:cut])
        if piece is None:
            words = raw[begin:cut].split(b",")
            good = next((n for n, word in enumerate(words) if not _GOOD_ID.fullmatch(word)), 0)
            raise prompt_misfit(f"{place}.{len(found) + good}")
        found += piece
        begin = cut + 1
    return tuple(found)


def _whole_numbers(piece: bytes) -> list[int] | None:
    try:
        found: list[int] = msgspec.json.decode(b"[%s]" % piece)
    except msgspec.DecodeError:
        return None
    return found if set(map(type, found)) <= {int} else None


def _other_ids(raw: bytes, place: str) -> list[int]:
    try:
        return list(_ids(raw, place))
    except ApiError as error:
        raise ApiError(f"{error.param}: a token id is a whole number", param=error.param) from None


def _index(error: msgspec.ValidationError) -> str:
    found = re.search(r"at `\$\[(\d+)\]`", str(error))
    return found[1] if found else "0"


_DIVIDERS = {
    "prompt": _prompt,
    "tokens": _other_ids,
    "allowed_token_ids": _other_ids,
    "stop_token_ids": _other_ids,
}
