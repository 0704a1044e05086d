"""Seconds of a step on a device: the one model of cost that plans and simulations use.

    stage    = layers * (dense + experts + attention + overhead) + exposed exchanges + head
    step     = the sum over stages + overhead of a step
    part     = the longer of  operations / rate of arithmetic  and  bytes read / rate of memory,
               and of the shorter the share that does not hide under it
    exchange = calls * alpha + received bytes / beta, link by link; what arrives while a rank
               computes is paid only as far as the computing does not hide it

Rates are peaks times efficiencies (`devices`); with both ends of their ranges a prediction becomes
a band. Nothing here knows of queues: who runs when is a scheduler's business.

Source: the roofline model (Williams et al., 2009); alpha-beta costs of collectives (Hockney, 1994).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from heddle.planner.arithmetic import (
    Work,
    attention_work,
    dense_work,
    expert_work,
    recurrent_work,
)
from heddle.planner.batches import Rows, create_batch
from heddle.planner.devices import Edge, Rates
from heddle.planner.memory import PlannedEngine
from heddle.planner.parts import RankWeights
from heddle.planner.traffic import Traffic, step_traffic
from heddle.step.plan import StepPlan, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one pipeline stage in one step, by what they are spent on."""

    dense: float
    experts: float
    attention: float
    exchange: float
    """Not hidden by arithmetic."""
    head: float
    overhead: float

    @property
    def total(self) -> float:
        """All of it."""
        parts = self.dense + self.experts + self.attention
        return parts + self.exchange + self.head + self.overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One step."""

    stages: tuple[StageTime, ...]
    step_seconds: float
    """Overhead of the step itself."""
    traffic: Traffic
    """Of a rank of the first stage."""
    reasons: tuple[str, ...]
    """Why rows were placed and exchanges chosen as they were."""

    @property
    def seconds(self) -> float:
        """From the start of the step to its tokens."""
        return self.step_seconds + sum(stage.total for stage in self.stages)

    @property
    def slowest_stage(self) -> float:
        """After which the next step may enter, where stages work on several at once."""
        return max(stage.total for stage in self.stages) + self.step_seconds / len(self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What the heaviest rank of a stage does in one step: no rate is in it."""

    rank: int
    """Global rank."""
    num_layers: int
    dense: tuple[Work, ...]
    """Of layers of one kind, together."""
    experts: tuple[Work, ...]
    attention: tuple[Work, ...]
    """Of cache groups and of recurrent layers."""
    head: Work
    traffic: Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step, before it is priced."""

    stages: tuple[StageWork, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class CostModel:
    """Steps of one planned engine; equal steps are priced once, and counted once for all ends of
    the ranges.
    """

    engine: PlannedEngine
    edge: Edge = "mid"
    _known: dict[tuple[Rows, ...], StepCost] = field(default_factory=dict, repr=False)
    _works: dict[tuple[Rows, ...], StepWork] = field(default_factory=dict, repr=False)

    def at(self, edge: Edge) -> CostModel:
        """The same engine at another end of the ranges."""
        return CostModel(self.engine, edge, _works=self._works)

    @cached_property
    def rates(self) -> Rates:
        """Of one rank."""
        settings = self.engine.settings
        per_rank = settings.devices_per_rank(self.engine.parallel.world_size)
        return settings.sheet.rates(self.engine.resolved.dtype, self.edge, per_rank)

    def step(self, parts: Sequence[Rows]) -> StepCost:
        """Price one step of a replica.

        Args:
            parts: of the sequences that take part, at least one; their order matters little.
        """
        key = tuple(parts)
        if key not in self._known:
            if key not in self._works:
                topology = self.engine.topology
                self._works[key] = self._counted(plan(create_batch(topology, parts), topology))
            self._known[key] = self._priced(self._works[key])
        return self._known[key]

    def planned(self, step: StepPlan) -> StepCost:
        """Price a step whose plan is there, of this engine's topology."""
        return self._priced(self._counted(step))

    def _counted(self, step: StepPlan) -> StepWork:
        mesh = self.engine.topology.mesh
        plane = mesh.pcp_size * mesh.tp_size
        stages = [
            self._stage(step, weights, stage * plane)
            for stage, weights in enumerate(self.engine.weights)
        ]
        return StepWork(stages=tuple(stages), reasons=step.reasons)

    def _stage(self, step: StepPlan, weights: RankWeights, rank: int) -> StageWork:
        topology, rows = self.engine.topology, step.rows.num_local_rows
        head, sampled = weights.head, step.logits.num_rows
        return StageWork(
            rank=rank,
            num_layers=len(weights.layers),
            dense=tuple(dense_work(layer, rows) * count for layer, count in weights.alike),
            experts=tuple(
                expert_work(layer, step, topology) * count for layer, count in weights.alike
            ),
            attention=tuple(self._attention(step, rank)),
            head=Work(2.0 * sampled * head.row_elements, float(head.num_bytes if sampled else 0)),
            traffic=step_traffic(step, topology, rank),
        )

    def _attention(self, step: StepPlan, rank: int) -> Iterator[Work]:
        topology = self.engine.topology
        tp_rank = topology.mesh.coord_of(rank).tp
        layers = topology.stage_layers(rank)
        per_group = Counter(
            topology.group_of_layer[layer] for layer in layers if layer in topology.group_of_layer
        )
        for group, count in per_group.items():
            yield attention_work(step, topology, group, tp_rank) * count
        recurrent = len(topology.recurrent_layers(layers))
        if recurrent:
            yield recurrent_work(step, topology, tp_rank) * recurrent

    def _priced(self, work: StepWork) -> StepCost:
        return StepCost(
            stages=tuple(map(self._stage_time, work.stages)),
            step_seconds=self.rates.step_seconds,
            traffic=work.stages[0].traffic,
            reasons=work.reasons,
        )

    def _stage_time(self, work: StageWork) -> StageTime:
        rates = self.rates

        def seconds(works: tuple[Work, ...]) -> float:
            each = (w.seconds(rates.flops, rates.memory, rates.serial_share) for w in works)
            return sum(each)

        attention = sum(
            w.seconds(rates.attention_flops, rates.cache, rates.serial_share)
            for w in work.attention
        )
        talking, hidden = work.traffic.seconds(rates, self.engine.topology, work.rank)
        return StageTime(
            dense=seconds(work.dense),
            experts=seconds(work.experts),
            attention=attention,
            exchange=talking - min(hidden, attention),
            head=seconds((work.head,)),
            overhead=work.num_layers * rates.layer_seconds,
        )
