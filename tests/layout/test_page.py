"""The support page is what the rules print today."""

from __future__ import annotations

from pathlib import Path

from heddle.layout.page import render_page
from heddle.layout.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_the_page_equals_the_rules() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_page(), "write it anew: heddle/layout/page.py"


def test_every_rule_is_on_the_page_with_an_example() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(RULES) >= 12
    for rule in RULES:
        assert f"| {rule.name} | {rule.demand} | {rule.why} |" in text
        assert f"### {rule.name}\n" in text
