"""Words of the command line -> values, with the spellings that vLLM users know.

A lower-case suffix is decimal and may carry a fraction (`32k` = 32000, `25.6k` = 25600); an
upper-case one is binary and may not (`32K` = 32768).
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from heddle.config.overrides import overrides_text
from heddle.errors import ConfigError

_SIZE = re.compile(r"(\d+)(\.\d+)?([kmgtKMGT])?")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def integer(text: str) -> int:
    """A whole number; its sign is judged by whoever uses it.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 2") from None


def number(text: str) -> float:
    """A number; its range is judged by whoever uses it.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.5") from None


def size(text: str) -> int:
    """A count with an optional suffix.

    Raises:
        argparse.ArgumentTypeError: not a count, a fraction of a unit, or a binary suffix behind a
            fraction.
    Example:
        >>> size("32k"), size("32K"), size("25.6k")
        (32000, 32768, 25600)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count such as 4096, 32k or 32K")
    whole, fraction, suffix = match.group(1), match.group(2) or "", match.group(3) or ""
    if fraction and suffix not in _POWERS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole count; fractions need k, m, g or t"
        )
    if suffix in _POWERS:
        digits = fraction[1:]
        shift = 3 * _POWERS[suffix] - len(digits)
        if shift < 0:
            raise argparse.ArgumentTypeError(f"{text!r} is finer than one unit")
        return int(whole + digits) * int(10**shift)
    return int(whole) * int(1024 ** _POWERS.get(suffix.lower(), 0))


def size_or_auto(text: str) -> int | None:
    """A count, or `auto` and `-1` for None."""
    return None if text in ("auto", "-1") else size(text)


def count_or_auto(text: str) -> int | None:
    """A whole number, judged by whoever uses it, or `auto` for None."""
    return None if text == "auto" else integer(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object; its keys are judged by whoever uses it.

    Raises:
        argparse.ArgumentTypeError: anything else.
    Example:
        >>> json_object('{"method": "ngram"}')
        {'method': 'ngram'}
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"""{text!r} is not a JSON object such as '{{"key": 1}}'"""
        )
    return value


def overrides(text: str) -> str:
    """A JSON object of values of `config.json`, as its one canonical text; empty: none.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        return overrides_text(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def heads(text: str) -> tuple[int, int]:
    """`64/8` -> (64, 8): query heads, kv heads.

    Raises:
        argparse.ArgumentTypeError: not two positive counts.
    """
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not QUERY/KV heads such as 32/8")
    return int(match.group(1)), int(match.group(2))
