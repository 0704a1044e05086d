"""The page of kinds, written by the tables that the engine goes by, so that it cannot drift.

`docs/kinds.md` is the output of `render_kinds_page`; a test compares them. To write it anew:

    python -c "from heddle.layout.support import *; \
open('docs/kinds.md', 'w').write(render_kinds_page())"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

from heddle.config.parallel import CommBackend, ContextExchange, ParallelConfig
from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.kinds import (
    AXES,
    EXCHANGES,
    KINDS,
    LANES,
    REPLICATED_QUERIES,
    conflict,
    no_effect,
    no_model,
)
from heddle.layout.rules import RULES

_HEADS_CUT = ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
_ROWS_CUT = ParallelConfig(prefill_context_parallel_size=2, decode_context_parallel_size=2)
_EXAMPLES: dict[str, ParallelConfig] = {
    "tp": ParallelConfig(tensor_parallel_size=2),
    "pcp": ParallelConfig(prefill_context_parallel_size=2),
    "dcp": _HEADS_CUT,
    "pp": ParallelConfig(pipeline_parallel_size=2),
    "dp": ParallelConfig(data_parallel_size=2),
    "ep": ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True),
    REPLICATED_QUERIES: replace(_HEADS_CUT, dcp_comm_backend="a2a", dcp_q_replicate=True),
    LANES: replace(_HEADS_CUT, cp_lanes=2),
    **{name: replace(_ROWS_CUT, dcp_comm_backend=name) for name in get_args(CommBackend)},
    **{name: replace(_ROWS_CUT, cp_context_exchange=name) for name in get_args(ContextExchange)},
}
_INTRO = """\
# Kinds: which layers run under which axis and exchange

This page is printed by the tables that the engine goes by (`heddle.layout.support`); do not edit
it.

`yes`: it runs, and gives what one rank gives. `-`: legal, and layers of this kind are not touched
by it. `no`: not to be had. Numbers are those of the reasons below. A model of several kinds obeys
all of their rows. A window of fewer than two virtual blocks is stored whole on every rank, so its
layers exchange nothing.
"""
_KIND_COLUMNS = ("kind", "what a layer does", "found in")


def example_of(feature: str) -> ParallelConfig:
    """A small layout that asks for a feature.

    Args:
        feature: one of `FEATURES`.
    """
    return _EXAMPLES[feature]


def unsupported_reason(kind: str, feature: str) -> str:
    """Why a kind does not run under a feature: conflict, no such model, or rules that refuse it.

    Args:
        kind: name of one of `KINDS`.
        feature: one of `FEATURES`.
    Returns:
        A reason, or the empty string where it runs.
    Raises:
        ValueError: kind or feature is not known.
    """
    return conflict(kind, feature) or no_model(kind, feature) or _refusal(feature)


def _refusal(feature: str) -> str:
    """What the rules say of a small layout with the feature, whatever the model."""
    model = ModelFacts(num_query_heads=8, num_kv_heads=2, num_layers=8, num_experts=4)
    choice = LayoutChoice(parallel=example_of(feature), model=model)
    return next((found.text for rule in RULES for found in rule.problems(choice)), "")


def render_kinds_page() -> str:
    """The whole page, as Markdown."""
    notes: dict[str, int] = {}
    axes = _support_table(AXES, notes)
    exchanges = _support_table(EXCHANGES, notes)
    reasons = "".join(f"{number}. {reason}.\n" for reason, number in notes.items())
    kinds = markdown_table(_KIND_COLUMNS, [(k.name, k.meaning, k.example or "-") for k in KINDS])
    return "\n".join(
        (
            _INTRO,
            f"## Axes\n\n{axes}",
            f"## Exchanges\n\n{exchanges}",
            f"## Reasons\n\n{reasons}",
            f"## Kinds\n\n{kinds}",
        )
    )


def _support_table(features: Sequence[str], notes: dict[str, int]) -> str:
    rows = [
        (kind.name, *(_cell(kind.name, feature, notes) for feature in features)) for kind in KINDS
    ]
    return markdown_table(("kind", *(f"`{feature}`" for feature in features)), rows)


def _cell(kind: str, feature: str, notes: dict[str, int]) -> str:
    """`yes`, or the number of a note, which is made where it is new."""
    reason = unsupported_reason(kind, feature)
    if reason:
        return f"no ({notes.setdefault(reason, len(notes) + 1)})"
    idle = no_effect(kind, feature)
    return f"- ({notes.setdefault(idle, len(notes) + 1)})" if idle else "yes"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a generated page; every row has a cell per column."""
    head = [_table_row(columns), "|" + " --- |" * len(columns)]
    return "\n".join([*head, *map(_table_row, rows)]) + "\n"


def _table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
