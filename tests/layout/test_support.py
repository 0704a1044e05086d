"""The page of kinds is what the tables print today; its refusals are those of the rules."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from heddle.layout import support
from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.kinds import FEATURES, KINDS, conflict, features_of, no_model
from heddle.layout.rule import Problem
from heddle.layout.rules import RULES, judge
from heddle.layout.support import example_of, render_kinds_page, unsupported_reason

PAGE = Path(__file__).parents[2] / "docs" / "kinds.md"
MODEL = ModelFacts(num_query_heads=8, num_kv_heads=2, num_layers=8, num_experts=4)


def test_the_page_equals_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == render_kinds_page(), "write it anew: heddle/layout/support.py"


@pytest.mark.parametrize("feature", FEATURES)
def test_an_example_asks_for_its_feature(feature: str) -> None:
    assert feature in features_of(example_of(feature))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_kind_runs_where_the_rules_say_so_and_nothing_conflicts(feature: str) -> None:
    legal = judge(LayoutChoice(parallel=example_of(feature), model=MODEL)).legal
    for kind in KINDS:
        runs = legal and not (conflict(kind.name, feature) or no_model(kind.name, feature))
        assert (unsupported_reason(kind.name, feature) == "") is runs


def test_a_feature_that_a_rule_refuses_runs_for_no_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = dataclasses.replace(RULES[0], problems=lambda _: [Problem("lanes are off")])
    monkeypatch.setattr(support, "RULES", (refusing,))
    assert unsupported_reason("MLA", "lanes") == "lanes are off"
    assert unsupported_reason("sparse top-k", "lanes").startswith("the keys that a rank holds")


def test_every_pair_has_a_cell_and_every_number_a_reason() -> None:
    text = render_kinds_page()
    cells = [
        cell
        for kind in KINDS
        for line in text.splitlines()
        if line.startswith(f"| {kind.name} |") and kind.meaning not in line
        for cell in line.split("|")[2:-1]
    ]
    assert len(cells) == len(KINDS) * len(FEATURES)
    used = {cell.split("(")[1].strip(" )") for cell in cells if "(" in cell}
    listed = {line.split(".")[0] for line in text.splitlines() if line[:1].isdigit()}
    assert used == listed
    assert len(used) >= 4
