"""Every promise of the pages on security and reliability names tests, and these tests are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"security": (30, 40), "reliability": (25, 35)}
"""By name: promises and named tests that there are at least."""
NAMED = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`")


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def rows(page: str) -> list[str]:
    """Of all tables, without their heads."""
    return [line for line in text_of(page).splitlines() if re.match(r"\| (?!promise)", line)]


@pytest.mark.parametrize("page", PAGES)
def test_each_promise_names_a_test(page: str) -> None:
    assert len(rows(page)) > PAGES[page][0]
    assert [row for row in rows(page) if not NAMED.search(row)] == []


@pytest.mark.parametrize("page", PAGES)
def test_each_test_that_is_named_is_there(page: str) -> None:
    named = NAMED.findall(text_of(page))
    assert len(named) > PAGES[page][1]
    assert [f"{path}::{name}" for path, name in named if name not in functions_of(path)] == []
