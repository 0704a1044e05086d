"""The collectives of one step, as one rank issues them.

Derived from the plan alone. A rank checks every call against this list before it is made, so a
divergence stops where it starts and never crosses data. Members of a group hold equal entries;
groups of one issue nothing.

Legend: `M` local rows, `E` hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from heddle.step.exchanges import ExchangeSizes, describe, new_rows_gather
from heddle.step.experts import expert_calls
from heddle.step.norms import norm_sums
from heddle.step.plan import StepPlan
from heddle.step.recurrent import recurrent_collectives
from heddle.step.sparse import sparse_calls
from heddle.step.topology import Topology
from heddle.step.traffic import Collective


@dataclass(frozen=True, slots=True)
class Schedule:
    """All calls of one rank in one step."""

    prologue: tuple[Collective, ...]
    layers: tuple[tuple[Collective, ...], ...]
    """One entry per layer of the rank's stage."""
    epilogue: tuple[Collective, ...]

    @property
    def layer_ends(self) -> tuple[int, ...]:
        """Calls before the first layer, and before the end of each layer."""
        return tuple(accumulate(map(len, self.layers), initial=len(self.prologue)))

    def __iter__(self) -> Iterator[Collective]:
        yield from self.prologue
        for layer in self.layers:
            yield from layer
        yield from self.epilogue


@dataclass(frozen=True)
class LayerCalls:
    """The calls of one layer, by the part of it that makes them."""

    projection: tuple[Collective, ...]
    attention: tuple[Collective, ...]
    output: tuple[Collective, ...]
    feed_forward: tuple[Collective, ...]

    @cached_property
    def all(self) -> tuple[Collective, ...]:
        """In order."""
        return self.projection + self.attention + self.output + self.feed_forward


def layer_calls(plan: StepPlan, topology: Topology, global_rank: int, layer: int) -> LayerCalls:
    """The calls of a layer of a rank's stage, by part; other arguments as of
    `collective_schedule`.
    """
    return _ScheduleBuilder(plan, topology, global_rank).parts(layer)


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
        self.plan = plan
        self.topology = topology
        self.model = topology.model
        self.mesh = topology.mesh
        self.coord = topology.mesh.coord_of(global_rank)
        self.sizes = ExchangeSizes.of(topology, self.coord.tp)
        self.hidden = (plan.rows.num_local_rows, topology.model.hidden_size)
        self.layers = topology.stage_layers(global_rank)
        self.recurrent = tuple(self._recurrence())
        self.by_group = [tuple(self._attention(group)) for group in range(len(topology.groups))]
        self.by_kind: dict[tuple[int | None, bool], LayerCalls] = {}

    def run(self) -> Schedule:
        is_first, is_last = self.coord.pp == 0, self.coord.pp == self.mesh.pp_size - 1
        return Schedule(
            prologue=tuple(self._sum() if is_first else self._hand_over("receive")),
            layers=tuple(map(self._layer, self.layers)),
            epilogue=tuple(self._logits() if is_last else self._hand_over("send")),
        )

    def _hand_over(self, op: str) -> Iterator[Collective]:
        yield Collective(op, "pp", self.hidden, self.topology.dtype)

    def _sum(self) -> Iterator[Collective]:
        if self.mesh.tp_size > 1:
            yield Collective("all_reduce", "tp", self.hidden, self.topology.dtype)

    def _layer(self, layer: int) -> tuple[Collective, ...]:
        return self.parts(layer).all

    def parts(self, layer: int) -> LayerCalls:
        """Layers of one kind say the same."""
        model = self.model
        is_recurrent = model.kind_of(layer).mixer == "recurrent"
        group = None if is_recurrent else self.topology.group_of_layer[layer]
        has_experts = model.moe is not None and model.moe.has_experts(layer)
        key = (group, has_experts)
        if key not in self.by_kind:
            self.by_kind[key] = self._kind(group, has_experts=has_experts)
        return self.by_kind[key]

    def _kind(self, group: int | None, *, has_experts: bool) -> LayerCalls:
        """Of layers of a cache group (None: recurrent ones), with experts or without."""
        rows, topology = self.plan.rows, self.topology
        sums = tuple(self._sum())
        experts = tuple(expert_calls(rows, topology)) if has_experts else ()
        return LayerCalls(
            projection=() if group is None else tuple(norm_sums(rows, topology)),
            attention=self.recurrent if group is None else self.by_group[group],
            output=sums,
            feed_forward=experts + sums,
        )

    def _recurrence(self) -> Iterator[Collective]:
        layout = self.topology.recurrent_layout
        if layout is not None:
            calls = recurrent_collectives(
                self.plan.rows, layout, self.coord.tp, self.topology.dtype
            )
            yield from (Collective(*call) for call in calls)

    def _attention(self, group: int) -> Iterator[Collective]:
        if self.model.sparse is not None:
            yield from sparse_calls(self.plan, self.topology, self.sizes)
            return
        plan, rows = self.plan.groups[group], self.plan.rows
        yield from new_rows_gather(plan.new_rows, rows.num_distributed, self.sizes, plan.halo_rows)
        for row_class, part in plan.classes.items():
            start, end = rows.class_rows(row_class)
            yield from describe(part, end - start, self.sizes)

    def _logits(self) -> Iterator[Collective]:
        logits = self.plan.logits
        if logits.num_rows == 0:
            return
        if logits.crosses_pcp:
            shape = (logits.num_padded, self.model.hidden_size)
            yield Collective("all_gather", "pcp", shape, self.topology.dtype)
        if self.mesh.tp_size > 1 and self.coord.pcp == 0:
            share = -(-self.model.vocab_size // self.mesh.tp_size)
            shape = (logits.num_rows, share)
            yield Collective("all_gather", "tp", shape, self.topology.dtype)
