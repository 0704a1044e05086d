"""Prices of the ways in which the rows of one class may meet their keys in one layer.

Calls and bytes are those of `exchanges.describe`. Arithmetic differs between ways only for latent
attention: where queries travel they meet latents as they lie (absorbed, wide heads); where keys
travel they are up-projected first (narrow heads, but every key costs a product).

Legend: `n` rows of a class on a rank, `S` cached keys, `h` query-head lanes, `N` DCP ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle.layout.rows import RowClass
from heddle.step.choose import Way, cheapest
from heddle.step.class_plan import ClassPlan
from heddle.step.context import ContextSpans
from heddle.step.exchanges import ExchangeSizes, describe
from heddle.step.topology import Topology
from heddle.step.traffic import cost_of

_TRAVELLING_QUERIES = ("gather_q", "pass_q")
_UNDER_ARITHMETIC = ("pass_q", "ring_kv")
"""Transfers of these run while the keys that are there are met."""


@dataclass(frozen=True, slots=True)
class ContextWork:
    """What the rows of a class meet of cached keys, on one rank."""

    row_keys: float
    """Pairs of a row and a key."""
    keys: float
    """Distinct keys."""

    @classmethod
    def of(cls, spans: ContextSpans, rows: npt.NDArray[np.int64], pcp_size: int) -> ContextWork:
        """The mean over PCP ranks.

        Args:
            spans: cached positions that some row of each request sees.
            rows: `[B]`, new rows of each request, on all ranks together.
            pcp_size: ranks among which they are dealt.
        """
        lengths = spans.end - spans.start
        pairs = int((rows[spans.request] * lengths).sum())
        return cls(pairs / pcp_size, int(lengths.sum()))


def choose_plan(
    plans: Sequence[ClassPlan],
    num_rows: int,
    sizes: ExchangeSizes,
    topology: Topology,
    work: ContextWork | None = None,
) -> tuple[ClassPlan, str]:
    """The cheapest of several plans for the rows of one class, and why.

    Args:
        plans: legal ones; the first wins among equals.
        num_rows: `n`, pads included.
        sizes: of a rank, the same one on all ranks.
        topology: costs, and shapes of the model.
        work: cached keys that distributed rows meet; None: all plans do the same arithmetic.
    """
    ways = [_way(plan, num_rows, sizes, topology, work) for plan in plans]
    best, why = cheapest(ways, topology.costs)
    return plans[ways.index(best)], why


def _way(
    plan: ClassPlan,
    num_rows: int,
    sizes: ExchangeSizes,
    topology: Topology,
    work: ContextWork | None,
) -> Way:
    is_copy = plan.row_class is RowClass.COPY
    name = plan.returns if is_copy else plan.context
    if not is_copy and plan.returns != "none":
        name = f"{plan.context} + {plan.returns}"
    cost = cost_of(describe(plan, num_rows, sizes), topology.mesh)
    if work is None:
        return Way(name=name, cost=cost)
    seconds = _flops(plan, sizes, topology, work) / topology.costs.flops
    is_hidden = plan.context in _UNDER_ARITHMETIC
    share = (sizes.world_size - 1) / sizes.world_size
    return Way(
        name=name,
        cost=cost,
        compute_seconds=seconds,
        hidden_seconds=share * seconds if is_hidden else 0.0,
    )


def _flops(plan: ClassPlan, sizes: ExchangeSizes, topology: Topology, work: ContextWork) -> float:
    """Attention over cached keys on one rank; ownership of keys spreads what queries bring."""
    mla, model = topology.model.mla, topology.model
    pairs = 2.0 * work.row_keys * sizes.lanes
    if mla is None or plan.context in _TRAVELLING_QUERIES:
        return pairs * (sizes.query_width + sizes.partial_width)
    expanded = 2.0 * work.keys * sizes.lanes * mla.kv_lora_rank
    expanded *= mla.qk_nope_head_dim + mla.v_head_dim
    return pairs * (model.head_dim + model.output_head_dim) + expanded
