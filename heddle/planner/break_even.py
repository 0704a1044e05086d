"""From which length on splitting pays: lines between a layout and the same without the split.

    PCP    the shortest prompt whose first token comes sooner with its rows split,
           against the same TP on fewer devices, and against TP on as many
    DCP    the fewest resident tokens (context x sequences) with which a decode step is shorter
           with the KV split

Both layouts work in chunks of as many rows, so that a line tells of layouts and of nothing else.
Each line is drawn with the middle of the sheet's ranges and with both ends. Public results disagree
by hardware for that reason: a line moves with the price of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from heddle.config import ParallelConfig
from heddle.errors import ConfigError
from heddle.planner.batches import Rows
from heddle.planner.cost import CostModel
from heddle.planner.devices import EDGES, Edge
from heddle.planner.memory import PlannedEngine, plan_engine
from heddle.planner.workload import prefill_seconds

_SHORTEST = 64
_PRECISION = 1.1
"""Ratio of the ends of the interval in which a line is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One break-even, in tokens."""

    what: str
    """`pcp` or `dcp`."""
    layout: ParallelConfig
    against: ParallelConfig
    tokens: float | None
    """None: never within the window."""
    band: tuple[float | None, float | None]
    """(earliest, latest) over the ranges of the sheet; None: never."""


def break_even_lines(engine: PlannedEngine, num_sequences: int) -> list[Line]:
    """The lines of one layout; none for what it does not split.

    Args:
        engine: planned.
        num_sequences: that decode at once in a replica.
    """
    parallel = engine.parallel
    tp, pcp = parallel.tensor_parallel_size, parallel.prefill_context_parallel_size
    lines = []
    if pcp > 1:
        for num_tp_ranks in (tp, tp * pcp):
            other = replace(
                _whole(parallel),
                tensor_parallel_size=num_tp_ranks,
                prefill_context_parallel_size=1,
            )
            lines += _line("pcp", engine, other, _first_token_gain)
    if parallel.decode_context_parallel_size > 1:
        other = _whole(parallel)

        gain = partial(_decode_gain, num_sequences)
        lines += _line("dcp", engine, other, gain, num_sequences)
    return lines


def _whole(parallel: ParallelConfig) -> ParallelConfig:
    """The same without a split of the KV, and without what only a split can use."""
    default = ParallelConfig()
    return replace(
        parallel,
        decode_context_parallel_size=1,
        dcp_comm_backend=default.dcp_comm_backend,
        cp_context_exchange=default.cp_context_exchange,
        dcp_q_replicate=default.dcp_q_replicate,
        cp_start_rank_rotation=default.cp_start_rank_rotation,
        cp_lanes=default.cp_lanes,
    )


def _decode_gain(num_sequences: int, here: CostModel, there: CostModel, tokens: int) -> float:
    rows = [Rows(max(tokens // num_sequences, 1), 1)] * num_sequences
    return there.step(rows).seconds - here.step(rows).seconds


def _first_token_gain(here: CostModel, there: CostModel, tokens: int) -> float:
    span = (0, tokens)
    before = prefill_seconds(there, span, there.engine.chunk, nodes=1)
    return before - prefill_seconds(here, span, here.engine.chunk, nodes=1)


def _line(
    what: str,
    engine: PlannedEngine,
    other: ParallelConfig,
    gain: Callable[[CostModel, CostModel, int], float],
    num_sequences: int = 1,
) -> list[Line]:
    """The line against another layout, in chunks of as many rows; none where that is refused or
    does not fit.
    """
    alike = replace(engine.settings, scheduler=engine.resolved.scheduler, chunk_per_pcp_rank=False)
    try:
        against = plan_engine(alike, other)
    except ConfigError:
        return []
    here, there = CostModel(engine), CostModel(against)
    found: dict[Edge, float | None] = {}
    for edge in EDGES:
        found[edge] = first_above_zero(
            partial(gain, here.at(edge), there.at(edge)),
            _SHORTEST * num_sequences,
            engine.room.window * num_sequences,
        )
    known = [value for value in found.values() if value is not None]
    return [
        Line(
            what=what,
            layout=engine.parallel,
            against=other,
            tokens=found["mid"],
            band=(min(known, default=None), max(known) if len(known) == len(found) else None),
        )
    ]


def first_above_zero(gain: Callable[[int], float], shortest: int, longest: int) -> float | None:
    """The length from which on a gain is above zero, within 10%.

    Args:
        gain: grows with the length, steps aside.
        shortest: that is looked at.
        longest: that is looked at.
    Returns:
        `shortest` where it is above zero from the start; None where it is not at the longest.
    Example:
        >>> 1000 < first_above_zero(lambda n: n - 1000, 64, 1 << 20) < 1100
        True
        >>> first_above_zero(lambda n: -1.0, 64, 1 << 20) is None
        True
    """
    low, high = shortest, longest
    if high <= low or gain(high) <= 0:
        return None
    if gain(low) > 0:
        return float(low)
    while high > low * _PRECISION and high - low > 1:
        middle = max(int((low * high) ** 0.5), low + 1)
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return float(high)
