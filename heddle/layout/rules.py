"""Which layouts are legal: one table, one verdict, before any process exists.

Every entry point asks `validate` (or `check`, which raises), and what lies behind trusts the
answer. A rule says what it demands, why, and how to mend a choice that breaks it; the same table
makes `docs/layouts.md`.

All reasons are returned at once. Proposals come from the rules' mends and are kept only if this
table accepts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from heddle.config.model import ModelConfig
from heddle.config.parallel import ParallelConfig
from heddle.errors import TopologyError
from heddle.layout import (
    axis_rules,
    exchange_rules,
    foreign_rules,
    kind_rules,
    lane_rules,
    mesh_rules,
    setting_rules,
)
from heddle.layout.choice import DEFAULT_BLOCK_SIZE, LayoutChoice, ModelFacts
from heddle.layout.mesh import legal_dcp_sizes
from heddle.layout.nearest import nearest_choices
from heddle.layout.rule import Mend, Problem, Rule

__all__ = [
    "RULES",
    "Rule",
    "Suggestion",
    "Verdict",
    "check",
    "judge",
    "legal_dcp_sizes",
    "legal_layouts",
    "validate",
]

RULES: tuple[Rule, ...] = (
    mesh_rules.SIZES,
    mesh_rules.DCP,
    mesh_rules.HEAD_RATIO,
    mesh_rules.HEADS,
    setting_rules.INTERLEAVE,
    setting_rules.WORKSPACE,
    exchange_rules.EXCHANGE,
    exchange_rules.IDLE_EXCHANGE,
    exchange_rules.QUERY_REPLICA,
    exchange_rules.PASSED_REPLICA,
    lane_rules.LANE_COUNT,
    lane_rules.LANE_EXCHANGE,
    axis_rules.PIPELINE,
    axis_rules.EXPERTS,
    kind_rules.KIND,
    kind_rules.CHOSEN_WINDOW,
    foreign_rules.FOREIGN,
)
_MAX_SUGGESTIONS = 4
_MAX_VALUES = 2
"""Nearest values named in a sentence; whole layouts follow in `nearest`."""
_MAX_LISTED = 4
"""Values in a row that are still listed one by one."""


class Suggestion(NamedTuple):
    """A legal layout near a refused one."""

    flags: str
    choice: LayoutChoice

    def __str__(self) -> str:
        return self.flags


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rules say of a layout."""

    legal: bool
    reasons: tuple[str, ...] = ()
    """A sentence for each problem; empty when legal."""
    nearest: tuple[Suggestion, ...] = ()
    """Legal layouts, nearest first; empty when legal, or when no layout can serve the model."""


def judge(choice: LayoutChoice) -> Verdict:
    """Every reason against a layout, and legal layouts near it."""
    problems = [problem for rule in RULES for problem in rule.problems(choice)]
    if not problems:
        return Verdict(legal=True)
    nearest = nearest_choices(choice, _first_mend, _MAX_SUGGESTIONS)
    return Verdict(
        legal=False,
        reasons=tuple(_sentence(problem, choice, nearest) for problem in problems),
        nearest=tuple(Suggestion(near.flags(choice), near) for near in nearest),
    )


def validate(
    parallel: ParallelConfig,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    model: ModelConfig | None = None,
    heads: tuple[int, int] | None = None,
    max_model_len: int | None = None,
) -> Verdict:
    """Judge a layout.

    Args:
        parallel: degrees and exchanges.
        block_size: tokens of one page on one rank.
        model: the model to serve; None: only rules that need no model apply.
        heads: (query, kv) head counts when there is no model.
        max_model_len: the window asked for; None: the model's.
    """
    return judge(
        LayoutChoice(
            parallel=parallel,
            block_size=block_size,
            max_model_len=max_model_len,
            model=_facts(model, heads),
        )
    )


def check(
    parallel: ParallelConfig,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    model: ModelConfig | None = None,
    heads: tuple[int, int] | None = None,
    max_model_len: int | None = None,
) -> None:
    """`validate`, as an error.

    Raises:
        TopologyError: with every reason and the nearest legal layouts.
    """
    verdict = validate(
        parallel, block_size=block_size, model=model, heads=heads, max_model_len=max_model_len
    )
    if not verdict.legal:
        raise TopologyError(verdict.reasons, [near.flags for near in verdict.nearest])


def legal_layouts(
    world_size: int,
    *,
    base: ParallelConfig | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    model: ModelConfig | None = None,
    heads: tuple[int, int] | None = None,
    max_model_len: int | None = None,
) -> tuple[ParallelConfig, ...]:
    """Every legal (tp, pcp, dcp) with `tp * pcp == world_size`, ascending.

    Settings other than the degrees are those of `base`.

    Example:
        >>> [(p.tensor_parallel_size, p.prefill_context_parallel_size,
        ...   p.decode_context_parallel_size) for p in legal_layouts(2)]
        [(1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2)]
    """
    start = LayoutChoice(
        parallel=base or ParallelConfig(),
        block_size=block_size,
        max_model_len=max_model_len,
        model=_facts(model, heads),
    )
    choices = (
        replace(start, parallel=_with_degrees(start.parallel, tp_size, world_size // tp_size, dcp))
        for tp_size in range(1, world_size + 1)
        if world_size % tp_size == 0
        for dcp in legal_dcp_sizes(tp_size, world_size // tp_size)
    )
    return tuple(choice.parallel for choice in choices if _first_mend(choice) is None)


def _facts(model: ModelConfig | None, heads: tuple[int, int] | None) -> ModelFacts | None:
    if model is not None:
        return ModelFacts.of(model)
    if heads is not None:
        return ModelFacts(num_query_heads=heads[0], num_kv_heads=heads[1])
    return None


def _with_degrees(base: ParallelConfig, tp: int, pcp: int, dcp: int) -> ParallelConfig:
    return replace(
        base,
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
    )


def _sentence(problem: Problem, asked: LayoutChoice, nearest: Sequence[LayoutChoice]) -> str:
    """Value, rule, legal values, nearest ones: each said only if all rules agree."""
    name = problem.setting
    broken = _broken(asked)
    legal = [
        value
        for value in problem.legal
        if _broken(asked.with_settings({name: value})) < broken  # mends this, breaks nothing else
    ]
    near = dict.fromkeys(choice.setting(name) for choice in nearest) if name else {}
    others = [value for value in near if value != asked.setting(name)][:_MAX_VALUES]
    text = problem.text
    if legal:
        text += f"; legal here: {_listed(legal, problem.describe)}"
    if others:
        text += f" (nearest: {', '.join(map(str, sorted(others)))})"
    return text


def _listed(values: Sequence[Any], describe: Callable[[Any], str]) -> str:
    """The values, or their ends when they are many in a row."""
    first, last = values[0], values[-1]
    is_many = len(values) > _MAX_LISTED and isinstance(first, int)
    if is_many and values == list(range(first, last + 1)):
        return f"{first} to {last}"
    return ", ".join(map(describe, values))


def _broken(choice: LayoutChoice) -> set[tuple[str, str]]:
    """(rule, setting at fault) of every problem."""
    return {(rule.name, problem.setting) for rule in RULES for problem in rule.problems(choice)}


def _first_mend(choice: LayoutChoice) -> Mend | None:
    """The mend of the first broken rule; None when the choice is legal."""
    return next((rule.mend for rule in RULES if any(rule.problems(choice))), None)
