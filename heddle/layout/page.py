"""The support page, written by the validator itself so that it cannot drift.

`docs/layouts.md` is the output of `render_page`; a test compares them. To write it anew:

    python -c "from heddle.layout.page import *; open('docs/layouts.md', 'w').write(render_page())"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heddle.layout.heads import HeadLayout
from heddle.layout.mesh import Mesh, legal_dcp_sizes
from heddle.layout.rule import Rule
from heddle.layout.rules import RULES, judge

_PLANES = ((4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 3), (3, 4), (4, 6), (8, 8))
_MODELS = (
    ("9 query, 3 kv heads", 9, 3, ((2, 1), (2, 2), (3, 1))),
    ("64 query, 8 kv heads", 64, 8, ((8, 1), (4, 2))),
    ("128 query heads, latent (1 kv row)", 128, 1, ((8, 1),)),
)
_INTRO = """\
# Layouts: what is legal, and what a refusal says

This page is printed by the rules themselves (`heddle.layout.page`); do not edit it.

A layout is legal when every rule below holds. A refusal names the value, the rule and the nearest
legal choices, all problems at once, before any process starts. `heddle show` judges a layout
without loading a model.
"""


def render_page() -> str:
    """The whole page, as Markdown."""
    parts = (_INTRO, _rules_section(), _sizes_section(), _storage_section(), _refusals_section())
    return "\n".join(parts)


def _rules_section() -> str:
    rows = [(rule.name, rule.demand, rule.why) for rule in RULES]
    return "## Rules\n\n" + _table(("rule", "what must hold", "why"), rows)


def _sizes_section() -> str:
    rows = [
        (tp, pcp, tp * pcp, " ".join(map(str, legal_dcp_sizes(tp, pcp)))) for tp, pcp in _PLANES
    ]
    return "## Legal DCP sizes\n\n" + _table(("TP", "PCP", "ranks", "legal DCP"), rows)


def _storage_section() -> str:
    rows = [
        (name, tp, pcp, dcp, *_storage(queries, kv, tp, pcp, dcp))
        for name, queries, kv, planes in _MODELS
        for tp, pcp in planes
        for dcp in legal_dcp_sizes(tp, pcp)
    ]
    columns = ("model", "TP", "PCP", "DCP", "KV on one rank", "copies", "pad lanes")
    return "## What a layout stores\n\nMore DCP saves memory until the copies are 1.\n\n" + _table(
        columns, rows
    )


def _storage(queries: int, kv: int, tp: int, pcp: int, dcp: int) -> tuple[object, ...]:
    heads = HeadLayout(
        num_query_heads=queries,
        num_kv_heads=kv,
        tp_size=tp,
        slice_size=Mesh(tp_size=tp, pcp_size=pcp, dcp_size=dcp).slice_size,
    )
    return heads.kv_fraction(dcp), heads.kv_copies(pcp, dcp), heads.pad_waste


def _refusals_section() -> str:
    return "## Refusals, by example\n\n" + "\n".join(_refusal(rule) for rule in RULES)


def _refusal(rule: Rule) -> str:
    verdict = judge(rule.example)
    nearest = [f"    {near.flags}" for near in verdict.nearest] or ["    none"]
    lines = [f"### {rule.name}", "", *verdict.reasons, "", "Nearest legal layouts:", "", *nearest]
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = [_row(columns), "|" + " --- |" * len(columns)]
    return "\n".join([*head, *map(_row, rows)]) + "\n"


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
