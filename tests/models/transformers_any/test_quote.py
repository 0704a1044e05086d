"""Errors of the library are quoted in one short line."""

from __future__ import annotations

import pytest

from heddle.models.transformers_any.quote import quoted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("no such size", "no such size"),
        ("\n  overflow\nException raised from f (most recent call first):\nframe #0", "overflow"),
        (
            "Error for 'x':\n    TypeError: expected int\nmore",
            "Error for 'x': TypeError: expected int",
        ),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 197 + "..."),
    ],
)
def test_what_is_kept(text: str, expected: str) -> None:
    assert quoted(ValueError(text)) == expected
