"""Every promise of the page on security names tests, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
NAMED = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`")


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def rows() -> list[str]:
    """Of all tables, without their heads."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if re.match(r"\| (?!promise)", line)]


def test_each_promise_names_a_test() -> None:
    assert len(rows()) > 30
    assert [row for row in rows() if not NAMED.search(row)] == []


def test_each_test_that_is_named_is_there() -> None:
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 40
    assert [f"{path}::{name}" for path, name in named if name not in functions_of(path)] == []
