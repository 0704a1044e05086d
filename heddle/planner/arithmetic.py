"""Operations and bytes of a step's attention on one rank, and of its dense layers.

    dense      2 operations a weight and row; weights are read once a step
    experts    2 operations a weight and visit; of the experts held here, those that are visited
    attention  2 (Dq + Do) operations a query lane, row and key; keys are read once a step

Rows and pads are those of the plan, and so is the way in which each class meets its keys: where
queries travel a rank meets its share of the keys for all lanes of its group; where keys travel it
meets all of them for its own. Latent rows are met as they lie where queries travel and where rows
decode, and expanded (a product for every key) elsewhere.

Legend: `P` PCP ranks, `N` ranks that share the keys of a group, `S` keys, `X` experts, `Dq`, `Do`
widths of query and partial.
Source: counting; the choice of form is that of `heddle.step.pricing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heddle.config.visibility import Visibility
from heddle.layout.cache_rows import DTYPE_BYTES, row_format
from heddle.layout.rows import RowClass
from heddle.planner.parts import LayerWeights
from heddle.step.class_plan import GroupPlan
from heddle.step.exchanges import ExchangeSizes
from heddle.step.plan import StepPlan
from heddle.step.topology import Topology

_TRAVELLING = ("gather_q", "pass_q")
_STATE_OPERATIONS = 6
"""Of a recurrence, for each element of a state and row: decay, update and read-out."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank computes, and what it reads for it."""

    operations: float = 0.0
    read_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.read_bytes + other.read_bytes)

    def __mul__(self, factor: float) -> Work:
        return Work(self.operations * factor, self.read_bytes * factor)

    def seconds(self, flops: float, memory: float, serial_share: float = 0.0) -> float:
        """Arithmetic or reading, whichever is slower, and the share of the other that shows."""
        parts = self.operations / flops, self.read_bytes / memory
        return max(parts) + serial_share * min(parts)


@dataclass(frozen=True, slots=True)
class Met:
    """What the rows of a class see, summed over its requests."""

    cached_pairs: float = 0.0
    """Pairs of a new row and a key of an earlier step."""
    own_pairs: float = 0.0
    """Pairs of a new row and a key of this step."""
    cached_keys: float = 0.0
    own_keys: float = 0.0


def dense_work(layer: LayerWeights, num_rows: int) -> Work:
    """Everything of a layer that is no attention and no routed expert.

    Args:
        layer: on one rank.
        num_rows: local rows, pads included.
    """
    return Work(2.0 * num_rows * layer.row_elements, float(layer.shared_bytes))


def expert_work(layer: LayerWeights, plan: StepPlan, topology: Topology) -> Work:
    """Routed experts of a layer; visits are taken to be spread evenly.

    Of `x` experts held, `x (1 - (1 - k/X)^rows)` are visited by some row.
    """
    moe = topology.model.moe
    if moe is None or layer.num_experts == 0:
        return Work()
    num_rows: float = plan.rows.num_local_rows
    if topology.has_expert_parallel:
        num_rows = plan.rows.num_rows * topology.mesh.dp_size
    share = moe.num_experts_per_token / moe.num_experts
    visited = 1.0 - (1.0 - share) ** num_rows
    visits = num_rows * share * layer.num_experts
    return Work(2.0 * visits * layer.expert_elements, visited * layer.expert_bytes)


def attention_work(plan: StepPlan, topology: Topology, group: int, tp_rank: int) -> Work:
    """Attention of one layer of a cache group on one rank, the mean over PCP ranks.

    Args:
        plan: of the step.
        topology: constants of the engine.
        group: index of the cache group.
        tp_rank: place among the tensor-parallel ranks.
    """
    sizes = ExchangeSizes.of(topology, tp_rank)
    counter = _Counter(plan, topology, group, sizes)
    total = Work()
    for row_class in RowClass:
        start, end = plan.rows.class_rows(row_class)
        if end > start:
            total += counter.of_class(row_class, end - start)
    return total


def recurrent_work(plan: StepPlan, topology: Topology, tp_rank: int) -> Work:
    """A recurrent layer: its states are read and written once a step."""
    layout = topology.recurrent_layout
    if layout is None:
        return Work()
    heads, key, value = layout.state_shape(tp_rank)
    size, states = heads * key * value, len(plan.batch.requests)
    operations = _STATE_OPERATIONS * plan.rows.num_local_rows * size
    return Work(operations, 2.0 * states * size * max(DTYPE_BYTES[topology.dtype], 4))


def meet(rule: Visibility, lengths: Sequence[tuple[int, int]]) -> Met:
    """What rows see.

    Args:
        rule: visible keys of the layers.
        lengths: (cached, new) tokens of each request.
    Example:
        >>> meet(Visibility(), [(10, 2)])
        Met(cached_pairs=20.0, own_pairs=3.0, cached_keys=10.0, own_keys=2.0)
    """
    cached, new = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
    if rule.is_full:
        own = (new * (new + 1) // 2).sum()
        return Met(float((new * cached).sum()), float(own), float(cached.sum()), float(new.sum()))
    rows = np.repeat(cached - np.cumsum(new) + new, new) + np.arange(new.sum())
    before = np.repeat(cached, new)
    start, first = rule.start(rows), rule.first_end(rows)
    from_cache = np.maximum(before - start, 0) + np.minimum(first, before)
    own_pairs = rows + 1 - np.maximum(start, before) + np.maximum(first - before, 0)
    begin = rule.start(cached)
    keys = np.maximum(cached - begin, 0) + np.minimum(rule.first_end(cached), cached)
    return Met(float(from_cache.sum()), float(own_pairs.sum()), float(keys.sum()), float(new.sum()))


class _Counter:
    """Carries what the classes of one group share."""

    def __init__(
        self, plan: StepPlan, topology: Topology, group: int, sizes: ExchangeSizes
    ) -> None:
        self.plan, self.topology, self.sizes = plan, topology, sizes
        self.model = topology.model
        self.group: GroupPlan = plan.groups[group]
        self.rule = topology.groups[group].visibility
        self.ranks = topology.groups[group].world_size
        self.row_bytes = (
            sizes.stored_heads * row_format(self.model, topology.kv_cache_dtype).row_bytes
        )

    def of_class(self, row_class: RowClass, num_rows: int) -> Work:
        lengths = self._lengths(row_class)
        met = meet(self.rule, lengths)
        if self.model.sparse is not None:
            return self._sparse(met, lengths, num_rows)
        if row_class is RowClass.COPY:
            return self._where_they_lie(met)
        total = sum(new for _, new in lengths)
        return self._distributed(row_class, met, num_rows / total)

    def _lengths(self, row_class: RowClass) -> list[tuple[int, int]]:
        members = zip(self.plan.batch.requests, self.plan.rows.classes, strict=True)
        return [
            (request.num_computed_tokens, len(request.token_ids))
            for request, found in members
            if found is row_class
        ]

    def _absorbed(self, pairs: float, lanes: int) -> float:
        """Operations of rows that meet keys as they are stored."""
        return 2.0 * pairs * lanes * (self.sizes.query_width + self.sizes.partial_width)

    def _expanded(self, pairs: float, keys: float) -> float:
        """Operations of own lanes that meet keys of their own width, and of making these."""
        mla, lanes = self.model.mla, self.sizes.lanes
        operations = 2.0 * pairs * lanes * (self.model.head_dim + self.model.output_head_dim)
        if mla is not None:
            width = mla.qk_nope_head_dim + mla.v_head_dim
            operations += 2.0 * keys * lanes * mla.kv_lora_rank * width
        return operations

    def _where_they_lie(self, met: Met) -> Work:
        """COPY rows: every rank meets its share of all keys, for the lanes of its slice."""
        lanes = self.sizes.lanes * (self.sizes.slice_size if self.ranks > 1 else 1)
        pairs = (met.cached_pairs + met.own_pairs) / self.ranks
        keys = (met.cached_keys + met.own_keys) / self.ranks
        return Work(self._absorbed(pairs, lanes), keys * self.row_bytes)

    def _distributed(self, row_class: RowClass, met: Met, share: float) -> Work:
        """SPLIT and WHOLE rows; `share` is that of a rank's rows, pads included, among all."""
        own = Work(
            self._expanded(met.own_pairs * share, met.own_keys), met.own_keys * self.row_bytes
        )
        part = self.group.classes[row_class]
        if part.context == "none":
            return own
        pairs = met.cached_pairs * share
        if part.context in _TRAVELLING:
            read = met.cached_keys / self.ranks * self.row_bytes
            return own + Work(self._absorbed(pairs, self.sizes.lanes), read)
        is_whole = row_class is RowClass.WHOLE and part.context == "local"
        keys = met.cached_keys * (share if is_whole else 1.0)
        # Keys that arrive are written to a workspace and read there.
        passes = 1 if part.context == "local" else 2
        return own + Work(self._expanded(pairs, keys), passes * keys * self.row_bytes)

    def _sparse(self, met: Met, lengths: Sequence[tuple[int, int]], num_rows: int) -> Work:
        """An indexer scores every key, rows meet the best; all of it where keys lie."""
        sparse = self.model.sparse
        assert sparse is not None, "asked for a sparse model only"
        total = sum(new for _, new in lengths)
        share, spread = num_rows / total, self.sizes.num_replicas / self.ranks
        pairs = (met.cached_pairs + met.own_pairs) * share * spread
        seen = sum(min(sparse.top_k, cached + new) * new for cached, new in lengths) * share
        lanes = self.sizes.lanes * (self.sizes.slice_size if self.ranks > 1 else 1)
        operations = 2.0 * pairs * sparse.num_heads * sparse.head_dim
        operations += self._absorbed(seen * spread, lanes)
        element = DTYPE_BYTES.get(self.topology.kv_cache_dtype, 1)
        keys = (met.cached_keys + met.own_keys) / self.ranks
        chosen = min(seen * spread, keys) * self.row_bytes
        return Work(operations, keys * sparse.head_dim * element + chosen)
