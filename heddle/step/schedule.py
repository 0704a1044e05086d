"""The collectives of one step, as one rank issues them.

Derived from the plan alone. A rank checks every call against this list before it is made, so a
divergence stops where it starts and never crosses data. Members of a group hold equal entries;
groups of one issue nothing.

Legend: `M` local rows, `n` distributed rows, `c` COPY rows, `h` query-head lanes, `Ks` stored kv
heads, `W` width of a stored row, `Dq`, `Do` widths of a travelling query and of a partial, `E`
hidden size, `N` DCP ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from heddle.layout.mesh import GroupKind
from heddle.step.plan import StepPlan
from heddle.step.topology import Topology


class Collective(NamedTuple):
    """One call: what is sent, by shape and dtype."""

    op: str
    group: GroupKind
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """All calls of one rank in one step."""

    prologue: tuple[Collective, ...]
    layer: tuple[Collective, ...]
    num_layers: int
    epilogue: tuple[Collective, ...]

    def __iter__(self) -> Iterator[Collective]:
        yield from self.prologue
        for _ in range(self.num_layers):
            yield from self.layer
        yield from self.epilogue


def collective_schedule(plan: StepPlan, topology: Topology, global_rank: int) -> Schedule:
    """The calls of one rank.

    Args:
        plan: the plan of the step.
        topology: constants of the engine.
        global_rank: rank in the world.
    """
    return _ScheduleBuilder(plan, topology, global_rank).run()


class _ScheduleBuilder:
    """Carries the sizes that the parts of a layer share."""

    def __init__(self, plan: StepPlan, topology: Topology, global_rank: int) -> None:
        mesh, model = topology.mesh, topology.model
        coord = mesh.coord_of(global_rank)
        self.plan = plan
        self.model = model
        self.is_deciding_row = coord.pcp == 0
        self.tp, self.pcp, self.dcp = mesh.tp_size, mesh.pcp_size, mesh.dcp_size
        self.replicas, self.slice_size = mesh.num_replicas, mesh.slice_size
        self.stored_heads = topology.heads.num_stored_kv_heads(mesh.slice_of(coord.tp))
        self.lanes = topology.heads.lanes
        self.dtype = topology.dtype
        self.kv_dtype = topology.kv_cache_dtype
        self.partial_dtype = "float64" if topology.dtype == "float64" else "float32"

    def run(self) -> Schedule:
        rows = self.plan.rows.num_local_rows
        hidden = self._sum((rows, self.model.hidden_size))
        return Schedule(
            prologue=tuple(hidden),
            layer=(*self._new_kv(), *self._copy(), *self._context(), *hidden, *hidden),
            num_layers=self.model.num_layers,
            epilogue=tuple(self._logits()),
        )

    def _sum(self, shape: tuple[int, ...]) -> list[Collective]:
        return [Collective("all_reduce", "tp", shape, self.dtype)] if self.tp > 1 else []

    def _new_kv(self) -> Iterator[Collective]:
        n = self.plan.rows.num_distributed
        if self.pcp > 1 and n > 0:
            shape = (n, self.stored_heads, self.model.stored_row_width)
            yield Collective("all_gather", "pcp", shape, self.kv_dtype)

    def _copy(self) -> Iterator[Collective]:
        rows = self.plan.rows.num_copy
        if self.dcp == 1 or rows == 0:
            return
        if self.slice_size > 1:
            shape = (rows, self.lanes, self.model.stored_key_width)
            yield Collective("all_gather", "slice", shape, self.dtype)
        yield from self._partials_return(self.plan.copy_exchange, rows, rows)

    def _context(self) -> Iterator[Collective]:
        n = self.plan.rows.num_distributed
        if self.dcp == 1 or self.plan.context_exchange == "none":
            return
        if self.plan.context_exchange == "gather_q":
            shape = (n, self.lanes, self.model.stored_key_width)
            yield Collective("all_gather", "dcp", shape, self.dtype)
            yield from self._partials_return(self.plan.merge_exchange, self.replicas * n, n)
            return
        for chunk in self.plan.context_chunks:
            width = self.model.stored_row_width
            shape = (chunk.padded_local_rows, self.stored_heads, width)
            yield Collective("all_gather", "dcp", shape, self.kv_dtype)

    def _partials_return(self, exchange: str, rows: int, own_rows: int) -> Iterator[Collective]:
        """The way back of partials over `rows` gathered rows, of which a rank wants `own_rows`."""
        heads, width = self.slice_size * self.lanes, self.model.partial_width
        per_rank = (self.dcp, own_rows, self.lanes)
        if exchange == "a2a":
            yield Collective("all_to_all", "dcp", (*per_rank, width + 1), self.partial_dtype)
            return
        yield Collective("all_gather", "dcp", (rows, heads), self.partial_dtype)
        if exchange == "ag_rs":
            yield Collective("reduce_scatter", "dcp", (*per_rank, width), self.partial_dtype)
        elif exchange == "ag_ar":
            yield Collective("all_reduce", "dcp", (rows, heads, width), self.partial_dtype)
        else:
            raise ValueError(
                f"exchange {exchange!r} has no calls in the schedule; "
                "those that have some are ag_rs, ag_ar and a2a"
            )

    def _logits(self) -> Iterator[Collective]:
        logits = self.plan.logits
        if logits.num_rows == 0:
            return
        if logits.crosses_pcp:
            shape = (logits.num_padded, self.model.hidden_size)
            yield Collective("all_gather", "pcp", shape, self.dtype)
        if self.tp > 1 and self.is_deciding_row:
            share = -(-self.model.vocab_size // self.tp)
            yield Collective("all_gather", "tp", (logits.num_rows, share), self.dtype)
